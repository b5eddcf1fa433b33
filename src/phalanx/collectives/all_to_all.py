"""all_to_all: block q of rank p's inputs becomes block p of rank q's outputs.

Any pair of ranks may exchange any number of elements, none as well. Whether sender and receiver agree is not visible
to one rank: transports compare it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import check_apart, check_list, check_same_dtype, check_tensor, fail
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_single", "meaning"]


def build(info: GroupInfo, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Call:
    check_list(info, "all_to_all", "outputs", outputs, info.size, written=True)
    check_list(info, "all_to_all", "inputs", inputs, info.size)
    dtype = inputs[0].dtype
    check_same_dtype(info, "all_to_all", "inputs", inputs, dtype)
    check_same_dtype(info, "all_to_all", "outputs", outputs, dtype)
    _check_own(info, inputs[info.rank].numel(), outputs[info.rank].numel())
    check_apart(info, "all_to_all", outputs, lambda i: f"outputs[{i}]")
    return Call(
        "all_to_all",
        meaning,
        Blocks(list(inputs), info.size, listed=True),
        Blocks(list(outputs), info.size, listed=True),
        dtype=dtype,
        count=-1,
    )


def build_single(
    info: GroupInfo, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Call:
    """Splits are numbers of rows of dimension 0, one per rank; empty splits cut into equal parts."""
    check_tensor(info, "all_to_all", "output", output, written=True)
    check_tensor(info, "all_to_all", "tensor", tensor)
    dtype = tensor.dtype
    if output.dtype is not dtype:
        check_same_dtype(info, "all_to_all", "output", [output], dtype)
    inputs = _cut(info, "tensor", tensor, "input_split_sizes", input_splits)
    outputs = _cut(info, "output", output, "output_split_sizes", output_splits)
    _check_own(info, _own_numel(info, inputs), _own_numel(info, outputs))
    return Call("all_to_all", meaning, inputs, outputs, dtype=dtype, count=-1)


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs) for call in calls if call.inputs]
    for rank, call in enumerate(calls):
        if call.outputs:
            give(call.outputs, [blocks[rank] for blocks in sent])


def _own_numel(info: GroupInfo, blocks: Blocks) -> int:
    return blocks.tensors[0].numel() // info.size if blocks.sizes is None else blocks.sizes[info.rank]


def _check_own(info: GroupInfo, sent: int, received: int) -> None:
    if sent != received:
        fail(
            info,
            "all_to_all",
            "SIZE",
            f"expected this rank's block for itself to be of one size on both sides, got {sent} elements of input and "
            f"{received} of output",
            f"make entry {info.rank} of the inputs as large as entry {info.rank} of the outputs",
        )


def _cut(info: GroupInfo, name: str, tensor: Tensor, splits_name: str, splits: Sequence[int]) -> Blocks:
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % info.size:
            fail(
                info,
                "all_to_all",
                "SIZE",
                f"expected rows of {name} that {info.size} ranks can share equally, got {rows}",
                f"pass {splits_name}, or a dimension 0 that is a multiple of {info.size}",
            )
        return Blocks([tensor], info.size)
    if len(splits) != info.size:
        fail(
            info,
            "all_to_all",
            "LIST",
            f"expected {info.size} {splits_name}, one per rank, got {len(splits)}",
            f"give {splits_name} one entry for each of the {info.size} ranks of the group",
        )
    if min(splits) < 0 or sum(splits) != rows:
        fail(
            info,
            "all_to_all",
            "SIZE",
            f"expected {splits_name} of at least 0 that add up to the {rows} rows of {name}, got {list(splits)}",
            f"make {splits_name} add up to {name}.shape[0]",
        )
    width = tensor.numel() // rows if rows else 0
    return Blocks([tensor], info.size, sizes=[split * width for split in splits])
