"""torch's private names, gathered in one place: what changes between torch versions changes here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ProcessGroup, ReduceOp
from torch.autograd import Variable
from torch.distributed import GroupMember, distributed_c10d
from torch.distributed.distributed_c10d import GroupName, _World

__all__ = [
    "UNSET_TIMEOUT",
    "GroupName",
    "OwnWorlds",
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


# What torch gives to groups made without a timeout while ranks are threads, told apart from one that was asked for. On
# its way torch makes a number of seconds of little precision of it.
UNSET_TIMEOUT = timedelta(minutes=30, milliseconds=500)


class _OwnWorld(_World):
    """What torch knows of the groups of one rank; its own class keeps most of it in the module."""

    # In place of torch's properties, which can't be set.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


class OwnWorlds:
    """Gives each rank that is a thread a world of torch's; other threads keep theirs.

    `rank_here()` is None in a thread that is no rank.
    """

    def __init__(self, rank_here: Callable[[], int | None]) -> None:
        self._rank_here = rank_here
        self._worlds: dict[int, _OwnWorld] = {}
        self._before: tuple[Any, ...] | None = None

    def install(self) -> None:
        self._before = (
            distributed_c10d._world,
            distributed_c10d.default_pg_timeout,
            distributed_c10d._default_pg_init_method,
            sys.excepthook,
        )
        distributed_c10d._world = _Switch(self._world_here)  # type: ignore[assignment]
        distributed_c10d.default_pg_timeout = UNSET_TIMEOUT
        _distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]

    def remove(self, for_all: bool = True) -> None:
        """`for_all`: also for threads that are ranks, which must have ended."""
        assert self._before is not None
        switch = distributed_c10d._world
        _distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        (
            distributed_c10d._world,
            distributed_c10d.default_pg_timeout,
            distributed_c10d._default_pg_init_method,
            sys.excepthook,
        ) = self._before
        if not for_all:
            distributed_c10d._world = switch

    def _world_here(self) -> Any:
        rank = self._rank_here()
        if rank is None:
            assert self._before is not None
            return self._before[0]
        if rank not in self._worlds:
            self._worlds[rank] = _OwnWorld()
        return self._worlds[rank]


class _Switch:
    """Stands for the world of whoever asks."""

    def __init__(self, world_here: Callable[[], Any]) -> None:
        object.__setattr__(self, "_world_here", world_here)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_world_here")(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_world_here")(), name, value)
