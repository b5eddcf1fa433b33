"""What a black box says: the last calls of a process, how it ended, and which peers it saw die.

`box_reader` reads boxes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from phalanx import _native
from phalanx.debug.box_layout import NEWEST
from phalanx.debug.box_texts import CallSite, GroupName

__all__ = [
    "ABORTED",
    "DIED",
    "ENDED_WELL",
    "FAILED",
    "LEFT",
    "LOST",
    "MAKING",
    "MISFIT",
    "MISMATCH",
    "RUNNING",
    "TIMEOUT",
    "Box",
    "CallSite",
    "Death",
    "GroupName",
    "Header",
    "Record",
    "ending_of",
    "is_alive",
]

# What the making of a group is called.
MAKING = "new_group"
# How a process ended, or that it has not.
RUNNING = "running"
ENDED_WELL = "ended well"
FAILED = "failed"
DIED = "died without recording an exit"

# Why a group failed.
MISMATCH, TIMEOUT, ABORTED, LEFT, LOST, MISFIT = "mismatch", "timeout", "aborted", "left", "lost", "message"


@dataclass(frozen=True, slots=True)
class Record:
    """A call. Times are nanoseconds since the epoch, None where the call has not come so far."""

    number: int
    state: str
    group: GroupName
    op: str
    seq: int  # 0: has none yet
    count: int
    bytes_in: int
    bytes_out: int
    created_ns: int
    started_ns: int | None
    ended_ns: int | None
    location: CallSite | None
    # Ranks of the group; NO_RANK: none, or unknown.
    root: int
    peer: int  # the other side of a message; NO_RANK also where that is any rank
    sender: int  # of what a receive from any rank got, as soon as it was known
    last_arriver: int  # the peer that came last, where this rank waited for one peer alone, or saw all come
    tag: int
    reduce_op: str | None
    dtype: str | None
    is_async: bool
    in_backward: bool
    by_reducer: bool
    is_list: bool  # `sizes` are those of a list of tensors, or splits, and no shape
    num_sizes: int  # of which `sizes` has the first eight
    sizes: tuple[int, ...]
    timeout_ms: int
    unlisted_dtype: int  # tells dtypes without a number apart; 0: the dtype has one
    device: str | None  # the type of the device on which the tensors lie; None: there are none, or it is unknown
    engine: str | None  # who moves the bytes; None: unknown
    failure: str | None = None  # why it failed, of FAILURES; None: it has not, or the box does not tell
    blamed: int = _native.NO_RANK  # the rank of the group whose end the failure was
    is_making: bool = False  # of a group, and no call

    @property
    def traits(self) -> _native.OpTraits:
        """The row of the op in the table of ops. A making has none."""
        return _native.TRAITS[self.op]

    @property
    def is_message(self) -> bool:
        return not self.is_making and self.traits.is_message

    @property
    def has_begun(self) -> bool:
        """Not queued any more, and not refused because the group was broken already."""
        return self.started_ns is not None or self.state == "completed"

    @property
    def last_ns(self) -> int:
        """When the call was last heard of."""
        return self.ended_ns or self.started_ns or self.created_ns


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was seen to have died."""

    seen_ns: int
    pid: int
    start: int
    status: int  # as waitpid gives it; UNKNOWN_STATUS
    is_replaced: bool  # it lived on, and had called exec
    rank: int = _native.NO_RANK  # in the job; NO_RANK: unknown

    @property
    def is_by_signal(self) -> bool:
        return self.status != _native.UNKNOWN_STATUS and os.WIFSIGNALED(self.status)


@dataclass(slots=True)
class Header:
    """What a box says of its process."""

    path: str  # "" where the box is no file
    version: int
    pid: int
    start: int  # clock ticks from the system's start
    clock_offset_ns: int
    rank: int  # in the first group that the process made; -1: has made none
    world_size: int
    capacity: int
    num_begun: int  # records, also those that gave way to others since
    ending: str  # RUNNING also where the process died: see `ending_of`
    program: str
    # What follows is not known from boxes of version 1.
    ended_ns: int | None  # when the process began to end in order
    exception: str  # what ended it, that nobody caught; empty: nothing
    is_consequence: bool  # the exception came of a group's failure
    status: int  # how it ended, by what it knew itself; as waitpid gives it
    num_hidden: int  # calls in flight whose records were overwritten
    deaths: list[Death]  # of other processes, in the order in which it saw them
    host: str  # the name of its host; empty in boxes of version 2


@dataclass(slots=True)
class Box(Header):
    """A black box."""

    records: list[Record]  # by ascending number
    # The makings of groups, by ascending number. Seq: the meeting's number. The group's place: the meeting's.
    makings: list[Record] = field(default_factory=list)
    num_left_out: int = 0  # groups for which there was no room; their records have an unknown group

    @classmethod
    def missing(cls, death: Death) -> Box:
        """That of a process of which only its death is known."""
        return cls(
            path="",
            version=NEWEST.version,
            pid=death.pid,
            start=death.start,
            clock_offset_ns=0,
            rank=death.rank,
            world_size=0,
            capacity=0,
            num_begun=0,
            ending=RUNNING,
            program="",
            ended_ns=None,
            exception="",
            is_consequence=False,
            status=_native.UNKNOWN_STATUS,
            num_hidden=0,
            deaths=[],
            host="",
            records=[],
        )

    @property
    def last_ns(self) -> int:
        """When its process was last heard of: by a call, by a death that it saw, or by its own end; 0: never."""
        seen = [death.seen_ns for death in self.deaths]
        return max((*(record.last_ns for record in (*self.records, *self.makings)), *seen, self.ended_ns or 0))

    def knew_failure(self, ns: float) -> bool:
        """Whether a group that the process was in, or was making, had failed before."""
        return any(each.failure and (each.ended_ns or 0) < ns for each in (*self.records, *self.makings))


def ending_of(header: Header) -> str:
    """How the process ended."""
    return DIED if header.ending == RUNNING and not is_alive(header.pid, header.start) else header.ending


def is_alive(pid: int, start: int) -> bool:
    """Of a process of this host, known by its number and its start. True where that can't be seen."""
    own_pid, own_start = _native.own_identity()
    if pid == own_pid:
        return start == own_start
    try:
        peer = _native.Peer.watch(pid, start)
    except OSError:
        return True
    return peer is None or not peer.dead
