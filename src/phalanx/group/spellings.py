"""Torch's many ways to give a root, a reduce op and a timeout, as one.

torch passes an options object. Users pass a root, a reduce op or a timeout in its place, or by keyword.
"""

from __future__ import annotations

import operator
from datetime import timedelta
from typing import Any

from torch.distributed import ReduceOp

from phalanx.group.torch_compat import reduce_op_of

__all__ = ["given", "reduction_of", "root_of", "timeout_of"]


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
