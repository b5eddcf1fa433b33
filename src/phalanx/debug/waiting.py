"""What a process that waits for long shows its peers: a file next to its black box, written anew at each look.

Processes do not talk to each other. Each writes what it waits for, with two times that any reader can compare, since
all processes of a host share the monotonic clock: what a snapshot says was so from `same_since_ns` to `began_ns`,
without a break. If those stretches of several processes have a moment in common, all of it was so at that moment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.debug.job_folder import JobFolder
from phalanx.printable import printable

__all__ = ["ANYBODY", "Acting", "GroupState", "PeerProcess", "Pending", "Process", "Snapshot", "Wait", "read", "suffix"]

# Its number and its start time.
Process = tuple[int, int]
ANYBODY = -1
suffix = ".waits"
_MOST_BYTES = 4_000_000


class PeerProcess(NamedTuple):
    """The process of a rank, and the folder where it shows what it waits for."""

    pid: int
    start: int
    folder: str

    @property
    def process(self) -> Process:
        return self.pid, self.start


class Pending(NamedTuple):
    """A call of this process that has not ended, and for which nothing can be done here at the moment."""

    op: str
    seq: int
    is_message: bool
    peer: int
    tag: int
    is_matched: bool  # a message whose two sides have met: its bytes move
    missing: list[int]  # the ranks for which a collective waits
    where: str


class GroupState(NamedTuple):
    """A group, as one of its ranks sees it. Of a group of another engine only the names are known."""

    name: str
    rank: int
    seq: int  # the last collective that was handed over
    # None: not known, as calls came and went all the time.
    pending: list[Pending] | None
    processes: dict[int, PeerProcess]  # of the ranks that are waited for


class Wait(NamedTuple):
    """A thread that waits, or a call of another engine that keeps a thread from going on."""

    id: int
    thread: int
    thread_name: str  # empty: the main thread
    group: str  # its identity
    op: str
    seq: int
    is_message: bool
    peer: int
    tag: int
    is_bounded: bool
    where: str
    # Of a call of another engine: the ranks that have to act, all or any of them.
    absent: list[int] | None
    is_any: bool


class Acting(NamedTuple):
    """A thread that may do something without any rank's help."""

    thread: int
    is_main: bool
    text: str  # which one it is, and what it does


class Snapshot(NamedTuple):
    process: Process
    rank: int  # in the job
    began_ns: int
    ended_ns: int
    same_since_ns: int  # the end of the first look that found the same groups and waits
    quiet_since_ns: int  # the end of the first look since which no other thread has acted; 0: one acts
    groups: dict[str, GroupState]
    waits: list[Wait]
    acting: list[Acting]
    # Deadlocks of which calls here have told their callers.
    told: list[str]

    def key(self) -> object:
        """Equal in looks that found the same."""
        return self.groups, self.waits

    def pack(self) -> bytes:
        return json.dumps(self).encode()


def read(folder: str, process: Process) -> Snapshot | None:
    """The last one of another process; None where it shows none."""
    try:
        with JobFolder.own(Path(folder)) as opened:
            found = unpack(opened.read(f"{process[0]}{suffix}", _MOST_BYTES))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.process == process else None


def unpack(data: bytes) -> Snapshot:
    """Raises ValueError, TypeError or KeyError where it is none."""
    process, rank, began, ended, same, quiet, groups, waits, acting, told = json.loads(data)
    return Snapshot(
        (int(process[0]), int(process[1])),
        int(rank),
        int(began),
        int(ended),
        int(same),
        int(quiet),
        {str(identity): _group(state) for identity, state in groups.items()},
        [_wait(fields) for fields in waits],
        [Acting(int(thread), bool(is_main), printable(str(text))) for thread, is_main, text in acting],
        [str(each) for each in told],
    )


def _group(fields: Any) -> GroupState:
    name, rank, seq, pending, processes = fields
    return GroupState(
        printable(str(name)),
        int(rank),
        int(seq),
        None if pending is None else [_pending(each) for each in pending],
        _processes(processes),
    )


def _processes(fields: Mapping[str, Any]) -> dict[int, PeerProcess]:
    return {int(rank): PeerProcess(int(pid), int(start), str(folder)) for rank, (pid, start, folder) in fields.items()}


def _pending(fields: Any) -> Pending:
    op, seq, is_message, peer, tag, is_matched, missing, where = fields
    return Pending(
        printable(str(op)),
        int(seq),
        bool(is_message),
        int(peer),
        int(tag),
        bool(is_matched),
        [int(rank) for rank in missing],
        printable(str(where)),
    )


def _wait(fields: Any) -> Wait:
    number, thread, name, group, op, seq, is_message, peer, tag, is_bounded, where, absent, is_any = fields
    return Wait(
        int(number),
        int(thread),
        printable(str(name)),
        str(group),
        printable(str(op)),
        int(seq),
        bool(is_message),
        int(peer),
        int(tag),
        bool(is_bounded),
        printable(str(where)),
        None if absent is None else [int(rank) for rank in absent],
        bool(is_any),
    )
