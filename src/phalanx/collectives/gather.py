"""gather: the root gets every rank's tensor, in rank order. All have the same number of elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import Form, describe
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "meaning"]


def build(info: GroupInfo, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int) -> Call:
    described = describe(info, "gather", Form.gather, outputs, tensor, root=root)
    received = Blocks(list(outputs), info.size, listed=True) if outputs else None
    return Call(described, meaning, Blocks([tensor]), received)


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs)[0] for call in calls if call.inputs]
    for call in calls:
        if call.outputs:
            give(call.outputs, sent)
