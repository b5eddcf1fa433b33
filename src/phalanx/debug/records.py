"""Black boxes, read: the last calls of a process, from a file that outlives it.

`_core/black_box.hpp` says how a box is written. Its process may go on writing while it is read: a record is taken only
if its number is the same before and after, and texts are looked up in what was read last, for they only grow.
"""

from __future__ import annotations

import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx import _native
from phalanx.transports.places import short_path
from phalanx.transports.signatures import dtype_name
from phalanx.types import NO_REDUCE_OP, REDUCE_OP_NAMES

__all__ = [
    "DIED",
    "ENDED_WELL",
    "FAILED",
    "RUNNING",
    "Box",
    "GroupName",
    "Header",
    "Location",
    "Record",
    "ending_of",
    "is_alive",
    "read_box",
    "read_header",
]

Source = str | os.PathLike[str] | bytes | bytearray | memoryview

_MAGIC = b"PHXBOX01"
_VERSION = 1
_HEADER_BYTES = 4096
_HEADER = struct.Struct("<8s4IqQqiiQII256s")
_RECORD = struct.Struct("<QIIQqQQqqqIIiBbBBB3xI8I")
_NUMBER = struct.Struct("<Q")
_STATES = {1: "scheduled", 2: "started", 3: "completed", 4: "failed"}

# How a process ended, or that it has not.
RUNNING = "running"
ENDED_WELL = "ended well"
FAILED = "failed"
DIED = "died without saying so"
_ENDINGS = (RUNNING, ENDED_WELL, FAILED)


@dataclass(frozen=True, slots=True)
class Location:
    """Where in the program a call was made."""

    filename: str
    line: int
    function: str

    def describe(self) -> str:
        return f"{short_path(self.filename)}:{self.line}, in {self.function}"


@dataclass(frozen=True, slots=True)
class GroupName:
    """A group as one of its ranks knows it. `ranks` are those of the job, in the order of the group's own."""

    name: str
    desc: str
    rank: int
    ranks: tuple[int, ...]

    def rank_in_job(self, rank: int) -> int:
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else rank


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

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv")

    @property
    def has_begun(self) -> bool:
        """Not queued any more, and not refused because the group was broken already."""
        return self.started_ns is not None or self.state == "completed"

    @property
    def last_ns(self) -> int:
        """When the call was last heard of."""
        return self.ended_ns or self.started_ns or self.created_ns


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


@dataclass(slots=True)
class Box(Header):
    """A black box."""

    records: list[Record]  # by ascending number

    @property
    def last_ns(self) -> int:
        """When its process was last heard of; 0 where it never was."""
        return max((record.last_ns for record in self.records), default=0)


def read_box(source: Source, most: int | None = None) -> Box:
    """With its newest records only, where `most` says how many. Raises ValueError for what is no box."""
    before, data, after = _read(source), _read(source), _read(source)
    path = "" if isinstance(source, bytes | bytearray | memoryview) else os.fspath(source)
    name = path or "these bytes"
    fields = _check(name, after)
    header = _header(path, fields)
    arena_bytes, record_bytes = fields[3:5]
    first = _HEADER_BYTES + arena_bytes
    expected = first + header.capacity * record_bytes
    if min(map(len, (before, data, after))) < expected:
        raise ValueError(f"{name}: expected a black box of {expected} bytes, got one that was cut to {len(data)}")
    texts = _Texts(after[_HEADER_BYTES:first], header)
    records = []
    # As of the read that records come from: a busy process begins more meanwhile.
    oldest = 0 if most is None else _header(path, _check(name, data)).num_begun - most
    for slot in range(header.capacity):
        offset = first + slot * record_bytes
        (number,) = _NUMBER.unpack_from(data, offset)
        if number <= oldest:
            continue
        fields = _RECORD.unpack_from(data, offset)
        is_whole = number and all(_NUMBER.unpack_from(read, offset) == (number,) for read in (before, after))
        if is_whole and (record := _record(fields, texts)):
            records.append(record)
    records.sort(key=lambda record: record.number)
    return Box(**asdict(header), records=records)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Raises ValueError for what is no box."""
    with open(path, "rb") as file:
        return _header(os.fspath(path), _check(os.fspath(path), file.read(_HEADER_BYTES)))


def ending_of(header: Header) -> str:
    """How the process ended."""
    return DIED if header.ending == RUNNING and not is_alive(header.pid, header.start) else header.ending


def is_alive(pid: int, start: int) -> bool:
    """Of a process of this host, known by its number and its start. True where that can't be seen."""
    own_pid, own_start = _native.own_identity()
    if pid == own_pid:
        return start == own_start
    peer = _native.Peer.watch(pid, start)
    return peer is None or not peer.dead


def _read(source: Source) -> bytes:
    # Read and not mapped: a file that somebody cuts meanwhile must not end this process.
    return bytes(source) if isinstance(source, bytes | bytearray | memoryview) else Path(source).read_bytes()


def _check(name: str, data: bytes) -> tuple[Any, ...]:
    """The fields of a header."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ValueError(f"{name}: expected a black box, got something else")
    fields = _HEADER.unpack_from(data)
    version, capacity, arena_bytes, record_bytes = fields[1:5]
    if version != _VERSION:
        raise ValueError(f"{name}: expected a black box of version {_VERSION}, got version {version}")
    if not capacity or not arena_bytes or record_bytes != _RECORD.size:
        raise ValueError(f"{name}: expected a black box, got one that is damaged")
    return fields


def _header(path: str, fields: tuple[Any, ...]) -> Header:
    _, _, capacity, _, _, pid, start, clock_offset, rank, world_size, begun, _, ending, program = fields
    return Header(
        path=path,
        pid=pid,
        start=start,
        clock_offset_ns=clock_offset,
        rank=rank,
        world_size=world_size,
        capacity=capacity,
        num_begun=begun,
        ending=_ENDINGS[ending] if ending < len(_ENDINGS) else FAILED,
        program=program.partition(b"\0")[0].decode(errors="replace"),
    )


class _Texts:
    """The arena: what records refer to by offsets."""

    def __init__(self, arena: bytes, header: Header) -> None:
        self._arena = arena
        self._groups: dict[int, GroupName] = {}
        self._locations: dict[int, Location | None] = {}
        self._world = tuple(range(header.world_size))
        self.clock_offset = header.clock_offset_ns

    def group(self, offset: int) -> GroupName:
        if offset not in self._groups:
            self._groups[offset] = self._make_group(self._parts(offset, 4))
        return self._groups[offset]

    def location(self, offset: int) -> Location | None:
        if offset not in self._locations:
            parts = self._parts(offset, 3)
            self._locations[offset] = Location(parts[0], _number(parts[1]), parts[2]) if parts else None
        return self._locations[offset]

    def _make_group(self, parts: list[str]) -> GroupName:
        if not parts:
            return GroupName("", "", -1, ())
        ranks = tuple(rank for run in parts[3].split(",") if run for rank in _run(run))
        # A group whose ranks in the job nobody knows is taken for the first one.
        return GroupName(parts[0], parts[1], _number(parts[2]), ranks or self._world)

    def _parts(self, offset: int, num: int) -> list[str]:
        end = self._arena.find(b"\0", offset)
        parts = self._arena[offset:end].decode(errors="replace").split("\x1f") if 0 < offset < end else []
        return parts if len(parts) == num else []


def _run(text: str) -> range:
    """Ranks one after another: "4-7", or "4"."""
    first, _, last = text.partition("-")
    return range(_number(first), _number(last or first) + 1)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return -1


def _record(fields: tuple[Any, ...], texts: _Texts) -> Record | None:
    """None where it says what no writer writes."""
    number, state, group, seq, count, bytes_in, bytes_out, created, started, ended, location, tag, peer = fields[:13]
    op, reduce_op, dtype, flags, num_sizes, timeout_ms, *sizes = fields[13:]
    try:
        return Record(
            number=number,
            state=_STATES[state],
            group=texts.group(group),
            op=_native.OPS[op],
            seq=seq,
            count=count,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            created_ns=created + texts.clock_offset,
            started_ns=started + texts.clock_offset if started else None,
            ended_ns=ended + texts.clock_offset if ended else None,
            location=texts.location(location),
            tag=tag,
            peer=peer,
            reduce_op=REDUCE_OP_NAMES[reduce_op] if reduce_op > NO_REDUCE_OP else None,
            dtype=dtype_name(dtype) if dtype else None,
            is_async=bool(flags & 1),
            in_backward=bool(flags & 2),
            by_reducer=bool(flags & 4),
            is_list=bool(flags & 8),
            num_sizes=num_sizes,
            sizes=tuple(sizes[:num_sizes]),
            timeout_ms=timeout_ms,
        )
    except (LookupError, ValueError):
        return None
