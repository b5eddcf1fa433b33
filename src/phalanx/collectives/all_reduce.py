"""all_reduce: every rank gets the reduction of all ranks' tensors, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.collectives.checks import (
    PLAIN_REDUCTIONS,
    check_list,
    check_reduction,
    check_same_dtype,
    check_tensor,
    hash_layout,
)
from phalanx.collectives.moving import give, take
from phalanx.collectives.reduction import reduce_in_rank_order
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_coalesced", "meaning"]

_STRIDED = torch.strided


def build(info: GroupInfo, tensor: Tensor, reduce_op: int, factor: float = 1.0) -> Call:
    # The most frequent call of all: the plain case is decided here, without a call of the checks.
    try:
        dtype = tensor.dtype
        plain = (
            (dtype, reduce_op) in PLAIN_REDUCTIONS
            and tensor.layout is _STRIDED
            and tensor.is_cpu
            and tensor.is_contiguous()
        )
        count = tensor.numel()
    except AttributeError:
        plain = False
    if not plain:
        count = check_tensor(info, "all_reduce", "tensor", tensor, written=True)
        check_reduction(info, "all_reduce", dtype, reduce_op, factor)
    blocks = Blocks([tensor])
    return Call("all_reduce", meaning, blocks, blocks, dtype=dtype, count=count, reduce_op=reduce_op, factor=factor)


def build_coalesced(info: GroupInfo, tensors: Sequence[Tensor], reduce_op: int, factor: float = 1.0) -> Call:
    """Several tensors of one dtype as one call."""
    numels = check_list(info, "all_reduce", "tensors", tensors, written=True)
    dtype = tensors[0].dtype
    check_same_dtype(info, "all_reduce", "tensors", tensors, dtype)
    check_reduction(info, "all_reduce", dtype, reduce_op, factor)
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
    sources = [take(call.inputs)[0] for call in calls if call.inputs]
    results = [reduce_in_rank_order(tensors, calls[0].reduce_op, factors) for tensors in zip(*sources, strict=True)]
    for call in calls:
        if call.outputs:
            give(call.outputs, [results])
