"""broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import Form, describe
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_coalesced", "meaning"]


def build(info: GroupInfo, tensor: Tensor, root: int) -> Call:
    described = describe(info, "broadcast", Form.broadcast, tensor, root=root)
    blocks = Blocks([tensor])
    return Call(described, meaning, blocks) if info.rank == root else Call(described, meaning, None, blocks)


def build_coalesced(info: GroupInfo, tensors: Sequence[Tensor], root: int) -> Call:
    """Several tensors, of any dtypes, as one call."""
    described = describe(info, "broadcast", Form.broadcast_coalesced, tensors, root=root)
    blocks = Blocks(list(tensors))
    return Call(described, meaning, blocks) if info.rank == root else Call(described, meaning, None, blocks)


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs) for call in calls if call.inputs]
    for call in calls:
        if call.outputs:
            give(call.outputs, sent[0])
