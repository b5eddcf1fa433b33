"""What a process holds: threads, file descriptors, mapped segments, private memory; and files that everybody sees."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SEGMENTS = ("/memfd:phalanx", "/dev/shm/phalanx-")


@dataclass(frozen=True)
class Holdings:
    threads: frozenset[str]
    fds: frozenset[str]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        threads = frozenset(f"{task} {_text(f'/proc/self/task/{task}/comm')}" for task in os.listdir("/proc/self/task"))
        fds = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                fds.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
            except FileNotFoundError:  # the one that lists the folder
                continue
        lines = _text("/proc/self/maps").splitlines()
        return cls(
            threads, frozenset(fds), frozenset(line for line in lines if any(name in line for name in _SEGMENTS))
        )

    def beyond(self, before: Holdings) -> list[str]:
        """What is held now and was not before, one line each. A thread or file that was replaced by another counts."""
        fds = sorted(self.fds - before.fds)
        # The black box belongs to the process until its end, and with it the lock of its job's folder, once.
        locks = [fd for fd in fds if fd.partition(" -> ")[2] == _job_lock()]
        fds = [fd for fd in fds if fd not in locks[:1]]
        return [
            *(f"thread {thread}" for thread in sorted(self.threads - before.threads)),
            *(f"file descriptor {fd}" for fd in fds),
            *(f"segment {segment}" for segment in sorted(self.segments - before.segments)),
        ]


def left_over(before: Holdings, seconds: float) -> list[str]:
    """What this process still holds beyond `before`. Threads need a moment to go: it looks until the time is over."""
    now = next_collection = time.monotonic()
    deadline = now + seconds
    while True:
        # A collection may take 200 ms of CPU time.
        if now >= next_collection:
            gc.collect()
            next_collection = time.monotonic() + 0.5
        left = Holdings.now().beyond(before)
        now = time.monotonic()
        if left and now > deadline:
            gc.collect()
            return Holdings.now().beyond(before)
        if not left:
            return left
        time.sleep(0.002)


def private_bytes() -> int:
    """The resident memory of this process that it shares with nobody, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _, resident, shared = (int(number) for number in _text("/proc/self/statm").split()[:3])
    return (resident - shared) * _PAGE


def shared_files() -> set[str]:
    """The files of Phalanx in /dev/shm, of this and other programs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("phalanx-")}


def left_files(before: set[str], seconds: float) -> list[str]:
    """The files that came since `before` and do not go: those of other programs have a name for moments only."""
    deadline = time.monotonic() + seconds
    while True:
        left = shared_files() - before
        if not left or time.monotonic() > deadline:
            return sorted(left)
        os.sched_yield()


def _job_lock() -> str:
    from phalanx.debug.own_box import own_box

    return f"{own_box().folder}/lock"


def _text(path: str) -> str:
    try:
        return Path(path).read_text().rstrip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
