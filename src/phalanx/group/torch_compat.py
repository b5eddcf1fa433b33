"""torch's private names, gathered in one place: what changes between torch versions changes here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, ReduceOp
from torch.autograd import Variable
from torch.distributed import GroupMember
from torch.distributed.distributed_c10d import GroupName

__all__ = [
    "GroupName",
    "at_end_of_backward",
    "default_group",
    "in_backward",
    "in_final_callback",
    "reduce_op_of",
    "seconds_of",
]

_KINDS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.BXOR)
_REDUCE_OP_CLASSES = (ReduceOp, ReduceOp.RedOpType)
_ZERO = timedelta(0)
_PREMUL_SUM: int = ReduceOp.PREMUL_SUM.value


def _number_by_value(op: Any) -> int:
    return int(getattr(op, "op", op).value)


# The hash of both classes is the number, and is the quickest way to it; only if that should change, the slow way.
_number_of: Callable[[Any], int] = (
    hash if all(hash(ReduceOp(kind)) == hash(kind) == kind.value for kind in _KINDS) else _number_by_value
)


def default_group() -> ProcessGroup | None:
    """torch.distributed's default group, if there is one."""
    return GroupMember.WORLD


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_final_callback() -> bool:
    """Whether the backward pass under way is through, and the engine calls what was queued for its end."""
    return torch._C._current_autograd_node() is None


def at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Has the autograd engine call it when the backward pass under way is through, before those queued later."""
    Variable._execution_engine.queue_callback(callback)


def seconds_of(timeout: timedelta | None) -> float | None:
    """A timeout in seconds; None where torch's value means that none was given (its unset value is negative)."""
    if timeout is None:
        return None
    if not isinstance(timeout, timedelta):
        raise TypeError(f"expected a timeout as a datetime.timedelta, got {timeout!r}")
    if timeout <= _ZERO:
        return None
    return timeout.total_seconds()


def reduce_op_of(op: Any) -> tuple[int, float]:
    """The number of a ReduceOp or RedOpType, and the factor of a PREMUL_SUM (1 for the others)."""
    if not isinstance(op, _REDUCE_OP_CLASSES):
        raise TypeError(f"expected a torch.distributed.ReduceOp, got {op!r}")
    number = _number_of(op)
    if number != _PREMUL_SUM:
        return number, 1.0
    factor = getattr(op, "factor", 1.0)
    return number, float(factor)
