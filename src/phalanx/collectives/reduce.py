"""reduce: the root gets the reduction of all ranks' tensors, in place. The other ranks' tensors stay as they are."""

from __future__ import annotations

from torch import Tensor

from phalanx.collectives.all_reduce import meaning
from phalanx.collectives.checks import Form, describe
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["build", "meaning"]


def build(info: GroupInfo, tensor: Tensor, root: int, reduce_op: int, factor: float = 1.0) -> Call:
    described = describe(info, "reduce", Form.reduce, tensor, root=root, reduce_op=reduce_op, factor=factor)
    blocks = Blocks([tensor])
    return Call(described, meaning, blocks, blocks if info.rank == root else None)
