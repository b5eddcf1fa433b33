"""scatter: rank p gets tensor p of the root's list. All have the same number of elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.collectives.checks import check_list, check_root, check_same_dtype, check_size, check_tensor, fail
from phalanx.collectives.moving import give, take
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "meaning"]


def build(info: GroupInfo, output: Tensor, inputs: Sequence[Tensor] | None, root: int) -> Call:
    check_root(info, "scatter", root)
    count = check_tensor(info, "scatter", "output", output, written=True)
    dtype = output.dtype
    sent = None
    if info.rank == root:
        numels = check_list(info, "scatter", "inputs", inputs, info.size)
        assert inputs is not None
        check_same_dtype(info, "scatter", "inputs", inputs, dtype)
        for p, numel in enumerate(numels):
            check_size(info, "scatter", f"inputs[{p}]", numel, count, "as in output")
        sent = Blocks(list(inputs), info.size, listed=True)
    elif inputs:
        fail(
            info,
            "scatter",
            "LIST",
            f"expected no inputs on a rank that is not the root ({root}), got {len(inputs)}",
            "pass inputs on the root only",
        )
    return Call("scatter", meaning, sent, Blocks([output]), dtype=dtype, count=count, root=root)


def meaning(calls: Sequence[Call]) -> None:
    sent = [take(call.inputs) for call in calls if call.inputs]
    for rank, call in enumerate(calls):
        if call.outputs:
            give(call.outputs, [sent[0][rank]])
