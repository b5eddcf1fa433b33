"""gather: the root gets every rank's tensor, in rank order. All have the same number of elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import (
    check_apart,
    check_list,
    check_root,
    check_same_dtype,
    check_size,
    check_tensor,
    fail,
)
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "meaning"]


def build(info: GroupInfo, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int) -> Call:
    check_root(info, "gather", root)
    count = check_tensor(info, "gather", "tensor", tensor)
    dtype = tensor.dtype
    received = None
    if info.rank == root:
        numels = check_list(info, "gather", "outputs", outputs, info.size, written=True)
        assert outputs is not None
        check_same_dtype(info, "gather", "outputs", outputs, dtype)
        for p, numel in enumerate(numels):
            check_size(info, "gather", f"outputs[{p}]", numel, count, "as in tensor")
        check_apart(info, "gather", outputs, lambda i: f"outputs[{i}]")
        received = Blocks(list(outputs), info.size, listed=True)
    elif outputs:
        fail(
            info,
            "gather",
            "LIST",
            f"expected no outputs on a rank that is not the root ({root}), got {len(outputs)}",
            "pass outputs on the root only",
        )
    return Call("gather", meaning, Blocks([tensor]), received, dtype=dtype, count=count, root=root)


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs)[0] for call in calls if call.inputs]
    for call in calls:
        if call.outputs:
            give(call.outputs, sent)
