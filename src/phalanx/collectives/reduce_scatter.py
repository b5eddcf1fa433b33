"""reduce_scatter: rank p gets the reduction of all ranks' block p.

Blocks may differ in size where the inputs are a list, as long as all ranks pass the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import Form, describe
from phalanx.collectives.moving import give, take
from phalanx.collectives.reduction import reduce_in_rank_order
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_single", "build_single_coalesced", "meaning"]


def build(info: GroupInfo, output: Tensor, inputs: Sequence[Tensor], reduce_op: int, factor: float = 1.0) -> Call:
    described = describe(
        info, "reduce_scatter", Form.reduce_scatter, output, inputs, reduce_op=reduce_op, factor=factor
    )
    return Call(described, meaning, Blocks(list(inputs), info.size, listed=True), Blocks([output]))


def build_single(info: GroupInfo, output: Tensor, tensor: Tensor, reduce_op: int, factor: float = 1.0) -> Call:
    """One input that holds the blocks of all ranks, one after another."""
    described = describe(
        info, "reduce_scatter", Form.reduce_scatter_single, output, tensor, reduce_op=reduce_op, factor=factor
    )
    return Call(described, meaning, Blocks([tensor], info.size), Blocks([output]))


def build_single_coalesced(
    info: GroupInfo, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduce_op: int, factor: float = 1.0
) -> Call:
    """Several `build_single` of one dtype as one call."""
    form = Form.reduce_scatter_single_coalesced
    described = describe(info, "reduce_scatter", form, outputs, inputs, reduce_op=reduce_op, factor=factor)
    return Call(described, meaning, Blocks(list(inputs), info.size), Blocks(list(outputs)))


def meaning(calls: Sequence[Call]) -> None:
    factors = [call.description.factor for call in calls]
    sources = [take(call.inputs) for call in calls if call.inputs]
    for rank, call in enumerate(calls):
        blocks = zip(*(source[rank] for source in sources), strict=True)
        results = [reduce_in_rank_order(tensors, call.description.reduce_op, factors) for tensors in blocks]
        if call.outputs:
            give(call.outputs, [results])
