"""Processes that this one has met as ranks.

A process is known for all time by its number and its start time, within one namespace of process numbers, and its
program by the address of its stack: exec keeps the process and replaces the program. Every rank leaves its identity in
the store (`hello.Note`). Whoever waits for a rank later, in another group or in another world, may so find that the
process that was this rank has died, and need not wait for the timeout.

A replacement may have been started under the same rank. So a death counts only

- for the process that the store of the new group names, which a replacement overwrites when it comes,
- if this process met it, and met nobody else under that rank since, of the same numbering: torch's groups number
  ranks by the default group, a group that was made without torch numbers them for itself,
- once: whoever tries again waits for a new process.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from phalanx import _native

__all__ = ["NOBODY", "Identity", "forget", "has_met", "last_met", "meet", "own_identity", "process_namespace"]

# Of a process: its number, its start time and its program; all 0 for one that can't be watched from here.
Identity = tuple[int, int, int]
NOBODY: Identity = (0, 0, 0)

# The garbage collector may come in between, and what it finds may leave a group.
_lock = threading.RLock()
_MOST_KEPT = 4096
# By numbering, and rank in it. The oldest are forgotten.
_last_met: dict[tuple[str, int], Identity] = {}


def _begin_anew() -> None:
    """In a forked child, where a thread of the parent may hold the lock."""
    global _lock
    _lock = threading.RLock()
    # A child of another namespace may have the number of its parent.
    _namespace_of.cache_clear()


def own_identity() -> Identity:
    return (*_native.own_identity(), _native.own_program())


def process_namespace() -> str:
    """Equal in processes that know each other by the same numbers."""
    return _namespace_of(os.getpid())


@functools.cache
def _namespace_of(process: int) -> str:
    """Of this process, which keeps it; a forked child may have another."""
    try:
        # The first namespace has the same name on every host.
        return os.readlink("/proc/self/ns/pid") + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


os.register_at_fork(after_in_child=_begin_anew)


def meet(numbering: str, members: Sequence[int], identities: Sequence[Identity]) -> None:
    """This process is in a group with these."""
    with _lock:
        _last_met.update({(numbering, rank): one for rank, one in zip(members, identities, strict=True)})
        # Programs may make any number of groups.
        for key in list(_last_met)[: len(_last_met) - _MOST_KEPT]:
            del _last_met[key]


def has_met(numbering: str, rank: int, identity: Identity) -> bool:
    """Whether this process is the last one that was met as this rank."""
    return identity != NOBODY and last_met(numbering, rank) == identity


def last_met(numbering: str, rank: int) -> Identity:
    """The last process that was met as this rank."""
    return _last_met.get((numbering, rank), NOBODY)


def forget(identity: Identity) -> None:
    """Its death has been told."""
    with _lock:
        for key in [key for key, met in _last_met.items() if met == identity]:
            _last_met.pop(key, None)
