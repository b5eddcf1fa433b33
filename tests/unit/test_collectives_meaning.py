"""What each op writes, for hand-made inputs, and what a call says about itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from phalanx.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from phalanx.types import DTYPE_CODES, NO_REDUCE_OP, NO_ROOT, Call, GroupInfo, carry_out

SUM, AVG, MAX, PREMUL_SUM = 0, 1, 4, 8
SIZE = 3


# By number.
DTYPES: dict[int, torch.dtype | None] = {0: None} | {code: dtype for dtype, code in DTYPE_CODES.items()}


def run(build: Callable[[GroupInfo], Call], size: int = SIZE) -> list[Call]:
    """One call a rank, and their meaning."""
    calls = [build(GroupInfo("g", rank, size)) for rank in range(size)]
    carry_out(calls)
    return calls


def signature(call: Call) -> tuple[object, ...]:
    what = call.description
    return (what.op, what.reduce_op, what.root, DTYPES[what.dtype], what.count, what.layout)


def lists(tensors: Sequence[Tensor]) -> list[object]:
    return [tensor.tolist() for tensor in tensors]


def test_barrier_moves_nothing() -> None:
    for call in run(barrier.build):
        assert signature(call) == ("barrier", NO_REDUCE_OP, NO_ROOT, None, 0, 0)
        assert call.inputs is None
        assert call.outputs is None


def test_all_reduce() -> None:
    tensors = [torch.tensor([1.0, 2.0]) * (rank + 1) for rank in range(SIZE)]
    calls = run(lambda info: all_reduce.build(info, tensors[info.rank], SUM))
    assert lists(tensors) == [[6.0, 12.0]] * SIZE
    assert {signature(call) for call in calls} == {("all_reduce", SUM, NO_ROOT, torch.float32, 2, 0)}
    assert calls[1].inputs is not None
    assert calls[1].outputs is not None
    assert calls[1].inputs.tensors[0] is calls[1].outputs.tensors[0] is tensors[1]


def test_all_reduce_uses_the_factor_of_each_rank() -> None:
    tensors = [torch.tensor([1, 10]) for _ in range(SIZE)]
    run(lambda info: all_reduce.build(info, tensors[info.rank], PREMUL_SUM, float(info.rank)))
    assert lists(tensors) == [[3, 30]] * SIZE


def test_all_reduce_coalesced() -> None:
    tensors = [[torch.tensor([rank]), torch.tensor([[rank, 2]]), torch.empty(0).long()] for rank in range(SIZE)]
    calls = run(lambda info: all_reduce.build_coalesced(info, tensors[info.rank], MAX))
    assert [lists(row) for row in tensors] == [[[2], [[2, 2]], []]] * SIZE
    assert calls[0].description.count == 3
    assert calls[0].description.layout != 0


def test_reduce_writes_on_the_root_only() -> None:
    tensors = [torch.tensor([rank]) for rank in range(SIZE)]
    calls = run(lambda info: reduce.build(info, tensors[info.rank], 1, SUM))
    assert lists(tensors) == [[0], [3], [2]]
    assert [call.outputs is None for call in calls] == [True, False, True]
    assert {signature(call) for call in calls} == {("reduce", SUM, 1, torch.int64, 1, 0)}


def test_broadcast() -> None:
    tensors = [torch.full((2, 2), rank).t() for rank in range(SIZE)]
    tensors[2] = torch.tensor([1, 2, 3, 4])
    calls = run(lambda info: broadcast.build(info, tensors[info.rank], 2))
    assert lists(tensors) == [[[1, 2], [3, 4]], [[1, 2], [3, 4]], [1, 2, 3, 4]]
    assert [(call.inputs is None, call.outputs is None) for call in calls] == [(True, False)] * 2 + [(False, True)]


def test_broadcast_coalesced_mixes_dtypes() -> None:
    tensors = [[torch.tensor([rank]), torch.tensor([float(rank)] * 2)] for rank in range(SIZE)]
    calls = run(lambda info: broadcast.build_coalesced(info, tensors[info.rank], 1))
    assert [lists(row) for row in tensors] == [[[1], [1.0, 1.0]]] * SIZE
    swapped = broadcast.build_coalesced(GroupInfo("g", 0, SIZE), [torch.zeros(1), torch.zeros(2).long()], 1)
    assert swapped.description.layout != calls[0].description.layout


def test_all_gather_of_uneven_tensors() -> None:
    sizes = [2, 0, 1]
    outputs = [[torch.zeros(size) for size in sizes] for _ in range(SIZE)]
    calls = run(lambda i: all_gather.build(i, outputs[i.rank], torch.full((sizes[i.rank],), float(i.rank))))
    assert [lists(row) for row in outputs] == [[[0.0, 0.0], [], [2.0]]] * SIZE
    assert calls[0].description.count == 3
    assert calls[0].description.layout == calls[2].description.layout != 0


def test_all_gather_single_concatenates_or_stacks() -> None:
    outputs = [torch.zeros(6), torch.zeros(3, 2), torch.zeros(2, 3).t()]
    calls = run(lambda i: all_gather.build_single(i, outputs[i.rank], torch.tensor([1.0, 2.0]) * i.rank))
    assert lists(outputs) == [[0, 0, 1, 2, 2, 4], [[0, 0], [1, 2], [2, 4]], [[0, 0], [1, 2], [2, 4]]]
    assert {signature(call) for call in calls} == {("all_gather", NO_REDUCE_OP, NO_ROOT, torch.float32, 6, 0)}


def test_all_gather_in_place() -> None:
    outputs = [torch.arange(6) + 10 * rank for rank in range(SIZE)]
    run(lambda i: all_gather.build_single(i, outputs[i.rank], outputs[i.rank][2 * i.rank : 2 * i.rank + 2]))
    assert lists(outputs) == [[0, 1, 12, 13, 24, 25]] * SIZE


def test_all_gather_coalesced_in_both_forms() -> None:
    inputs = [[torch.tensor([rank]), torch.tensor([float(rank), 5.0])] for rank in range(SIZE)]
    listed = [[[torch.zeros(1).long(), torch.zeros(2)] for _ in range(SIZE)] for _ in range(SIZE)]
    single = [[torch.zeros(3).long(), torch.zeros(6)] for _ in range(SIZE)]
    first = run(lambda i: all_gather.build_coalesced(i, listed[i.rank], inputs[i.rank]))
    second = run(lambda i: all_gather.build_single_coalesced(i, single[i.rank], inputs[i.rank]))
    assert [[lists(block) for block in row] for row in listed] == [
        [[[0], [0.0, 5.0]], [[1], [1.0, 5.0]], [[2], [2.0, 5.0]]]
    ] * SIZE
    assert [lists(row) for row in single] == [[[0, 1, 2], [0.0, 5.0, 1.0, 5.0, 2.0, 5.0]]] * SIZE
    assert signature(first[0]) == signature(second[1])


def test_gather_and_scatter() -> None:
    outputs = [torch.zeros(1, 2) for _ in range(SIZE)]
    run(lambda i: gather.build(i, outputs if i.rank == 2 else None, torch.tensor([i.rank, 7.0]), 2))
    assert lists(outputs) == [[[0.0, 7.0]], [[1.0, 7.0]], [[2.0, 7.0]]]
    inputs = [torch.tensor([p, 8.0]) for p in range(SIZE)]
    calls = run(lambda i: scatter.build(i, outputs[i.rank], inputs if i.rank == 1 else [], 1))
    assert lists(outputs) == [[[0.0, 8.0]], [[1.0, 8.0]], [[2.0, 8.0]]]
    assert {signature(call) for call in calls} == {("scatter", NO_REDUCE_OP, 1, torch.float32, 2, 0)}


def test_reduce_scatter_of_uneven_blocks() -> None:
    sizes = [1, 3, 0]
    outputs = [torch.zeros(size) for size in sizes]
    calls = run(
        lambda i: reduce_scatter.build(i, outputs[i.rank], [torch.full((n,), 1.0 + i.rank) for n in sizes], SUM)
    )
    assert lists(outputs) == [[6.0], [6.0, 6.0, 6.0], []]
    assert calls[0].description.count == 4
    assert calls[0].description.layout == calls[1].description.layout != 0


def test_reduce_scatter_single_in_place() -> None:
    tensors = [torch.arange(6.0) * (rank + 1) for rank in range(SIZE)]
    run(lambda i: reduce_scatter.build_single(i, tensors[i.rank][2 * i.rank :][:2], tensors[i.rank], AVG))
    assert lists(tensors) == [
        [0.0, 2.0, 2.0, 3.0, 4.0, 5.0],
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0],
        [0.0, 3.0, 6.0, 9.0, 8.0, 10.0],
    ]


def test_reduce_scatter_single_coalesced() -> None:
    inputs = [[torch.arange(3), torch.arange(6).view(2, 3).t()] for _ in range(SIZE)]
    outputs = [[torch.zeros(()).long(), torch.zeros(2).long()] for _ in range(SIZE)]
    run(lambda i: reduce_scatter.build_single_coalesced(i, outputs[i.rank], inputs[i.rank], SUM))
    assert [lists(row) for row in outputs] == [[0, [0, 9]], [3, [3, 12]], [6, [6, 15]]]


def test_all_to_all_lists() -> None:
    outputs = [[torch.zeros(q) for q in range(SIZE)] for _ in range(SIZE)]
    calls = run(
        lambda i: all_to_all.build(i, outputs[i.rank], [torch.full((i.rank,), 10.0 * i.rank + q) for q in range(SIZE)])
    )
    assert [lists(row) for row in outputs] == [[[], [10.0 + q], [20.0 + q, 20.0 + q]] for q in range(SIZE)]
    assert {(call.description.count, call.description.layout) for call in calls} == {(-1, 0)}


def test_all_to_all_single_splits_rows() -> None:
    splits = [[0, 1, 2], [1, 1, 0], [3, 0, 0]]  # splits[p][q] rows go from p to q
    inputs = [torch.stack([torch.arange(sum(row)), torch.full((sum(row),), p)], 1) for p, row in enumerate(splits)]
    columns = [[splits[p][q] for p in range(SIZE)] for q in range(SIZE)]
    outputs = [torch.zeros(sum(column), 2, dtype=torch.int64) for column in columns]
    calls = run(lambda i: all_to_all.build_single(i, outputs[i.rank], inputs[i.rank], columns[i.rank], splits[i.rank]))
    assert lists(outputs) == [[[0, 1], [0, 2], [1, 2], [2, 2]], [[0, 0], [1, 1]], [[1, 0], [2, 0]]]
    assert calls[0].inputs is not None
    assert calls[0].inputs.sizes == [0, 2, 4]


def test_all_to_all_single_in_equal_parts_in_place() -> None:
    tensors = [torch.arange(3) + 10 * rank for rank in range(SIZE)]
    run(lambda i: all_to_all.build_single(i, tensors[i.rank], tensors[i.rank], [], []))
    assert lists(tensors) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


def test_spellings_of_one_op_agree() -> None:
    info, part, whole = GroupInfo("g", 0, 2), torch.zeros(2), torch.zeros(4)
    assert signature(all_gather.build(info, [part, part.clone()], part)) == signature(
        all_gather.build_single(info, whole, part)
    )
    assert signature(reduce_scatter.build(info, part, [part, part], MAX)) == signature(
        reduce_scatter.build_single(info, part, whole, MAX)
    )
    assert signature(all_reduce.build(info, part, MAX)) == signature(all_reduce.build_coalesced(info, [part], MAX))


def test_the_layout_tells_divisions_apart() -> None:
    info = GroupInfo("g", 0, 2)

    def layout(*sizes: int) -> int:
        return all_reduce.build_coalesced(info, [torch.zeros(size) for size in sizes], SUM).description.layout

    assert layout(1, 3) == layout(1, 3)
    assert len({layout(1, 3), layout(3, 1), layout(2, 2), layout(1, 1, 2), layout(4)}) == 5


def test_the_layout_is_the_same_in_every_process() -> None:
    program = (
        "import torch; from phalanx.types import GroupInfo; from phalanx.collectives import broadcast; "
        "call = broadcast.build_coalesced(GroupInfo('g', 0, 2), [torch.zeros(2), torch.zeros(3).int()], 1); "
        "print(call.description.layout)"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r}; "
    printed = subprocess.run([sys.executable, "-c", path + program], check=True, capture_output=True, text=True).stdout
    here = broadcast.build_coalesced(GroupInfo("g", 0, 2), [torch.zeros(2), torch.zeros(3).int()], 1).description.layout
    assert int(printed) == here != 0


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e8m0fnu, torch.bits8, torch.bits16, torch.uint3, torch.int1],  # type: ignore[attr-defined]
    ids=str,
)
def test_dtypes_without_arithmetic_move(dtype: torch.dtype) -> None:
    def make(first: int) -> Tensor:
        return torch.arange(first, first + 2 * dtype.itemsize, dtype=torch.uint8).view(dtype)

    outputs = [[make(0), make(0)] for _ in range(2)]
    run(lambda i: all_gather.build(i, outputs[i.rank], make(10 * (i.rank + 1))), size=2)
    expected = [make(10).view(torch.uint8).tolist(), make(20).view(torch.uint8).tolist()]
    assert [[tensor.view(torch.uint8).tolist() for tensor in row] for row in outputs] == [expected] * 2


@pytest.mark.filterwarnings("ignore:.*quant:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quant:UserWarning")
def test_quantized_tensors_keep_their_own_scale() -> None:
    tensors = [torch.quantize_per_tensor(torch.arange(4.0), scale, 1, torch.qint32) for scale in (0.5, 0.25)]
    run(lambda i: broadcast.build(i, tensors[i.rank], 0), size=2)
    assert tensors[1].int_repr().tolist() == tensors[0].int_repr().tolist() == [1, 3, 5, 7]
    assert tensors[1].q_scale() == 0.25


def test_outputs_may_require_grad_or_belong_to_inference_mode() -> None:
    with torch.inference_mode():
        inference = torch.zeros(2)
    tensors = [torch.ones(2), torch.zeros(2, requires_grad=True), inference]
    run(lambda i: broadcast.build(i, tensors[i.rank], 0))
    run(lambda i: all_reduce.build(i, tensors[i.rank], SUM))
    assert lists(tensors) == [[3.0, 3.0]] * 3
    assert tensors[1].is_leaf


def test_lazily_conjugated_and_negated_tensors() -> None:
    conjugated = [torch.tensor([1 + 2j, 3 - 1j]).conj(), torch.zeros(2, dtype=torch.complex64).conj()]
    run(lambda i: all_reduce.build(i, conjugated[i.rank], SUM), size=2)
    assert lists(conjugated) == [[1 - 2j, 3 + 1j]] * 2
    assert conjugated[1].is_conj()
    negated = [torch.tensor([1 + 2j]).conj().imag, torch.tensor([1 + 5j]).conj().imag]
    run(lambda i: broadcast.build(i, negated[i.rank], 0), size=2)
    assert lists(negated) == [[-2.0]] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_empty_tensors(size: int) -> None:
    empty = torch.zeros(0, 3)
    run(lambda i: all_reduce.build(i, empty, SUM), size)
    run(lambda i: broadcast.build(i, empty, 0), size)
    run(lambda i: all_gather.build_single(i, empty, empty), size)
    run(lambda i: reduce_scatter.build_single(i, empty, empty, MAX), size)
    run(lambda i: all_to_all.build_single(i, empty, empty, [], []), size)
    run(lambda i: all_to_all.build_single(i, empty, empty, [0] * size, []), size)
    run(lambda i: gather.build(i, [empty] * size if i.rank == 0 else None, empty, 0), size)
