"""Waits of this process that the native core does not carry out, for the search for deadlocks (debug/deadlocks.py).

A thread that waits for a call of another engine enters its wait here and leaves it afterwards. Both cost a lookup. Only
waits that have lasted for `LONG` seconds are looked at; whoever can do so enters them only then.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from phalanx.transports.identities import Identity
from phalanx.types import GroupInfo

__all__ = [
    "LONG",
    "NO_THREAD",
    "ForeignWait",
    "Helpers",
    "WaitedGroup",
    "enter",
    "entered",
    "helpers",
    "leave",
    "on_enter",
    "set_helpers",
]

LONG = 1.0
# In place of a thread: a call in flight for whose end no thread of ours waits, but which lets another thread go on.
NO_THREAD = 0


class WaitedGroup(Protocol):
    """What a wait tells of its group. `PostedCalls` has it all."""

    @property
    def info(self) -> GroupInfo: ...
    @property
    def identity(self) -> str:
        """The same on all ranks of the group, and on those of no other group."""

    @property
    def identities(self) -> Sequence[Identity]:
        """Of the processes of the ranks."""

    def box_of(self, rank: int) -> str:
        """The path of a rank's black box; empty where it is not known."""


class ForeignWait(NamedTuple):
    group: WaitedGroup
    op: str
    seq: int
    absent: Callable[[], Sequence[int]]
    is_any: bool
    peer: int
    tag: int
    where: str
    thread: int  # the system's number, or NO_THREAD
    is_bounded: bool
    since_ns: int


class Helpers(NamedTuple):
    names: tuple[str, ...] = ()
    threads: frozenset[int] = frozenset()


_helpers = Helpers()
_tokens = itertools.count(1)
_waits: dict[int, ForeignWait] = {}
# Called at each `enter`, by the thread that waits: must return at once.
_on_enter: Callable[[], None] | None = None


def enter(
    group: WaitedGroup,
    op: str,
    seq: int,
    absent: Callable[[], Sequence[int]],
    *,
    is_any: bool = False,
    peer: int = -1,
    tag: int = 0,
    where: str = "",
    thread: int | None = None,
    is_bounded: bool = False,
) -> int:
    """This thread begins to wait for a call; returns the token for `leave`.

    `absent` returns the ranks that have not made their side of the call, so that a thread of theirs has to: those that
    have made it are carried on by the engine. It is called from another thread, must not wait, and returns nothing once
    the call goes on. The call can't end without all of them, or, with `is_any`, without one of them. `peer` and `tag`
    describe messages. `is_bounded`: the thread goes on after a while although the call has not ended.
    """
    token = next(_tokens)
    number = threading.get_native_id() if thread is None else thread
    _waits[token] = ForeignWait(
        group, op, seq, absent, is_any, peer, tag, where, number, is_bounded, time.monotonic_ns()
    )
    if _on_enter is not None:
        _on_enter()
    return token


def leave(token: int) -> None:
    """The wait is over, in whatever way."""
    _waits.pop(token, None)


def set_helpers(names: Sequence[str], threads: Collection[int] = ()) -> None:
    """Threads of other engines that carry on nothing but calls whose waits are entered here, by the beginnings of their
    names and by their numbers. Any other thread of an engine may let a thread of the program go on."""
    global _helpers
    _helpers = Helpers(tuple(names), frozenset(threads))


def helpers() -> Helpers:
    return _helpers


def entered() -> dict[int, ForeignWait]:
    """All waits, by token."""
    return dict(_waits)


def on_enter(callback: Callable[[], None]) -> None:
    global _on_enter
    _on_enter = callback


def _begin_anew() -> None:
    """In a forked child, in which the threads of its parent do not wait."""
    _waits.clear()
    set_helpers(())


os.register_at_fork(after_in_child=_begin_anew)
