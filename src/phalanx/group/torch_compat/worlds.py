"""A world of torch's groups for each rank that is a thread of this process."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import c10d_logger, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _World

__all__ = ["UNSET_TIMEOUT", "OwnWorlds"]

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

    def __init__(self, let_others: Callable[[], None], stranger: Callable[[], Exception]) -> None:
        """`let_others` is called by a rank that waits; `stranger` makes the error for threads that are no rank's."""
        self._let_others = let_others
        self._stranger = stranger
        self._original = distributed_c10d._world
        self._here = _Here(self._original)
        self._before: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        self._replace(distributed_c10d, "_world", _Switch(self._here))
        self._replace(distributed_c10d, "default_pg_timeout", UNSET_TIMEOUT)
        self._replace(distributed_c10d, "_default_pg_init_method", distributed_c10d._default_pg_init_method)
        # A default group's end puts back what was there when it was made.
        self._replace(sys, "excepthook", sys.excepthook)
        # It repeats at length, for each rank, what the run raises.
        self._replace(c10d_logger._c10d_logger, "disabled", True)
        self._replace(distributed_c10d, "_get_default_group", self._known(distributed_c10d._get_default_group))
        self._replace(DeviceMesh, "__init__", self._apart(DeviceMesh.__init__))
        self._replace(torch._C.Future, "wait", self._sharing(torch._C.Future.wait))
        _distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        _installed.append(self)

    def enter(self) -> None:
        """In the thread of a rank, first of all."""
        self._here.world = _OwnWorld()
        self._here.number = next(_numbers)

    def belongings(self) -> tuple[Any, int | None]:
        """In the thread of a rank: what threads that it starts have in common with it."""
        return self._here.world, self._here.number

    def enter_as(self, belongings: tuple[Any, int | None]) -> None:
        """First of all, in a thread that a rank has started."""
        self._here.world, self._here.number = belongings
        # C++ has a registry for each thread.
        for group, name in list(self._here.world.pg_names.items()):
            _distributed_c10d._register_process_group(name, group)

    def leave(self) -> None:
        """Last of all, in such a thread."""
        for name in list(self._here.world.pg_names.values()):
            _distributed_c10d._unregister_process_group(name)
        self._here.world, self._here.number = self._original, None

    def remove(self, for_all: bool = True) -> None:
        """`for_all`: also for threads that are ranks, which must have ended."""
        _distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        _installed.remove(self)
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

    def _known(self, original: Callable[[], ProcessGroup]) -> Callable[[], ProcessGroup]:
        """A thread of which nobody knows whose it is must not be told that there is no default group."""

        @wraps(original)
        def get_default_group() -> ProcessGroup:
            if self._here.world is self._original and self._original.default_pg is None:
                raise self._stranger()
            return original()

        return get_default_group

    def _sharing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """torch waits in C++ for futures that it made of ours, and a rank would keep its turn."""
        done = torch._C.Future.done

        @wraps(original)
        def wait(future: Any) -> Any:
            while self._here.number is not None and not done(future):
                self._let_others()
            return original(future)

        return wait


# Those of a run under way.
_installed: list[OwnWorlds] = []


def _forget_rank() -> None:
    """In a forked child no thread is a rank. What it had of torch's groups it keeps: their calls say what is wrong."""
    for worlds in _installed:
        worlds._here.number = None


os.register_at_fork(after_in_child=_forget_rank)

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
