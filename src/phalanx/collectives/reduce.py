"""reduce: the root gets the reduction of all ranks' tensors, in place. The other ranks' tensors stay as they are."""

from __future__ import annotations

from torch import Tensor

from phalanx.collectives.all_reduce import meaning
from phalanx.collectives.checks import check_reduction, check_root, check_tensor
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "meaning"]


def build(info: GroupInfo, tensor: Tensor, root: int, reduce_op: int, factor: float = 1.0) -> Call:
    check_root(info, "reduce", root)
    is_root = info.rank == root
    count = check_tensor(info, "reduce", "tensor", tensor, written=is_root)
    dtype = tensor.dtype
    check_reduction(info, "reduce", dtype, reduce_op, factor)
    blocks = Blocks([tensor])
    return Call(
        "reduce",
        meaning,
        blocks,
        blocks if is_root else None,
        dtype=dtype,
        count=count,
        reduce_op=reduce_op,
        root=root,
        factor=factor,
    )
