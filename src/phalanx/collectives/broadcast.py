"""broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import check_apart, check_list, check_root, check_tensor, hash_layout
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "build_coalesced", "meaning"]


def build(info: GroupInfo, tensor: Tensor, root: int) -> Call:
    check_root(info, "broadcast", root)
    is_root = info.rank == root
    count = check_tensor(info, "broadcast", "tensor", tensor, written=not is_root)
    blocks = Blocks([tensor])
    if is_root:
        return Call("broadcast", meaning, blocks, dtype=tensor.dtype, count=count, root=root)
    return Call("broadcast", meaning, None, blocks, dtype=tensor.dtype, count=count, root=root)


def build_coalesced(info: GroupInfo, tensors: Sequence[Tensor], root: int) -> Call:
    """Several tensors, of any dtypes, as one call."""
    check_root(info, "broadcast", root)
    is_root = info.rank == root
    numels = check_list(info, "broadcast", "tensors", tensors, written=not is_root)
    if not is_root:
        check_apart(info, "broadcast", tensors, lambda i: f"tensors[{i}]")
    blocks = Blocks(list(tensors))
    return Call(
        "broadcast",
        meaning,
        blocks if is_root else None,
        None if is_root else blocks,
        dtype=tensors[0].dtype,
        count=sum(numels),
        layout=hash_layout([numels], tensors),
        root=root,
    )


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs) for call in calls if call.inputs]
    for call in calls:
        if call.outputs:
            give(call.outputs, sent[0])
