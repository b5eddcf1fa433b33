"""all_reduce: every rank gets the reduction of all ranks' tensors, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.collectives.checks import (
    PLAIN_CLASSES,
    PLAIN_REDUCTIONS,
    check_apart,
    check_list,
    check_reduction,
    check_same_dtype,
    check_tensor,
    hash_layout,
)
from phalanx.collectives.moving import give, look, take
from phalanx.collectives.reduction import reduce_in_rank_order
from phalanx.types import DTYPE_CODES, Blocks, Call, GroupInfo

__all__ = ["build", "build_coalesced", "build_plain", "meaning", "plain"]

_STRIDED = torch.strided
_PLAIN_CODES = {(dtype, reduce_op): DTYPE_CODES[dtype] for dtype, reduce_op in PLAIN_REDUCTIONS if not dtype.is_complex}


def plain(tensor: Tensor, reduce_op: int) -> int | None:
    """The dtype's number where the call is right as it stands and the tensor's memory can be used as it is.

    Most calls are of this kind; for them no Call needs to be made.
    """
    if type(tensor) not in PLAIN_CLASSES:
        return None
    code = _PLAIN_CODES.get((tensor.dtype, reduce_op))
    # The layout of a nested tensor may be strided as well.
    fits = tensor.layout is _STRIDED and tensor.is_cpu and not tensor.is_nested
    fits = fits and tensor.is_contiguous() and not tensor.is_neg()
    return code if fits else None


def build(info: GroupInfo, tensor: Tensor, reduce_op: int, factor: float = 1.0) -> Call:
    count = check_tensor(info, "all_reduce", "tensor", tensor, written=True)
    dtype = tensor.dtype
    check_reduction(info, "all_reduce", dtype, reduce_op, factor)
    blocks = Blocks([tensor])
    return Call("all_reduce", meaning, blocks, blocks, dtype=dtype, count=count, reduce_op=reduce_op, factor=factor)


def build_plain(tensor: Tensor, reduce_op: int) -> Call:
    """`build` for what `plain` has found to be right."""
    blocks = Blocks([tensor])
    return Call("all_reduce", meaning, blocks, blocks, dtype=tensor.dtype, count=tensor.numel(), reduce_op=reduce_op)


def build_coalesced(info: GroupInfo, tensors: Sequence[Tensor], reduce_op: int, factor: float = 1.0) -> Call:
    """Several tensors of one dtype as one call."""
    numels = check_list(info, "all_reduce", "tensors", tensors, written=True)
    dtype = tensors[0].dtype
    check_same_dtype(info, "all_reduce", "tensors", tensors, dtype)
    check_reduction(info, "all_reduce", dtype, reduce_op, factor)
    check_apart(info, "all_reduce", tensors, lambda i: f"tensors[{i}]")
    blocks = Blocks(list(tensors))
    return Call(
        "all_reduce",
        meaning,
        blocks,
        blocks,
        dtype=dtype,
        count=sum(numels),
        layout=hash_layout([numels]),
        reduce_op=reduce_op,
        factor=factor,
    )


def meaning(calls: Sequence[Call]) -> None:
    factors = [call.factor for call in calls]
    # The reduction of a single tensor is that tensor, and would be written to itself.
    read = look if len(calls) > 1 else lambda blocks: take(blocks)[0]
    sources = [read(call.inputs) for call in calls if call.inputs]
    results = [reduce_in_rank_order(tensors, calls[0].reduce_op, factors) for tensors in zip(*sources, strict=True)]
    for call in calls:
        if call.outputs:
            give(call.outputs, [results])
