"""Threads of ranks that do not communicate: whether they sleep, poll or compute, and how long they are waited for.

When no rank can go on, a thread that runs without having the turn may still come to communicate, or may never. What it
does is seen in /proc only. A thread that sleeps is not waited for; how long one that polls or computes is waited for,
the caller says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Limits", "Outside"]

_NUM_LOOKS = 4
_BETWEEN_LOOKS = 0.001
# A thread that sleeps most of the time, and runs for less than this share of it, polls for something. Threads that
# compute, but wait for each other's GIL, run for more.
_SHARE_OF_POLLING = 0.1
_TICKS_PER_SECOND = 100.0


class Limits(NamedTuple):
    """Seconds for which a thread is waited for in all, until it communicates."""

    polling: float
    computing: float


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
        self._ran = 0.0
        self._slept = 0.0
        # When it was last looked at, and what was seen.
        self.looked_at = 0.0
        self.look = _Look("", (), 0.0, 0.0)

    def add(self, now: float, look: _Look) -> None:
        """It was awake since the last look."""
        seconds, ran = now - self.looked_at, look.ran - self.look.ran
        self.seconds += seconds
        self._ran += ran
        self._slept += max(0.0, seconds - ran - (look.queued - self.look.queued))
        self.looked_at, self.look = now, look

    @property
    def polls(self) -> bool:
        return self._ran < (self._ran + self._slept) * _SHARE_OF_POLLING


class Outside:
    """Such threads, as the system numbers them. Each is waited for anew when it is added anew."""

    def __init__(self) -> None:
        self._waited: dict[int, _Waited] = {}

    def __len__(self) -> int:
        return len(self._waited)

    def __contains__(self, thread: int) -> bool:
        return thread in self._waited

    def add(self, thread: int) -> None:
        self._waited[thread] = _Waited()

    def discard(self, thread: int) -> None:
        self._waited.pop(thread, None)

    def may_come(
        self, since: float, limits_of: Callable[[int], Limits], has_come: Callable[[], bool] = lambda: False
    ) -> bool:
        """Looks at the threads for some milliseconds: whether one of them is worth waiting for.

        `since` is when the caller began to wait for them.
        """
        waited = dict(self._waited)
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
            if has_run:
                before.add(now, seen[-1])
            elif seen[-1].state != "R":
                # It sleeps.
                before.looked_at, before.look = now, seen[-1]
                continue
            limits = limits_of(thread)
            worth |= before.seconds < (limits.polling if before.polls else limits.computing)
        return worth


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
