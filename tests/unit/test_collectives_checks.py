"""Wrong arguments: the code, the place and the words of InvalidCall, before anybody waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from phalanx.errors import InvalidCall
from phalanx.types import Call, GroupInfo

INFO = GroupInfo("g", 1, 2)
SUM, AVG, MIN, BAND, PREMUL_SUM = 0, 1, 3, 5, 8


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([t(2)], layout=layout)


# One way to give a tensor to each op, and as what it is taken.
TAKES_A_TENSOR: dict[str, tuple[Callable[[Any], Call], str]] = {
    "all_reduce": (lambda x: all_reduce.build(INFO, x, SUM), "tensor"),
    "all_reduce_coalesced": (lambda x: all_reduce.build_coalesced(INFO, [t(2), x], SUM), "tensors[1]"),
    "reduce": (lambda x: reduce.build(INFO, x, 1, SUM), "tensor"),
    "broadcast": (lambda x: broadcast.build(INFO, x, 0), "tensor"),
    "broadcast_coalesced": (lambda x: broadcast.build_coalesced(INFO, [x], 0), "tensors[0]"),
    "all_gather_input": (lambda x: all_gather.build(INFO, [t(2), t(2)], x), "tensor"),
    "all_gather_output": (lambda x: all_gather.build(INFO, [t(2), x], t(2)), "outputs[1]"),
    "all_gather_single_output": (lambda x: all_gather.build_single(INFO, x, t(1)), "output"),
    "all_gather_single_input": (lambda x: all_gather.build_single(INFO, t(4), x), "tensor"),
    "all_gather_coalesced": (
        lambda x: all_gather.build_coalesced(INFO, [[t(2)], [x]], [t(2)]),
        "outputs[1][0]",
    ),
    "all_gather_single_coalesced": (lambda x: all_gather.build_single_coalesced(INFO, [x], [t(1)]), "outputs[0]"),
    "gather_output": (lambda x: gather.build(INFO, [t(2), x], t(2), 1), "outputs[1]"),
    "gather_input": (lambda x: gather.build(INFO, None, x, 0), "tensor"),
    "scatter_output": (lambda x: scatter.build(INFO, x, None, 0), "output"),
    "scatter_input": (lambda x: scatter.build(INFO, t(2), [x, t(2)], 1), "inputs[0]"),
    "reduce_scatter_output": (lambda x: reduce_scatter.build(INFO, x, [t(2), t(2)], SUM), "output"),
    "reduce_scatter_input": (lambda x: reduce_scatter.build(INFO, t(2), [t(2), x], SUM), "inputs[1]"),
    "reduce_scatter_single": (lambda x: reduce_scatter.build_single(INFO, t(1), x, SUM), "tensor"),
    "reduce_scatter_coalesced": (lambda x: reduce_scatter.build_single_coalesced(INFO, [t(1)], [x], SUM), "inputs[0]"),
    "all_to_all_output": (lambda x: all_to_all.build(INFO, [t(2), x], [t(2), t(2)]), "outputs[1]"),
    "all_to_all_input": (lambda x: all_to_all.build(INFO, [t(2), t(2)], [x, t(2)]), "inputs[0]"),
    "all_to_all_single": (lambda x: all_to_all.build_single(INFO, t(2), x, [], []), "tensor"),
}
WRITES_IT = [
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "broadcast_coalesced",
    "all_gather_output",
    "all_gather_single_output",
    "all_gather_coalesced",
    "all_gather_single_coalesced",
    "gather_output",
    "scatter_output",
    "reduce_scatter_output",
    "all_to_all_output",
]
WRONG_TENSORS: dict[str, tuple[Any, str]] = {
    "a number": (3.0, "INVALID:TENSOR"),
    "None": (None, "INVALID:TENSOR"),
    "sparse": (t(2).to_sparse(), "INVALID:LAYOUT"),
    "MKLDNN": (t(2).to_mkldnn(), "INVALID:LAYOUT"),
    "nested, strided": (nested(torch.strided), "INVALID:LAYOUT"),
    "nested, jagged": (nested(torch.jagged), "INVALID:LAYOUT"),
    "not initialized": (torch.nn.UninitializedParameter(), "INVALID:TENSOR"),
    "another device": (torch.zeros(2, device="meta"), "INVALID:DEVICE"),
}


def refused(call: Callable[[], Call]) -> InvalidCall:
    with pytest.raises(InvalidCall) as caught:
        call()
    error = caught.value
    assert (error.group, error.rank) == ("g", 1)
    assert error.message.startswith("expected ")
    assert ", got " in error.message
    assert error.hint
    return error


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
@pytest.mark.parametrize("op", TAKES_A_TENSOR)
def test_wrong_tensors(op: str, wrong: str) -> None:
    build, name = TAKES_A_TENSOR[op]
    tensor, code = WRONG_TENSORS[wrong]
    error = refused(lambda: build(tensor))
    assert error.code == code
    assert name in error.message
    assert error.op is not None
    assert op.startswith(error.op)


@pytest.mark.parametrize("op", WRITES_IT)
def test_outputs_that_overlap_themselves(op: str) -> None:
    build, _ = TAKES_A_TENSOR[op]
    assert refused(lambda: build(torch.zeros(1).expand(2))).code == "INVALID:OVERLAP"


# Each is given two tensors to write to.
WRITING_LISTS: dict[str, tuple[Callable[[Tensor, Tensor], Call], str]] = {
    "all_reduce": (lambda x, y: all_reduce.build_coalesced(INFO, [t(1), x, y], SUM), "tensors[1] and tensors[2]"),
    "broadcast": (lambda x, y: broadcast.build_coalesced(INFO, [x, t(2), y], 0), "tensors[0] and tensors[2]"),
    "all_gather": (lambda x, y: all_gather.build(INFO, [x, y], t(2)), "outputs[0] and outputs[1]"),
    "all_gather_coalesced": (
        lambda x, y: all_gather.build_coalesced(INFO, [[t(3), x], [t(3), y]], [t(3), t(2)]),
        "outputs[0][1] and outputs[1][1]",
    ),
    "all_gather_single_coalesced": (
        lambda x, y: all_gather.build_single_coalesced(INFO, [x, y], [t(1), t(1)]),
        "outputs[0] and outputs[1]",
    ),
    "gather": (lambda x, y: gather.build(INFO, [x, y], t(2), 1), "outputs[0] and outputs[1]"),
    "reduce_scatter_coalesced": (
        lambda x, y: reduce_scatter.build_single_coalesced(INFO, [x, y], [t(4), t(4)], SUM),
        "outputs[0] and outputs[1]",
    ),
    "all_to_all": (lambda x, y: all_to_all.build(INFO, [x, y], [t(2), t(2)]), "outputs[0] and outputs[1]"),
}


@pytest.mark.parametrize("op", WRITING_LISTS)
def test_outputs_that_share_memory(op: str) -> None:
    build, names = WRITING_LISTS[op]
    memory = t(4)
    for one, other in ((memory[:2], memory[1:3]), (memory[:2], memory[:2]), (memory[::2], memory[2:])):
        error = refused(partial(build, one, other))
        assert error.code == "INVALID:OVERLAP"
        assert names in str(error)
    # These interleave, or touch each other.
    for one, other in ((memory[::2], memory[1::2]), (memory[:2], memory[2:])):
        assert build(one, other).outputs is not None


def test_inputs_may_share_memory() -> None:
    memory = t(4)
    assert all_to_all.build(INFO, [t(2), t(2)], [memory[:2], memory[1:3]]).inputs is not None
    assert scatter.build(INFO, t(2), [memory[:2], memory[:2]], 1).inputs is not None
    assert broadcast.build_coalesced(INFO, [memory[:2], memory[:2]], 1).inputs is not None


def test_inputs_may_overlap_themselves() -> None:
    expanded = torch.zeros(1).expand(2)
    broadcast.build(INFO, expanded, 1)
    reduce.build(INFO, expanded, 0, SUM)
    all_gather.build_single(INFO, t(4), expanded)


@pytest.mark.parametrize(
    ("size", "stride", "overlaps"),
    [
        ((3, 2), (2, 3), False),
        ((2, 3), (1, 1), True),
        ((4, 3), (2, 3), True),
        ((2, 1, 5), (1, 0, 2), False),
        ((0, 2), (0, 0), False),
        ((5,), (3,), False),
    ],
)
def test_overlap_is_decided_by_addresses(size: tuple[int, ...], stride: tuple[int, ...], overlaps: bool) -> None:
    tensor = torch.zeros(40).as_strided(size, stride)
    if overlaps:
        assert refused(lambda: all_reduce.build(INFO, tensor, SUM)).code == "INVALID:OVERLAP"
    else:
        assert all_reduce.build(INFO, tensor, SUM).description.count == tensor.numel()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(8)[::2],
        torch.tensor(1.0),
        torch.zeros(0),
        torch.zeros(2, requires_grad=True),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ],
    ids=["transposed", "strided", "zero-dim", "empty", "requires_grad", "parameter", "channels_last", "conjugated"],
)
def test_tensors_of_any_shape_are_taken(tensor: Tensor) -> None:
    call = all_reduce.build(INFO, tensor, SUM)
    assert call.description.count == tensor.numel()
    assert call.inputs is not None
    assert call.inputs.tensors[0] is tensor


@pytest.mark.parametrize("root", [-1, 2, None, "0"])
def test_roots_outside_the_group(root: Any) -> None:
    for call in (
        lambda: reduce.build(INFO, t(1), root, SUM),
        lambda: broadcast.build(INFO, t(1), root),
        lambda: broadcast.build_coalesced(INFO, [t(1)], root),
        lambda: gather.build(INFO, None, t(1), root),
        lambda: scatter.build(INFO, t(1), None, root),
    ):
        assert refused(call).code == "INVALID:ROOT"


INT = torch.int32
MIXED: dict[str, Callable[[], Call]] = {
    "all_reduce_coalesced": lambda: all_reduce.build_coalesced(INFO, [t(2), t(2, dtype=INT)], SUM),
    "all_gather": lambda: all_gather.build(INFO, [t(2), t(2, dtype=INT)], t(2)),
    "all_gather_single": lambda: all_gather.build_single(INFO, t(4, dtype=INT), t(2)),
    "all_gather_coalesced": lambda: all_gather.build_coalesced(INFO, [[t(2)], [t(2, dtype=INT)]], [t(2)]),
    "all_gather_single_coalesced": lambda: all_gather.build_single_coalesced(INFO, [t(4, dtype=INT)], [t(2)]),
    "gather": lambda: gather.build(INFO, [t(2, dtype=INT), t(2)], t(2), 1),
    "scatter": lambda: scatter.build(INFO, t(2), [t(2, dtype=INT), t(2)], 1),
    "reduce_scatter": lambda: reduce_scatter.build(INFO, t(2), [t(2), t(2, dtype=INT)], SUM),
    "reduce_scatter_single": lambda: reduce_scatter.build_single(INFO, t(2), t(4, dtype=INT), SUM),
    "reduce_scatter_coalesced": lambda: reduce_scatter.build_single_coalesced(INFO, [t(1)], [t(2, dtype=INT)], SUM),
    "all_to_all": lambda: all_to_all.build(INFO, [t(2), t(2)], [t(2), t(2, dtype=INT)]),
    "all_to_all_single": lambda: all_to_all.build_single(INFO, t(2), t(2, dtype=INT), [], []),
}


@pytest.mark.parametrize("op", MIXED)
def test_mixed_dtypes(op: str) -> None:
    error = refused(MIXED[op])
    assert error.code == "INVALID:DTYPE"
    assert "torch.int32" in error.message
    assert "torch.float32" in error.message


SIZES: dict[str, Callable[[], Call]] = {
    "all_gather": lambda: all_gather.build(INFO, [t(2), t(3)], t(2)),
    "all_gather_single": lambda: all_gather.build_single(INFO, t(5), t(2)),
    "all_gather_coalesced": lambda: all_gather.build_coalesced(INFO, [[t(2)], [t(3)]], [t(2)]),
    "all_gather_single_coalesced": lambda: all_gather.build_single_coalesced(INFO, [t(4), t(3)], [t(2), t(1)]),
    "gather": lambda: gather.build(INFO, [t(2), t(3)], t(2), 1),
    "scatter": lambda: scatter.build(INFO, t(2), [t(3), t(2)], 1),
    "reduce_scatter": lambda: reduce_scatter.build(INFO, t(2), [t(2), t(3)], SUM),
    "reduce_scatter_single": lambda: reduce_scatter.build_single(INFO, t(2), t(5), SUM),
    "reduce_scatter_coalesced": lambda: reduce_scatter.build_single_coalesced(INFO, [t(2)], [t(5)], SUM),
    "all_to_all_single rows": lambda: all_to_all.build_single(INFO, t(3), t(2), [], []),
    "all_to_all_single zero-dim": lambda: all_to_all.build_single(INFO, t(2), torch.tensor(1.0), [], []),
    "all_to_all_single sum": lambda: all_to_all.build_single(INFO, t(2), t(2), [1, 1], [1, 2]),
    "all_to_all_single negative": lambda: all_to_all.build_single(INFO, t(2), t(2), [3, -1], []),
}


@pytest.mark.parametrize("op", SIZES)
def test_sizes_that_do_not_fit(op: str) -> None:
    assert refused(SIZES[op]).code == "INVALID:SIZE"


LISTS: dict[str, Callable[[], Call]] = {
    "all_reduce_coalesced empty": lambda: all_reduce.build_coalesced(INFO, [], SUM),
    "all_reduce_coalesced no list": lambda: all_reduce.build_coalesced(INFO, t(2), SUM),  # type: ignore[arg-type]
    "broadcast_coalesced": lambda: broadcast.build_coalesced(INFO, [], 0),
    "all_gather": lambda: all_gather.build(INFO, [t(2)], t(2)),
    "all_gather_coalesced lists": lambda: all_gather.build_coalesced(INFO, [[t(2)]], [t(2)]),
    "all_gather_coalesced entries": lambda: all_gather.build_coalesced(INFO, [[t(2)], [t(2), t(2)]], [t(2)]),
    "all_gather_coalesced inputs": lambda: all_gather.build_coalesced(INFO, [[], []], []),
    "all_gather_single_coalesced": lambda: all_gather.build_single_coalesced(INFO, [t(4)], [t(2), t(2)]),
    "gather on the root": lambda: gather.build(INFO, [t(2)], t(2), 1),
    "gather without a list": lambda: gather.build(INFO, None, t(2), 1),
    "gather elsewhere": lambda: gather.build(INFO, [t(2), t(2)], t(2), 0),
    "scatter on the root": lambda: scatter.build(INFO, t(2), [t(2)] * 3, 1),
    "scatter elsewhere": lambda: scatter.build(INFO, t(2), [t(2), t(2)], 0),
    "reduce_scatter": lambda: reduce_scatter.build(INFO, t(2), [t(2)], SUM),
    "reduce_scatter_coalesced": lambda: reduce_scatter.build_single_coalesced(INFO, [t(2)], [], SUM),
    "reduce_scatter_coalesced entries": lambda: reduce_scatter.build_single_coalesced(INFO, [t(1)], [t(2)] * 2, SUM),
    "all_to_all": lambda: all_to_all.build(INFO, [t(2)], [t(2), t(2)]),
    "all_to_all_single": lambda: all_to_all.build_single(INFO, t(2), t(2), [2], []),
}


@pytest.mark.parametrize("op", LISTS)
def test_lists_that_do_not_fit(op: str) -> None:
    assert refused(LISTS[op]).code == "INVALID:LIST"


REDUCTIONS: dict[str, Callable[[Tensor, Any, float], Call]] = {
    "all_reduce": lambda x, op, f: all_reduce.build(INFO, x, op, f),
    "all_reduce_coalesced": lambda x, op, f: all_reduce.build_coalesced(INFO, [x, x.clone()], op, f),
    "reduce": lambda x, op, f: reduce.build(INFO, x, 0, op, f),
    "reduce_scatter": lambda x, op, f: reduce_scatter.build(INFO, x, [x, x], op, f),
    "reduce_scatter_single": lambda x, op, f: reduce_scatter.build_single(INFO, x[:2], x, op, f),
    "reduce_scatter_coalesced": lambda x, op, f: reduce_scatter.build_single_coalesced(INFO, [x[:2]], [x], op, f),
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce_ops_that_a_dtype_does_not_have(op: str) -> None:
    build = REDUCTIONS[op]
    for dtype, reduce_op in [
        (torch.bool, AVG),
        (torch.bool, PREMUL_SUM),
        (torch.float32, BAND),
        (torch.bfloat16, BAND),
        (torch.complex64, MIN),
        (torch.float32, 9),
        (torch.float32, -1),
        (torch.float32, "SUM"),
    ]:
        assert refused(partial(build, t(4, dtype=dtype), reduce_op, 1.0)).code == "INVALID:REDUCE_OP"
    error = refused(lambda: build(t(4, dtype=torch.float8_e8m0fnu), SUM, 1.0))
    assert error.code == "INVALID:DTYPE"
    assert "float8_e8m0fnu" in error.message


@pytest.mark.parametrize("op", REDUCTIONS)
def test_factors(op: str) -> None:
    build = REDUCTIONS[op]
    for factor in (0.5, 2.0**64, float("nan"), float("inf")):
        assert refused(partial(build, t(4, dtype=INT), PREMUL_SUM, factor)).code == "INVALID:REDUCE_OP"
        assert build(t(4), PREMUL_SUM, factor).description.factor == pytest.approx(factor, nan_ok=True)
    assert build(t(4, dtype=INT), PREMUL_SUM, -3.0).description.factor == -3.0
    assert build(t(4, dtype=torch.complex64), PREMUL_SUM, 0.5).description.factor == 0.5


@pytest.mark.filterwarnings("ignore:.*quant:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quant:UserWarning")
def test_packed_elements_do_not_move() -> None:
    packed = torch.quantize_per_tensor(torch.arange(4.0), 1.0, 0, torch.quint4x2)
    assert refused(lambda: broadcast.build(INFO, packed, 1)).code == "INVALID:DTYPE"


def test_the_error_reads_well() -> None:
    error = refused(lambda: all_gather.build_single(INFO, t(5), t(2)))
    assert str(error).splitlines() == [
        "[INVALID:SIZE] all_gather, group 'g', rank 1: expected 4 elements in output (2 ranks times 2), got 5",
        "  Next: pass output with 4 elements",
    ]


def test_a_call_keeps_its_own_list() -> None:
    outputs = [t(2), t(2)]
    call = all_gather.build(INFO, outputs, t(2))
    outputs.clear()
    assert call.outputs is not None
    assert len(call.outputs.tensors) == 2
