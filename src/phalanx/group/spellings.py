"""Torch's many ways to give tensors, a root, a reduce op and a timeout, as one.

torch passes an options object. Users pass a root, a reduce op or a timeout in its place, or by keyword.
"""

from __future__ import annotations

import operator
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.errors import InvalidCall
from phalanx.group.torch_compat import reduce_op_of
from phalanx.types import GroupInfo

__all__ = ["given", "not_yet", "only", "only_list", "reduction_of", "root_of", "timeout_of"]


def given(*spellings: Any) -> Any:
    """The one of an argument's names under which it was given; None if it was not."""
    return next((value for value in spellings if value is not None), None)


def timeout_of(opts: Any, timeout: timedelta | None) -> timedelta | None:
    """The call's own timeout, or that of its options."""
    if timeout is not None or opts is None:
        return timeout
    return opts if isinstance(opts, timedelta) else opts.timeout


def root_of(opts: Any, root: int | None, timeout: timedelta | None) -> tuple[int, timedelta | None, Any]:
    """Root and timeout; what is left of `opts` may still hold a reduce op."""
    if hasattr(opts, "rootRank"):
        return (opts.rootRank if root is None else root), timeout_of(opts, timeout), opts
    if root is None:
        root = 0 if opts is None else opts
    return operator.index(root), timeout, None


def reduction_of(opts: Any, op: Any, timeout: timedelta | None) -> tuple[int, float, timedelta | None]:
    """Reduce op, factor and timeout."""
    chosen = getattr(opts, "reduceOp", None)
    if chosen is not None:
        timeout = opts.timeout if timeout is None else timeout
    elif opts is not None:
        chosen = opts
    reduce_op, factor = reduce_op_of(op if op is not None else chosen if chosen is not None else ReduceOp.SUM)
    return reduce_op, factor, timeout


def only(info: GroupInfo, op: str, tensors: Any) -> Tensor:
    """The one tensor of a call: torch passes it in a list, users often as it is."""
    if isinstance(tensors, (list, tuple)):
        if len(tensors) == 1:
            return tensors[0]  # type: ignore[no-any-return]
        raise _bad_list(info, op, "one tensor", f"a list of {len(tensors)}")
    return tensors  # type: ignore[no-any-return]


def only_list(info: GroupInfo, op: str, argument: str, lists: Any) -> list[Tensor]:
    """The one list of tensors of a call: torch wraps it in another list."""
    if not isinstance(lists, (list, tuple)):
        raise _bad_list(info, op, f"{argument} to be a list of tensors", type(lists).__name__)
    if lists and isinstance(lists[0], (list, tuple)):
        if len(lists) != 1:
            raise _bad_list(info, op, f"{argument} to hold one list of tensors", str(len(lists)))
        return list(lists[0])
    return list(lists)


def _bad_list(info: GroupInfo, op: str, expected: str, actual: str) -> InvalidCall:
    return InvalidCall(
        f"expected {expected}, got {actual}",
        code="INVALID:LIST",
        group=info.name,
        rank=info.rank,
        op=op,
        hint="pass one tensor a rank; several at once go through the coalesced calls",
    )


def not_yet(info: GroupInfo, op: str, hint: str) -> InvalidCall:
    """The error of a method that torch has and this version has not."""
    return InvalidCall(
        "this version does not have it", code="INVALID:OP", group=info.name, rank=info.rank, op=op, hint=hint
    )
