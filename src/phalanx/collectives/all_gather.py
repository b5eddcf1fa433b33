"""all_gather: every rank gets every rank's tensor, in rank order.

The ranks' tensors may differ in size where the outputs are a list: `outputs[p]` says what rank p sends, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import (
    check_apart,
    check_list,
    check_same_dtype,
    check_size,
    check_tensor,
    fail,
    hash_layout,
)
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_coalesced", "build_single", "build_single_coalesced", "meaning"]


def build(info: GroupInfo, outputs: Sequence[Tensor], tensor: Tensor) -> Call:
    numel = check_tensor(info, "all_gather", "tensor", tensor)
    numels = check_list(info, "all_gather", "outputs", outputs, info.size, written=True)
    dtype = tensor.dtype
    check_same_dtype(info, "all_gather", "outputs", outputs, dtype)
    check_size(info, "all_gather", "tensor", numel, numels[info.rank], f"as in outputs[{info.rank}]")
    check_apart(info, "all_gather", outputs, lambda i: f"outputs[{i}]")
    return Call(
        "all_gather",
        meaning,
        Blocks([tensor]),
        Blocks(list(outputs), info.size, listed=True),
        dtype=dtype,
        count=sum(numels),
        layout=hash_layout([[numel] for numel in numels]),
    )


def build_single(info: GroupInfo, output: Tensor, tensor: Tensor) -> Call:
    """One output for all: concatenated or stacked, the memory is the same."""
    numel = check_tensor(info, "all_gather", "tensor", tensor)
    count = check_tensor(info, "all_gather", "output", output, written=True)
    dtype = tensor.dtype
    if output.dtype is not dtype:
        check_same_dtype(info, "all_gather", "output", [output], dtype)
    if count != numel * info.size:
        check_size(info, "all_gather", "output", count, numel * info.size, f"{info.size} ranks times {numel}")
    return Call("all_gather", meaning, Blocks([tensor]), Blocks([output], info.size), dtype=dtype, count=count)


def build_coalesced(info: GroupInfo, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Call:
    """Several tensors, of any dtypes, as one call: `output_lists[p][i]` is `inputs[i]` of rank p."""
    numels = check_list(info, "all_gather", "inputs", inputs)
    if not isinstance(output_lists, (list, tuple)) or len(output_lists) != info.size:
        got = len(output_lists) if isinstance(output_lists, (list, tuple)) else type(output_lists).__name__
        fail(
            info,
            "all_gather",
            "LIST",
            f"expected {info.size} lists of outputs, one a rank, got {got}",
            "pass outputs[p][i] for tensor i of rank p",
        )
    rows = []
    for p, outputs in enumerate(output_lists):
        rows.append(check_list(info, "all_gather", f"outputs[{p}]", outputs, written=True))
        _check_pairs(info, f"outputs[{p}]", outputs, inputs)
    for i, (numel, expected) in enumerate(zip(numels, rows[info.rank], strict=True)):
        check_size(info, "all_gather", f"inputs[{i}]", numel, expected, f"as in outputs[{info.rank}][{i}]")
    received = [tensor for outputs in output_lists for tensor in outputs]
    check_apart(info, "all_gather", received, lambda i: f"outputs[{i // len(inputs)}][{i % len(inputs)}]")
    return Call(
        "all_gather",
        meaning,
        Blocks(list(inputs)),
        Blocks(received, info.size, listed=True),
        dtype=inputs[0].dtype,
        count=sum(map(sum, rows)),
        layout=hash_layout(rows, inputs),
    )


def build_single_coalesced(info: GroupInfo, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    """Several `build_single`, of any dtypes, as one call."""
    numels = check_list(info, "all_gather", "inputs", inputs)
    counts = check_list(info, "all_gather", "outputs", outputs, written=True)
    _check_pairs(info, "outputs", outputs, inputs)
    for i, (count, numel) in enumerate(zip(counts, numels, strict=True)):
        check_size(info, "all_gather", f"outputs[{i}]", count, numel * info.size, f"{info.size} ranks times {numel}")
    check_apart(info, "all_gather", outputs, lambda i: f"outputs[{i}]")
    return Call(
        "all_gather",
        meaning,
        Blocks(list(inputs)),
        Blocks(list(outputs), info.size),
        dtype=inputs[0].dtype,
        count=sum(counts),
        layout=hash_layout([numels], inputs),
    )


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs)[0] for call in calls if call.inputs]
    for call in calls:
        if call.outputs:
            give(call.outputs, sent)


def _check_pairs(info: GroupInfo, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if len(outputs) != len(inputs):
        fail(
            info,
            "all_gather",
            "LIST",
            f"expected {len(inputs)} tensors in {name}, as in inputs, got {len(outputs)}",
            "pass one output for each input",
        )
    for i, (output, tensor) in enumerate(zip(outputs, inputs, strict=True)):
        check_same_dtype(info, "all_gather", f"{name}[{i}]", [output], tensor.dtype)
