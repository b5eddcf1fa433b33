"""torch's private names, gathered in one place: what changes between torch versions changes here."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ProcessGroup, ReduceOp
from torch._C._dynamo import eval_frame
from torch._C._profiler import _RecordFunctionFast as ProfilerRange
from torch.autograd import Variable, profiler
from torch.distributed import GroupMember, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _World

__all__ = [
    "UNSET_TIMEOUT",
    "GroupName",
    "OwnWorlds",
    "ProfilerRange",
    "at_end_of_backward",
    "default_group",
    "in_backward",
    "in_final_callback",
    "not_traced",
    "profiler",
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


_Class = TypeVar("_Class", bound=type)


def not_traced(cls: _Class) -> _Class:
    """Has torch.compile call a class' methods, as it calls those of C++ classes, instead of looking into them."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for value in vars(cls).values():
        if isinstance(value, FunctionType):
            # Where a function that is compiled calls it, and where one does that was left as it is.
            value._torchdynamo_disable = True  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(value.__code__, skip)
    return cls


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
    """Gives each thread that is a rank a world of torch's; other threads keep theirs."""

    def __init__(self, let_others: Callable[[], None]) -> None:
        """`let_others` is called by a rank that waits."""
        self._let_others = let_others
        self._here = _Here(distributed_c10d._world)
        self._before: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        self._replace(distributed_c10d, "_world", _Switch(self._here))
        self._replace(distributed_c10d, "default_pg_timeout", UNSET_TIMEOUT)
        self._replace(distributed_c10d, "_default_pg_init_method", distributed_c10d._default_pg_init_method)
        # A default group's end puts back what was there when it was made.
        self._replace(sys, "excepthook", sys.excepthook)
        self._replace(DeviceMesh, "__init__", self._apart(DeviceMesh.__init__))
        self._replace(torch._C.Future, "wait", self._sharing(torch._C.Future.wait))
        _distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]

    def enter(self) -> None:
        """In the thread of a rank, first of all."""
        self._here.world = _OwnWorld()
        self._here.number = next(_numbers)

    def remove(self, for_all: bool = True) -> None:
        """`for_all`: also for threads that are ranks, which must have ended."""
        _distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        switch = distributed_c10d._world
        while self._before:
            setattr(*self._before.pop())
        if not for_all:
            distributed_c10d._world = switch

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _apart(self, original: Callable[..., None]) -> Callable[..., None]:
        """Meshes of two ranks, or of two runs, are not equal: torch has caches that find one for the other."""

        @wraps(original)
        def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
            original(mesh, *args, **kwargs)
            if self._here.number is not None:
                mesh._thread_id = self._here.number

        return init

    def _sharing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """torch waits in C++ for futures that it made of ours, and a rank would keep its turn."""
        done = torch._C.Future.done

        @wraps(original)
        def wait(future: Any) -> Any:
            while self._here.number is not None and not done(future):
                self._let_others()
            return original(future)

        return wait


# Of all ranks there ever were, below those of threads.
_numbers = itertools.count(-1, -1)


class _Here(threading.local):
    """The world of this thread, and which rank of all it is."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.number: int | None = None


class _Switch:
    """Stands for the world of whoever asks."""

    def __init__(self, here: _Here) -> None:
        object.__setattr__(self, "_here", here)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_here").world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_here").world, name, value)
