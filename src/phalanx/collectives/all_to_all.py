"""all_to_all: block q of rank p's inputs becomes block p of rank q's outputs.

Any pair of ranks may exchange any number of elements, none as well. Whether sender and receiver agree is not visible
to one rank: transports compare it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import Form, describe
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_single", "meaning"]


def build(info: GroupInfo, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    described = describe(info, "all_to_all", Form.all_to_all, outputs, inputs)
    received = Blocks(list(outputs), info.size, listed=True)
    return Call(described, meaning, Blocks(list(inputs), info.size, listed=True), received)


def build_single(
    info: GroupInfo, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Call:
    """Splits are numbers of rows of dimension 0, one per rank; empty splits cut into equal parts."""
    described = describe(
        info,
        "all_to_all",
        Form.all_to_all_single,
        output,
        tensor,
        output_splits=output_splits,
        input_splits=input_splits,
    )
    return Call(described, meaning, _cut(info, tensor, input_splits), _cut(info, output, output_splits))


def _cut(info: GroupInfo, tensor: Tensor, splits: Sequence[int]) -> Blocks:
    rows = tensor.shape[0] if tensor.dim() else 1
    width = tensor.numel() // rows if rows else 0
    return Blocks([tensor], info.size, sizes=[split * width for split in splits] if splits else None)


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs) for call in calls if call.inputs]
    for rank, call in enumerate(calls):
        if call.outputs:
            give(call.outputs, [blocks[rank] for blocks in sent])
