"""Which threads of this process may still act: make the call for which a peer waits, or let another thread make it.

Two looks at `/proc/self/task` tell. A thread is parked if it has slept all the time, in a wait for a lock of this
process that has no timeout: only another thread of this process can wake it. Threads of ours and of torch that make no
calls count for nothing. Any other thread may act, whatever it does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from phalanx.debug.answers import describe_frame
from phalanx.debug.waiting import Acting
from phalanx.transports import keeper
from phalanx.transports.waits import Helpers

__all__ = ["Sight", "acting", "idle_threads", "look"]

_TASKS = Path("/proc/self/task")
# The system call's number, and the bits of its second argument.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)
_COMMAND, _PRIVATE = 0x7F, 0x80
# FUTEX_WAIT, FUTEX_LOCK_PI, FUTEX_WAIT_BITSET and FUTEX_LOCK_PI2.
_WAITS = (0, 6, 9, 13)
# Native threads of ours, and those of torch that only serve other processes. Those that carry on the calls of a backend
# are not among them: a thread of the program may wait for them.
_OUR_NAMES = ("phalanx", "phalanx-deaths")
_TORCH_NAMES = ("pt_tcpstore",)
_OUR_THREADS = ("phalanx-answers", "phalanx-guard", "phalanx-waits")
_KEEPER = "phalanx-keeper"
_RUNNING = "R"
_NO_HELPERS = Helpers()


class Sight(NamedTuple):
    """A thread at one look."""

    name: str
    state: str  # the system's letter
    switches: tuple[int, int]
    syscall: str  # as the system writes it; empty where it can't be read

    @property
    def is_in_futex(self) -> bool:
        return self.syscall.partition(" ")[0] == str(_FUTEX)

    @property
    def is_parked(self) -> bool:
        """Whether it waits for a lock of this process, without a timeout."""
        fields = self.syscall.split()
        if len(fields) < 5 or not self.is_in_futex:
            return False
        command, timeout = int(fields[2], 16), int(fields[4], 16)
        return timeout == 0 and bool(command & _PRIVATE) and command & _COMMAND in _WAITS


def look(tasks: Path = _TASKS) -> dict[int, Sight]:
    """All threads of this process. Those that end meanwhile are left out."""
    found = {}
    for name in os.listdir(tasks):
        try:
            found[int(name)] = _sight(tasks / name)
        except (OSError, ValueError, KeyError):
            continue
    return found


def _sight(task: Path) -> Sight:
    fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
    try:
        syscall = (task / "syscall").read_text().strip()
    except OSError:
        syscall = ""
    switches = int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"])
    return Sight(fields["Name"].strip(), fields["State"].split()[0], switches, syscall)


def idle_threads(sights: Mapping[int, Sight]) -> set[int]:
    """Python threads of ours that run nothing of the program now, and are not about to."""
    frames = sys._current_frames()
    idle = set()
    for thread in threading.enumerate():
        number = thread.native_id or 0
        if thread.name in _OUR_THREADS:
            idle.add(number)
        elif thread.name == _KEEPER and number in sights:
            # A keeper runs callbacks of the program, and else sleeps in a function of its own. One that was woken does
            # not sleep any more, even if it has not run yet.
            frame = frames.get(thread.ident or 0)
            is_at_home = frame is not None and frame.f_code.co_filename == keeper.__file__
            if is_at_home and sights[number].is_in_futex:
                idle.add(number)
    return idle


def acting(
    before: Mapping[int, Sight],
    now: Mapping[int, Sight],
    waiting: Collection[int],
    idle: Collection[int],
    main: int,
    helpers: Helpers = _NO_HELPERS,
) -> list[Acting]:
    """Of the threads at the second of two looks, those that may act. `waiting` are those in our waits."""
    own_name = now[main].name if main in now else ""
    found = []
    for number, sight in sorted(now.items()):
        helps = (
            number != main
            and sight.name != own_name
            and (sight.name in _OUR_NAMES or sight.name.startswith((*_TORCH_NAMES, *helpers.names)))
        )
        if number in waiting or number in idle or number in helpers.threads or helps:
            continue
        if not (sight.is_parked and before.get(number) == sight):
            found.append(Acting(number, number == main, _describe(number, sight, main)))
    return found


def _describe(number: int, sight: Sight, main: int) -> str:
    thread = next((each for each in threading.enumerate() if each.native_id == number), None)
    name = thread.name if thread is not None else sight.name
    what = "the main thread" if number == main else f"the thread {name!r}"
    does = "that runs" if sight.state == _RUNNING else "that sleeps"
    frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
    where = describe_frame(frame).where
    return f"{what}, {does}{f' at {where}' if where else ''}"
