"""all_gather: every rank gets every rank's tensor, in rank order.

The ranks' tensors may differ in size where the outputs are a list: `outputs[p]` says what rank p sends, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import Form, describe
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_coalesced", "build_single", "build_single_coalesced", "meaning"]


def build(info: GroupInfo, outputs: Sequence[Tensor], tensor: Tensor) -> Call:
    described = describe(info, "all_gather", Form.all_gather, outputs, tensor)
    return Call(described, meaning, Blocks([tensor]), Blocks(list(outputs), info.size, listed=True))


def build_single(info: GroupInfo, output: Tensor, tensor: Tensor) -> Call:
    """One output for all: concatenated or stacked, the memory is the same."""
    described = describe(info, "all_gather", Form.all_gather_single, output, tensor)
    return Call(described, meaning, Blocks([tensor]), Blocks([output], info.size))


def build_coalesced(info: GroupInfo, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Call:
    """Several tensors, of any dtypes, as one call: `output_lists[p][i]` is `inputs[i]` of rank p."""
    described = describe(info, "all_gather", Form.all_gather_coalesced, output_lists, inputs)
    received = [tensor for outputs in output_lists for tensor in outputs]
    return Call(described, meaning, Blocks(list(inputs)), Blocks(received, info.size, listed=True))


def build_single_coalesced(info: GroupInfo, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    """Several `build_single`, of any dtypes, as one call."""
    described = describe(info, "all_gather", Form.all_gather_single_coalesced, outputs, inputs)
    return Call(described, meaning, Blocks(list(inputs)), Blocks(list(outputs), info.size))


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs)[0] for call in calls if call.inputs]
    for call in calls:
        if call.outputs:
            give(call.outputs, sent)
