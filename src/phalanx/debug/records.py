"""Black boxes, read: the last calls of a process, from a file that outlives it.

`_core/black_box.hpp` says how a box is written, `box_layout` where its fields are. Its process may go on writing while
it is read: a record is taken only if its number is the same before and after, and texts are looked up in what was read
last, for they only grow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from phalanx import _native
from phalanx.debug.box_layout import FORMATS, HEADER_BYTES, MAGIC, NEWEST, NUMBERS, Format
from phalanx.debug.box_texts import GroupName, Location, Room, Texts
from phalanx.debug.job_folder import Bytes, File, open_file
from phalanx.printable import printable
from phalanx.types import REDUCE_OP_NAMES

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

_T = TypeVar("_T")
_NUMBER = struct.Struct("<Q")
_STATES = {
    _native.STATE_SCHEDULED: "scheduled",
    _native.STATE_STARTED: "started",
    _native.STATE_COMPLETED: "completed",
    _native.STATE_FAILED: "failed",
}
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
_KINDS = {_native.RECORD_CALL: False, _native.RECORD_MAKING: True}
_EXCEPTIONS = (_native.ENDING_EXCEPTION, _native.ENDING_CONSEQUENCE)
_ENDINGS = {_native.BOX_RUNNING: RUNNING, _native.BOX_ENDED_WELL: ENDED_WELL, _native.BOX_FAILED: FAILED}

# Why a group failed.
MISMATCH, TIMEOUT, ABORTED, LEFT, LOST, MISFIT = "mismatch", "timeout", "aborted", "left", "lost", "message"
_FAILURES = {
    _native.FAILURE_NONE: None,
    _native.FAILURE_MISMATCH: MISMATCH,
    _native.FAILURE_TIMEOUT: TIMEOUT,
    _native.FAILURE_ABORTED: ABORTED,
    _native.FAILURE_LEFT: LEFT,
    _native.FAILURE_LOST: LOST,
    _native.FAILURE_MESSAGE: MISFIT,
}


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
    layout = FORMATS[header.version]
    first = HEADER_BYTES + arena_bytes
    expected = first + header.capacity * layout.record.size
    if not data.read_at(expected - 1, 1):
        raise ValueError(f"{name}: expected a black box of {expected} bytes, got one that was cut")
    most = min(room.records_per_box, _MOST_RECORDS if most is None else most)
    # The newest ones first: theirs is the room.
    raw = sorted(_whole_records(data, first, header, most), reverse=True)
    # Texts only grow, so those of all records are in what is read last.
    texts = Texts(data.read_at(HEADER_BYTES, arena_bytes), layout.group, header.world_size, room)
    offset = header.clock_offset_ns
    records = [record for _, each in raw if (record := _record(layout.read_record(each), texts, offset)) is not None]
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
    size = FORMATS[header.version].record.size
    for begin, end in _newest_slots(header, most):
        for slot in range(begin, end, _RECORDS_AT_ONCE):
            num = min(_RECORDS_AT_ONCE, end - slot)
            place = (first + slot * size, num * size)
            before, read, after = data.read_at(*place), data.read_at(*place), data.read_at(*place)
            if min(map(len, (before, read, after))) < place[1]:
                raise ValueError(f"{header.path or 'these bytes'}: expected a black box, got one that is being cut")
            for index in range(num):
                at = index * size
                number = _number(read, at)
                # A record has its place by its number.
                if not number or (number - 1) % header.capacity != slot + index:
                    continue
                if all(_number(each, at) == number for each in (before, after)):
                    yield number, read[at : at + size]


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
    version = NEWEST.header.unpack(data)["version"]
    layout = FORMATS.get(version)
    if layout is None:
        known = " or ".join([", ".join(map(str, list(FORMATS)[:-1])), str(list(FORMATS)[-1])])
        raise ValueError(f"{name}: expected a black box of version {known}, got version {version}")
    found = layout.read_header(data)
    if reason := _damage(found, layout):
        raise ValueError(f"{name}: expected a black box, got one that is damaged: {reason}")
    offset, how = found["clock_offset"], found["how"]
    header = Header(
        path=path,
        version=version,
        pid=found["pid"],
        start=found["start"],
        clock_offset_ns=offset,
        rank=found["rank"],
        world_size=found["world_size"],
        capacity=found["capacity"],
        num_begun=found["next"],
        ending=_ENDINGS.get(found["ending"], FAILED),
        program=_text(found["program"]),
        ended_ns=found["ended"] + offset if found["ended"] else None,
        exception=_text(found["exception"]) if how in _EXCEPTIONS else "",
        is_consequence=how == _native.ENDING_CONSEQUENCE,
        status=found["exit_status"] - 1 if found["exit_status"] > 0 else _native.UNKNOWN_STATUS,
        num_hidden=max(0, found["num_hidden"]),
        deaths=list(_deaths(layout.read_deaths(data), offset)),
        host=_text(found["host"]),
    )
    return header, found["arena_bytes"]


def _damage(found: dict[str, Any], layout: Format) -> str:
    """What no writer writes; empty: nothing."""
    limits = {
        "capacity": (1, _MOST_CAPACITY),
        "arena_bytes": (1, _MOST_ARENA_BYTES),
        "record_bytes": (layout.record.size, layout.record.size),
        "pid": (1, _MOST_PID),
        "rank": (-1, _MOST_PID),
        "world_size": (0, _native.MAX_RANKS),
    }
    for name, (least, most) in limits.items():
        if not least <= found[name] <= most:
            return f"{name} is {found[name]}"
    return ""


def _deaths(found: list[dict[str, Any]], offset: int) -> Iterator[Death]:
    for death in found:
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
    flags, num_sizes = found["flags"], found["shape.num"]
    started, ended = found["started"], found["ended"]
    try:
        is_making = _KINDS[found["kind"]]
        return Record(
            number=found["id"] & NUMBERS,
            state=_STATES[found["state"]],
            group=texts.group(found["group"], is_making=is_making),
            op=MAKING if is_making else _native.OPS[found["op"]].name,
            seq=found["seq"],
            count=found["count"],
            bytes_in=found["bytes_in"],
            bytes_out=found["bytes_out"],
            created_ns=found["created"] + offset,
            started_ns=started + offset if started else None,
            ended_ns=ended + offset if ended else None,
            location=texts.location(found["location"]),
            root=found["root"],
            peer=found["peer"],
            sender=found["sender"],
            last_arriver=found["last_arriver"],
            tag=found["tag"],
            reduce_op=_reduce_op(found["reduce_op"]),
            dtype=_dtype(found["dtype"]),
            is_async=bool(flags & _native.ASYNC),
            in_backward=bool(flags & _native.IN_BACKWARD),
            by_reducer=bool(flags & _native.BY_REDUCER),
            is_list=found["shape.listed"],
            num_sizes=num_sizes,
            sizes=found["shape.sizes"][:num_sizes],
            timeout_ms=found["timeout_ms"],
            unlisted_dtype=found["unlisted_dtype"],
            device=_name(_native.DEVICES, found["device"]),
            engine=_name(_native.ENGINES, found["engine"]),
            failure=_FAILURES[found["failure"]],
            blamed=found["blamed"],
            is_making=is_making,
        )
    except LookupError:
        return None


def _reduce_op(number: int) -> str | None:
    return None if number == _native.NO_REDUCE_OP else _at(REDUCE_OP_NAMES, number)


def _dtype(number: int) -> str | None:
    """None also of a dtype that has no number."""
    return None if number in (_native.NO_DTYPE, _native.OTHER_DTYPE) else _at(_native.DTYPES, number).name


def _name(names: Sequence[str], number: int) -> str | None:
    """None also of one that a later version of the core has added."""
    return names[number] or None if number < len(names) else None


def _at(table: Sequence[_T], number: int) -> _T:
    """No writer writes numbers below 0."""
    if number < 0:
        raise LookupError(number)
    return table[number]
