"""Threads of ranks that do not communicate: whether they sleep, poll or compute, and how long they are waited for.

When no rank can go on, a thread that runs without having the turn may still come to communicate, or may never. What it
does is seen in /proc only. A thread that sleeps until another thread wakes it up is not waited for; how long one that
polls, computes or naps is waited for, the caller says. A thread naps where the system wakes it up: in time.sleep, while
it reads a file, or while it waits for a child.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Limits", "Outside"]

_NUM_LOOKS = 4
# In all longer than sys.getswitchinterval(): a thread that waits for the GIL wakes up that often, and is seen to have
# run.
_BETWEEN_LOOKS = 0.002
# A thread that sleeps most of the time, and runs for less than this share of it, polls for something. Threads that
# compute, but wait for each other's GIL, run for more.
_SHARE_OF_POLLING = 0.1
_TICKS_PER_SECOND = 100.0
# System calls in which a thread waits for other threads: futex, futex_waitv, and epoll, as event loops do. In others it
# naps. On other machines no thread is known to nap.
_WAITS = {
    "x86_64": ("202", "449", "232", "281", "441"),
    "aarch64": ("98", "449", "22", "441"),
}.get(platform.machine())


class Limits(NamedTuple):
    """Seconds for which a thread is waited for in all, until it communicates."""

    polling: float
    computing: float
    napping: float = 0.0


class _Look(NamedTuple):
    """What is seen of a thread at one moment."""

    # A letter; empty where the thread has ended.
    state: str
    # Differ from those of another look if it has run between the two.
    counts: tuple[int, ...]
    # Seconds for which it has run, and has waited for a CPU, as far as known.
    ran: float
    queued: float


class _Waited:
    """For how long a thread was waited for while it was awake, and what it did meanwhile."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._has_run = False
        self._ran = 0.0
        self._slept = 0.0
        # When it was last looked at, and what was seen.
        self.looked_at = 0.0
        self.look = _Look("", (), 0.0, 0.0)

    def add(self, now: float, look: _Look, has_run: bool) -> None:
        """It was awake, or napped, since the last look."""
        seconds, ran = now - self.looked_at, look.ran - self.look.ran
        self._has_run |= has_run
        self.seconds += seconds
        self._ran += ran
        self._slept += max(0.0, seconds - ran - (look.queued - self.look.queued))
        self.looked_at, self.look = now, look

    def limit(self, limits: Limits, naps: bool) -> float:
        if naps and not self._has_run:
            return limits.napping
        polls = self._ran < (self._ran + self._slept) * _SHARE_OF_POLLING
        return limits.polling if polls else limits.computing


class Outside:
    """Such threads, as the system numbers them, each with its rank. Each is waited for anew when it is added anew."""

    def __init__(self) -> None:
        self._waited: dict[int, _Waited] = {}
        self._ranks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._waited)

    def __contains__(self, thread: int) -> bool:
        return thread in self._waited

    def add(self, thread: int, rank: int = 0) -> None:
        self._ranks[thread] = rank
        self._waited[thread] = _Waited()

    def discard(self, thread: int) -> None:
        self._waited.pop(thread, None)
        self._ranks.pop(thread, None)

    def discard_all_of(self, rank: int) -> None:
        for thread, owner in list(self._ranks.items()):
            if owner == rank:
                self.discard(thread)

    def may_come(
        self,
        since: float,
        limits_of: Callable[[int], Limits],
        has_come: Callable[[], bool] = lambda: False,
        rank: int | None = None,
    ) -> bool:
        """Looks at the threads for some milliseconds: whether one of them, or of a rank's, is worth waiting for.

        `since` is when the caller began to wait for them.
        """
        waited = dict(self._waited)
        if rank is not None:
            waited = {thread: one for thread, one in waited.items() if self._ranks.get(thread) == rank}
        if not waited:
            return False
        begin = time.monotonic()
        looks: list[list[_Look]] = []
        for look in range(_NUM_LOOKS):
            if look:
                # A thread that waits for the GIL gets it now, and is seen to have run.
                time.sleep(_BETWEEN_LOOKS)
            looks.append([_look_at(thread) for thread in waited])
            if has_come():
                return True
        now = time.monotonic()
        worth = False
        for (thread, before), *seen in zip(waited.items(), *looks, strict=True):
            if before.looked_at < since:
                before.looked_at, before.look = begin, seen[0]
            has_run = any(look.counts != seen[0].counts for look in seen)
            naps = not has_run and seen[-1].state not in ("R", "") and _naps(thread, seen[-1].state)
            if has_run or naps:
                before.add(now, seen[-1], has_run)
            elif seen[-1].state != "R":
                # It sleeps.
                before.looked_at, before.look = now, seen[-1]
                continue
            worth |= before.seconds < before.limit(limits_of(thread), naps)
        return worth


def _naps(thread: int, state: str) -> bool:
    """Whether a thread that does not run comes back without the help of another one."""
    if state == "D":
        return True
    try:
        call = Path(f"/proc/self/task/{thread}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return False
    return _WAITS is not None and call.isdigit() and call not in _WAITS


def _look_at(thread: int) -> _Look:
    folder = Path(f"/proc/self/task/{thread}")
    try:
        fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        return _with_times(fields[0], folder) or _with_switches(fields, folder)
    except (OSError, IndexError, ValueError):
        return _Look("", (), 0.0, 0.0)


def _with_times(state: str, folder: Path) -> _Look | None:
    """Where the kernel keeps account of times; some do not, or leave them zero."""
    try:
        ran, queued, times = map(int, (folder / "schedstat").read_text().split())
    except FileNotFoundError:
        return None
    return _Look(state, (ran, times), ran / 1e9, queued / 1e9) if times else None


def _with_switches(fields: list[str], folder: Path) -> _Look:
    ticks = int(fields[11]) + int(fields[12])
    lines = (folder / "status").read_text().splitlines()
    switches = [int(line.split()[1]) for line in lines if "ctxt_switches" in line]
    return _Look(fields[0], (ticks, *switches), ticks / _TICKS_PER_SECOND, 0.0)
