"""Where a thread belongs: the run of which it is a rank, and the process in which it is one."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Protocol

from phalanx import _native
from phalanx.types import GroupInfo, Store

if TYPE_CHECKING:
    from phalanx.transports.threads.transport import ThreadsTransport

__all__ = ["Origin", "Run", "this_thread"]


class Run(Protocol):
    """A run whose ranks are threads of this process, as a group sees it."""

    def join(self, store: Store, info: GroupInfo, timeout: float, scope: str) -> ThreadsTransport:
        """Meets the other ranks of a group. Groups of one scope meet by their members, others by their name as well."""

    def join_split(self, key: str, info: GroupInfo, owners: dict[int, int]) -> ThreadsTransport:
        """Takes this rank's place in a group about which its ranks have agreed already; `key` is theirs alone.

        `owners` are the group's ranks as ranks of the run.
        """

    def environment(self) -> tuple[Store, int, int]:
        """What processes have in their environment: a store, the rank and the number of ranks."""

    def has_ended(self, rank: int) -> bool:
        """Whether a rank of the run was killed or has returned."""

    def whereabouts(self, rank: int) -> tuple[str, list[str]]:
        """What a rank of the run does now, and its stack, innermost last."""

    def last_calls(self, rank: int) -> list[str]:
        """A line for each."""

    def own_box(self) -> _native.BlackBox | None:
        """That of the rank whose thread this is."""


class _ThisThread(threading.local):
    # None: the thread is no rank.
    run: Run | None = None


this_thread = _ThisThread()


class _Forks:
    """How many forks lie between this process and the first one. A forked child has none of its parent's ranks."""

    num = 0


def _count_fork() -> None:
    _Forks.num += 1
    # The thread that called fork() is no rank here: groups that it makes are of processes.
    this_thread.run = None


os.register_at_fork(after_in_child=_count_fork)


class Origin:
    """The process in which it was made."""

    def __init__(self) -> None:
        self._num_forks = _Forks.num

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of that process."""
        return self._num_forks != _Forks.num
