"""Black boxes, read: the last calls of a process, from a file that outlives it.

`_core/black_box.hpp` says how a box is written. Its process may go on writing while it is read: a record is taken only
if its number is the same before and after, and texts are looked up in what was read last, for they only grow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from phalanx import _native
from phalanx.debug.box_layout import (
    DEATH,
    EXCEPTION_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MORE,
    MOST_DEATHS,
    NUMBERS,
    RECORD,
    VERSIONS,
)
from phalanx.debug.box_texts import GroupName, Location, Room, Texts
from phalanx.debug.job_folder import Bytes, File, open_file
from phalanx.printable import printable
from phalanx.types import NO_REDUCE_OP, NO_ROOT, REDUCE_OP_NAMES

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
    "Death",
    "GroupName",
    "Header",
    "Location",
    "Record",
    "ending_of",
    "is_alive",
    "read_box",
    "read_header",
]

Source = File | str | os.PathLike[str] | bytes | bytearray | memoryview

_NUMBER = struct.Struct("<Q")
_STATES = {1: "scheduled", 2: "started", 3: "completed", 4: "failed"}
# What a writer makes at most. A header may say anything, and is not to decide how much memory a reader takes.
_MOST_CAPACITY = 10_000_000
_MOST_ARENA_BYTES = 16 * 1024 * 1024
_MOST_PID = 2**31 - 1
# Of a box that has more, the newest records are read, a part at a time.
_MOST_RECORDS = 100_000
_RECORDS_AT_ONCE = 4096

# What the making of a group is called.
MAKING = "new_group"
# How a process ended, or that it has not.
RUNNING = "running"
ENDED_WELL = "ended well"
FAILED = "failed"
DIED = "died without recording an exit"
_ENDINGS = (RUNNING, ENDED_WELL, FAILED)
_EXCEPTION, _CONSEQUENCE = 2, 3

# Why a group failed, as in _core/layout.hpp.
MISMATCH, TIMEOUT, ABORTED, LEFT, LOST, MISFIT = "mismatch", "timeout", "aborted", "left", "lost", "message"
_FAILURES = (None, MISMATCH, TIMEOUT, ABORTED, LEFT, LOST, MISFIT)


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
    location: Location | None
    tag: int
    peer: int  # the root, or the other side of a message, as a rank of the group; -1: none, or any
    reduce_op: str | None
    dtype: str | None
    is_async: bool
    in_backward: bool
    by_reducer: bool
    is_list: bool  # `sizes` are those of a list of tensors, or splits, and no shape
    num_sizes: int  # of which `sizes` has the first eight
    sizes: tuple[int, ...]
    timeout_ms: int
    failure: str | None = None  # why it failed, of FAILURES; None: it has not, or the box does not tell
    blamed: int = NO_ROOT  # the rank of the group whose end the failure was

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def is_making(self) -> bool:
        """Of a group, and no call."""
        return self.op == MAKING

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
    rank: int = NO_ROOT  # in the job; NO_ROOT: unknown

    @property
    def is_by_signal(self) -> bool:
        return self.status != _native.UNKNOWN_STATUS and os.WIFSIGNALED(self.status)


@dataclass(slots=True)
class Header:
    """What a box says of its process."""

    path: str  # "" where the box is no file
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


@dataclass(slots=True)
class Box(Header):
    """A black box."""

    records: list[Record]  # by ascending number
    # The makings of groups, by ascending number. Seq: the meeting's number. The group's identity: the meeting's place.
    makings: list[Record] = field(default_factory=list)
    num_left_out: int = 0  # groups for which there was no room; their records have an unknown group

    @classmethod
    def missing(cls, death: Death) -> Box:
        """That of a process of which only its death is known."""
        return cls(
            path="",
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


def read_box(source: Source, most: int | None = None, room: Room | None = None) -> Box:
    """With its newest records only, where `most` says how many. Raises ValueError for what is no box, and OSError.

    Boxes that are kept at the same time share a `room`.
    """
    room = room or Room()
    if isinstance(source, str | os.PathLike):
        with open_file(source) as file:
            return _read_box(file, most, room)
    return _read_box(source if isinstance(source, File) else Bytes(source), most, room)


def read_header(source: File | str | os.PathLike[str]) -> Header:
    """Raises ValueError for what is no box, and OSError."""
    if isinstance(source, File):
        return _header(source.path, source.read_at(0, HEADER_BYTES))[0]
    with open_file(source) as file:
        return read_header(file)


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


def _read_box(data: File | Bytes, most: int | None, room: Room) -> Box:
    name = data.path or "these bytes"
    header, arena_bytes = _header(data.path, data.read_at(0, HEADER_BYTES))
    first = HEADER_BYTES + arena_bytes
    expected = first + header.capacity * RECORD.size
    if not data.read_at(expected - 1, 1):
        raise ValueError(f"{name}: expected a black box of {expected} bytes, got one that was cut")
    most = min(room.records_per_box, _MOST_RECORDS if most is None else most)
    # The newest ones first: theirs is the room.
    raw = sorted(_whole_records(data, first, header, most), reverse=True)
    # Texts only grow, so those of all records are in what is read last.
    texts = Texts(data.read_at(HEADER_BYTES, arena_bytes), header.world_size, room)
    offset = header.clock_offset_ns
    records = [record for _, each in raw if (record := _record(RECORD.unpack(each), texts, offset)) is not None]
    records.reverse()
    known = {each.name: getattr(header, each.name) for each in fields(Header)}
    return Box(
        **known,
        records=[record for record in records if not record.is_making],
        makings=[record for record in records if record.is_making],
        num_left_out=texts.num_left_out,
    )


def _whole_records(data: File | Bytes, first: int, header: Header, most: int) -> Iterator[tuple[int, bytes]]:
    """The records that do not change while they are read, of the newest ones, each with its number."""
    for begin, end in _newest_slots(header, most):
        for slot in range(begin, end, _RECORDS_AT_ONCE):
            num = min(_RECORDS_AT_ONCE, end - slot)
            place = (first + slot * RECORD.size, num * RECORD.size)
            before, read, after = data.read_at(*place), data.read_at(*place), data.read_at(*place)
            if min(map(len, (before, read, after))) < place[1]:
                raise ValueError(f"{header.path or 'these bytes'}: expected a black box, got one that is being cut")
            for index in range(num):
                at = index * RECORD.size
                number = _number(read, at)
                # A record has its place by its number.
                if not number or (number - 1) % header.capacity != slot + index:
                    continue
                if all(_number(each, at) == number for each in (before, after)):
                    yield number, read[at : at + RECORD.size]


def _number(data: bytes, at: int) -> int:
    number: int = _NUMBER.unpack_from(data, at)[0]
    return number & NUMBERS


def _newest_slots(header: Header, most: int) -> list[tuple[int, int]]:
    """Ranges of slots that have the newest records."""
    capacity = header.capacity
    if capacity <= most:
        return [(0, capacity)]
    if header.num_begun <= most:
        return [(0, most)]
    end = header.num_begun % capacity
    begin = end - most
    return [(begin, end)] if begin >= 0 else [(begin + capacity, capacity), (0, end)]


def _header(path: str, data: bytes) -> tuple[Header, int]:
    """And the size of the arena."""
    name = path or "these bytes"
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise ValueError(f"{name}: expected a black box, got something else")
    found = HEADER.unpack(data)
    if found["version"] not in VERSIONS:
        known = " or ".join(map(str, VERSIONS))
        raise ValueError(f"{name}: expected a black box of version {known}, got version {found['version']}")
    if reason := _damage(found):
        raise ValueError(f"{name}: expected a black box, got one that is damaged: {reason}")
    more = MORE.unpack(data) if found["version"] > 1 else dict.fromkeys(MORE.names, 0)
    offset = found["clock_offset"]
    is_exception = more["how"] in (_EXCEPTION, _CONSEQUENCE)
    exception_at = DEATH.offset + MOST_DEATHS * DEATH.size
    header = Header(
        path=path,
        pid=found["pid"],
        start=found["start"],
        clock_offset_ns=offset,
        rank=found["rank"],
        world_size=found["world_size"],
        capacity=found["capacity"],
        num_begun=found["begun"],
        ending=_ENDINGS[found["ending"]] if found["ending"] < len(_ENDINGS) else FAILED,
        program=_text(found["program"]),
        ended_ns=more["ended"] + offset if more["ended"] else None,
        exception=_text(data[exception_at : exception_at + EXCEPTION_BYTES]) if is_exception else "",
        is_consequence=more["how"] == _CONSEQUENCE,
        status=more["exit_status"] - 1 if more["exit_status"] > 0 else _native.UNKNOWN_STATUS,
        num_hidden=max(0, more["num_hidden"]),
        deaths=list(_deaths(data, offset)) if found["version"] > 1 else [],
    )
    return header, found["arena_bytes"]


def _damage(found: dict[str, Any]) -> str:
    """What no writer writes; empty: nothing."""
    limits = {
        "capacity": (1, _MOST_CAPACITY),
        "arena_bytes": (1, _MOST_ARENA_BYTES),
        "record_bytes": (RECORD.size, RECORD.size),
        "pid": (1, _MOST_PID),
        "rank": (-1, _MOST_PID),
        "world_size": (0, _native.MAX_RANKS),
    }
    for name, (least, most) in limits.items():
        if not least <= found[name] <= most:
            return f"{name} is {found[name]}"
    return ""


def _deaths(data: bytes, offset: int) -> Iterator[Death]:
    for number in range(MOST_DEATHS):
        death = DEATH.unpack(data, number * DEATH.size)
        if death["seen"] and 0 < death["pid"] <= _MOST_PID:
            yield Death(
                death["seen"] + offset,
                death["pid"],
                death["start"],
                death["status"],
                bool(death["replaced"]),
                death["rank"] - 1,
            )


def _text(data: bytes) -> str:
    """Up to the zero that ends it."""
    return printable(data.partition(b"\0")[0].decode(errors="replace"))


def _record(found: dict[str, Any], texts: Texts, offset: int) -> Record | None:
    """None where it says what no writer writes. `offset` leads from the box's clock to the epoch."""
    reduce_op, flags = found["reduce_op"], found["flags"]
    started, ended = found["started"], found["ended"]
    try:
        return Record(
            number=found["number"] & NUMBERS,
            state=_STATES[found["state"]],
            group=texts.group(found["group"]),
            op=MAKING if found["op"] == _native.MAKING else _native.OPS[found["op"]].name,
            seq=found["seq"],
            count=found["count"],
            bytes_in=found["bytes_in"],
            bytes_out=found["bytes_out"],
            created_ns=found["created"] + offset,
            started_ns=started + offset if started else None,
            ended_ns=ended + offset if ended else None,
            location=texts.location(found["location"]),
            tag=found["tag"],
            peer=found["peer"],
            reduce_op=REDUCE_OP_NAMES[reduce_op] if reduce_op > NO_REDUCE_OP else None,
            dtype=_native.DTYPES[found["dtype"]].name if 0 < found["dtype"] < len(_native.DTYPES) else None,
            is_async=bool(flags & 1),
            in_backward=bool(flags & 2),
            by_reducer=bool(flags & 4),
            is_list=bool(flags & 8),
            num_sizes=found["num_sizes"],
            sizes=tuple(found[f"size{index}"] for index in range(min(8, found["num_sizes"]))),
            timeout_ms=found["timeout_ms"],
            failure=_FAILURES[found["failure"]],
            blamed=found["blamed"] - 1,
        )
    except (LookupError, ValueError):
        return None
