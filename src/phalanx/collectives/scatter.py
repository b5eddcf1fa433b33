"""scatter: rank p gets tensor p of the root's list. All have the same number of elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import Form, describe
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "meaning"]


def build(info: GroupInfo, output: Tensor, inputs: Sequence[Tensor] | None, root: int) -> Call:
    described = describe(info, "scatter", Form.scatter, output, inputs, root=root)
    sent = Blocks(list(inputs), info.size, listed=True) if inputs else None
    return Call(described, meaning, sent, Blocks([output]))


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs) for call in calls if call.inputs]
    for rank, call in enumerate(calls):
        if call.outputs:
            give(call.outputs, [sent[0][rank]])
