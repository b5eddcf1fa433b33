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

__all__ = ["Sight", "acting", "idle_threads", "look"]

_TASKS = Path("/proc/self/task")
# The system call's number, and the bits of its second argument.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)
_COMMAND, _PRIVATE = 0x7F, 0x80
# FUTEX_WAIT, FUTEX_LOCK_PI, FUTEX_WAIT_BITSET and FUTEX_LOCK_PI2.
_WAITS = (0, 6, 9, 13)
# Native threads of ours, and those of torch that make no calls and run no code of the program.
_OUR_NAMES = ("phalanx", "phalanx-deaths")
_TORCH_NAMES = ("pt_gloo", "pt_tcpstore", "pt_nccl")
_OUR_THREADS = ("phalanx-answers", "phalanx-waits")
_KEEPER = "phalanx-keeper"
_RUNNING = "R"


class Sight(NamedTuple):
    """A thread at one look."""

    name: str
    state: str  # the system's letter
    switches: tuple[int, int]
    syscall: str  # as the system writes it; empty where it can't be read

    @property
    def is_parked(self) -> bool:
        """Whether it waits for a lock of this process, without a timeout."""
        fields = self.syscall.split()
        if len(fields) < 5 or fields[0] != str(_FUTEX):
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


def idle_threads() -> set[int]:
    """Python threads of ours that run nothing of the program now."""
    frames = sys._current_frames()
    idle = set()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread.name in _OUR_THREADS or (
            # A keeper runs callbacks of the program, and else sleeps in a function of its own.
            thread.name == _KEEPER and frame is not None and frame.f_code.co_filename.endswith("transports/keeper.py")
        ):
            idle.add(thread.native_id or 0)
    return idle


def acting(
    before: Mapping[int, Sight], now: Mapping[int, Sight], waiting: Collection[int], idle: Collection[int], main: int
) -> list[Acting]:
    """Of the threads at the second of two looks, those that may act. `waiting` are those in our waits."""
    own_name = now[main].name if main in now else ""
    found = []
    for number, sight in sorted(now.items()):
        helps = (
            number != main
            and sight.name != own_name
            and (sight.name in _OUR_NAMES or sight.name.startswith(_TORCH_NAMES))
        )
        if number in waiting or number in idle or helps:
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
