"""reduce_scatter: rank p gets the reduction of all ranks' block p.

Blocks may differ in size where the inputs are a list, as long as all ranks pass the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import (
    check_apart,
    check_list,
    check_reduction,
    check_same_dtype,
    check_size,
    check_tensor,
    fail,
    hash_layout,
)
from phalanx.collectives.moving import give, take
from phalanx.collectives.reduction import reduce_in_rank_order
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_single", "build_single_coalesced", "meaning"]


def build(info: GroupInfo, output: Tensor, inputs: Sequence[Tensor], reduce_op: int, factor: float = 1.0) -> Call:
    numel = check_tensor(info, "reduce_scatter", "output", output, written=True)
    numels = check_list(info, "reduce_scatter", "inputs", inputs, info.size)
    dtype = output.dtype
    check_same_dtype(info, "reduce_scatter", "inputs", inputs, dtype)
    check_size(info, "reduce_scatter", "output", numel, numels[info.rank], f"as in inputs[{info.rank}]")
    check_reduction(info, "reduce_scatter", dtype, reduce_op, factor)
    return Call(
        "reduce_scatter",
        meaning,
        Blocks(list(inputs), info.size, listed=True),
        Blocks([output]),
        dtype=dtype,
        count=sum(numels),
        layout=hash_layout([[numel] for numel in numels]),
        reduce_op=reduce_op,
        factor=factor,
    )


def build_single(info: GroupInfo, output: Tensor, tensor: Tensor, reduce_op: int, factor: float = 1.0) -> Call:
    """One input that holds the blocks of all ranks, one after another."""
    numel = check_tensor(info, "reduce_scatter", "output", output, written=True)
    count = check_tensor(info, "reduce_scatter", "tensor", tensor)
    dtype = output.dtype
    if tensor.dtype is not dtype:
        check_same_dtype(info, "reduce_scatter", "tensor", [tensor], dtype)
    if count != numel * info.size:
        check_size(info, "reduce_scatter", "tensor", count, numel * info.size, f"{info.size} ranks times {numel}")
    check_reduction(info, "reduce_scatter", dtype, reduce_op, factor)
    return Call(
        "reduce_scatter",
        meaning,
        Blocks([tensor], info.size),
        Blocks([output]),
        dtype=dtype,
        count=count,
        reduce_op=reduce_op,
        factor=factor,
    )


def build_single_coalesced(
    info: GroupInfo, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduce_op: int, factor: float = 1.0
) -> Call:
    """Several `build_single` of one dtype as one call."""
    numels = check_list(info, "reduce_scatter", "outputs", outputs, written=True)
    counts = check_list(info, "reduce_scatter", "inputs", inputs)
    if len(outputs) != len(inputs):
        fail(
            info,
            "reduce_scatter",
            "LIST",
            f"expected {len(outputs)} tensors in inputs, as in outputs, got {len(inputs)}",
            "pass one input for each output",
        )
    dtype = outputs[0].dtype
    check_same_dtype(info, "reduce_scatter", "outputs", outputs, dtype)
    check_same_dtype(info, "reduce_scatter", "inputs", inputs, dtype)
    for i, (count, numel) in enumerate(zip(counts, numels, strict=True)):
        check_size(info, "reduce_scatter", f"inputs[{i}]", count, numel * info.size, f"{info.size} ranks times {numel}")
    check_reduction(info, "reduce_scatter", dtype, reduce_op, factor)
    check_apart(info, "reduce_scatter", outputs, lambda i: f"outputs[{i}]")
    return Call(
        "reduce_scatter",
        meaning,
        Blocks(list(inputs), info.size),
        Blocks(list(outputs)),
        dtype=dtype,
        count=sum(counts),
        layout=hash_layout([numels]),
        reduce_op=reduce_op,
        factor=factor,
    )


def meaning(calls: Sequence[Call]) -> None:
    factors = [call.factor for call in calls]
    sources = [take(call.inputs) for call in calls if call.inputs]
    for rank, call in enumerate(calls):
        blocks = zip(*(source[rank] for source in sources), strict=True)
        results = [reduce_in_rank_order(tensors, call.reduce_op, factors) for tensors in blocks]
        if call.outputs:
            give(call.outputs, [results])
