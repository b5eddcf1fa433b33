"""all_reduce: every rank gets the reduction of all ranks' tensors, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import Form, describe
from phalanx.collectives.moving import give, look, take
from phalanx.collectives.reduction import reduce_in_rank_order
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_coalesced", "meaning"]


def build(info: GroupInfo, tensor: Tensor, reduce_op: int, factor: float = 1.0) -> Call:
    described = describe(info, "all_reduce", Form.all_reduce, tensor, reduce_op=reduce_op, factor=factor)
    blocks = Blocks([tensor])
    return Call(described, meaning, blocks, blocks)


def build_coalesced(info: GroupInfo, tensors: Sequence[Tensor], reduce_op: int, factor: float = 1.0) -> Call:
    """Several tensors of one dtype as one call."""
    described = describe(info, "all_reduce", Form.all_reduce_coalesced, tensors, reduce_op=reduce_op, factor=factor)
    blocks = Blocks(list(tensors))
    return Call(described, meaning, blocks, blocks)


def meaning(calls: Sequence[Call]) -> None:
    factors = [call.description.factor for call in calls]
    # The reduction of a single tensor is that tensor, and would be written to itself.
    read = look if len(calls) > 1 else lambda blocks: take(blocks)[0]
    sources = [read(call.inputs) for call in calls if call.inputs]
    results = [
        reduce_in_rank_order(tensors, calls[0].description.reduce_op, factors) for tensors in zip(*sources, strict=True)
    ]
    for call in calls:
        if call.outputs:
            give(call.outputs, [results])
