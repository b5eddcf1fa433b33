"""Black boxes made by hand: the newest version by its layout, the earlier ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx import _native
from phalanx.debug.box_layout import NEWEST
from phalanx.debug.box_reader import read_box
from phalanx.debug.records import MAKING, Box
from phalanx.types import DTYPE_CODES, REDUCE_OP_NAMES

ARENA_BYTES = 262144
RECORDS_OFFSET = 4096 + ARENA_BYTES
RECORD_BYTES = NEWEST.record.size
# Where a box's own clock begins, in nanoseconds since the epoch.
EPOCH = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
# A process that there is not: no number is that high.
NOBODY = (2**30, 1)

FAILURES = [None, "mismatch", "timeout", "aborted", "left", "lost", "message"]
STATES = {"scheduled": 1, "started": 2, "completed": 3, "failed": 4}
DTYPES = {str(dtype).removeprefix("torch."): code for dtype, code in DTYPE_CODES.items()}
BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPE_CODES}


@dataclass
class Call:
    """A record to be. Times are seconds of the box's own clock; `rank` and `ranks` are the group's."""

    op: str = "all_reduce"
    seq: int = 1
    state: str = "completed"
    group: str = "default_pg"
    desc: str = ""
    rank: int | None = None  # the box's own, unless given
    ranks: tuple[int, ...] | None = None  # those of the world, unless given
    count: int = 4
    dtype: str | None = "float32"
    reduce_op: str | None = "SUM"
    peer: int = -1  # or the root
    sender: int = -1
    last_arriver: int = -1
    tag: int = 0
    at: float = 1.0
    took: float = 0.001
    began: bool = True
    line: int = 20
    function: str = "step"
    flags: int = 0
    listed: bool = False
    sizes: tuple[int, ...] = ()
    timeout_ms: int = 30_000
    bytes_in: int | None = None
    bytes_out: int | None = None
    identity: str = ""  # of the group; of a making, the venue of the meeting
    failure: str | None = None
    blamed: int = -1  # a rank of the group
    filename: str = field(default_factory=lambda: str(Path.cwd() / "train.py"))


def collective(op: str, seq: int = 1, **fields: object) -> Call:
    reduce_op = "SUM" if op in ("all_reduce", "reduce", "reduce_scatter") else None
    return Call(**({"op": op, "seq": seq, "reduce_op": reduce_op} | fields))  # type: ignore[arg-type]


def message(op: str, peer: int, seq: int = 1, **fields: object) -> Call:
    return Call(**({"op": op, "seq": seq, "peer": peer, "reduce_op": None} | fields))  # type: ignore[arg-type]


def making(number: int = 1, **fields: object) -> Call:
    """That of a group, at its meeting of this number."""
    plain = {"reduce_op": None, "dtype": None, "count": 0, "group": "1", "identity": "groups/all", "function": "main"}
    return Call(**(plain | {"op": MAKING, "seq": number} | fields))  # type: ignore[arg-type]


def make_box(
    *calls: Call,
    rank: int = 0,
    world_size: int = 2,
    pid: int = NOBODY[0],
    start: int = NOBODY[1],
    ending: int = 0,
    capacity: int = 16,
    program: str = "train.py",
    version: int = NEWEST.version,
    ended_at: float = 0.0,
    how: int = 0,
    status: int = _native.UNKNOWN_STATUS,
    exception: str = "",
    num_hidden: int = 0,
    deaths: Sequence[tuple[float, int, int, int] | tuple[float, int, int, int, int]] = (),
    host: str = "",
) -> bytearray:
    """The bytes of a box that these calls were made in, one after another.

    `deaths` are those of other processes: when, pid, start, status, and the rank where it is known.
    """
    arena = Arena()
    pack, record_bytes = (_pack_record, RECORD_BYTES) if version == NEWEST.version else (_pack_old_record, 128)
    records = bytearray(capacity * record_bytes)
    for number, call in enumerate(calls, 1):
        own = rank if call.rank is None else call.rank
        ranks = tuple(range(world_size)) if call.ranks is None else call.ranks
        pack(records, (number - 1) % capacity * record_bytes, number, call, arena, own, ",".join(map(str, ranks)))
    header = bytearray(4096)
    struct.pack_into("<8sIIII", header, 0, b"PHXBOX01", version, capacity, ARENA_BYTES, record_bytes)
    struct.pack_into("<qQqii", header, 24, pid, start, EPOCH, rank, world_size)
    struct.pack_into("<QII", header, 56, len(calls), len(arena.data), ending)
    struct.pack_into("<256s", header, 72, program.encode())
    struct.pack_into("<qIiqI", header, 328, int(ended_at * SECOND), how, status + 1, num_hidden, len(deaths))
    for number, death in enumerate(deaths):
        at, dead, began, why = death[:4]
        rank_of = (death[4] if len(death) == 5 else -1) + 1
        struct.pack_into("<qqQiHH", header, 360 + 32 * number, int(at * SECOND), dead, began, why, 0, rank_of)
    struct.pack_into("<1024s", header, 872, exception.encode())
    if host:
        NEWEST.header.pack_into(header, 0, host=host.encode())
    return header + arena.data.ljust(ARENA_BYTES, b"\0") + records


class Arena:
    """The texts and groups of a box."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0")
        self._offsets: dict[object, int] = {}

    def text(self, *parts: object) -> int:
        text = "\x1f".join(map(str, parts))
        return self._append(text, text.encode() + b"\0") if text else 0

    def group(self, name: str, description: str, rank: int, ranks: str, identity: str, venue: str) -> int:
        assert NEWEST.group is not None
        data = bytearray(NEWEST.group.size)
        texts = {"name": name, "description": description, "ranks": ranks, "identity": identity, "venue": venue}
        NEWEST.group.pack_into(data, 0, rank=rank, **{field: self.text(text) for field, text in texts.items()})
        self.data += bytes(-len(self.data) % 4)
        return self._append(bytes(data), bytes(data))

    def _append(self, key: object, data: bytes) -> int:
        if key not in self._offsets:
            self._offsets[key] = len(self.data)
            self.data += data
        return self._offsets[key]


def _times(call: Call) -> tuple[int, int, int]:
    created = int(call.at * SECOND)
    started = created if call.state != "scheduled" and call.began else 0
    ended = created + int(call.took * SECOND) if call.state in ("completed", "failed") else 0
    return created, started, ended


def _bytes(call: Call) -> tuple[int, int]:
    size = max(call.count, 0) * BYTES.get(call.dtype or "", 1)
    return size if call.bytes_in is None else call.bytes_in, size if call.bytes_out is None else call.bytes_out


def _pack_record(records: bytearray, at: int, number: int, call: Call, arena: Arena, rank: int, ranks: str) -> None:
    is_making = call.op == MAKING
    is_message = not is_making and _native.TRAITS[call.op].is_message
    created, started, ended = _times(call)
    bytes_in, bytes_out = _bytes(call)
    identity, venue = ("", call.identity) if is_making else (call.identity, "")
    NEWEST.record.pack_into(
        records,
        at,
        id=number,
        state=STATES[call.state],
        kind=_native.RECORD_MAKING if is_making else _native.RECORD_CALL,
        failure=FAILURES.index(call.failure),
        group=arena.group(call.group, call.desc, rank, ranks, identity, venue),
        seq=call.seq,
        created=created,
        started=started,
        ended=ended,
        sender=call.sender,
        last_arriver=call.last_arriver,
        blamed=call.blamed,
        location=arena.text(call.filename, call.line, call.function) if call.line else 0,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        timeout_ms=call.timeout_ms,
        op=0 if is_making else _native.OP_NUMBERS[call.op],
        reduce_op=-1 if call.reduce_op is None else REDUCE_OP_NAMES.index(call.reduce_op),
        dtype=0 if call.dtype is None else DTYPES[call.dtype],
        root=-1 if is_message else call.peer,
        count=call.count,
        peer=call.peer if is_message else -1,
        tag=call.tag,
        flags=call.flags,
        **{
            "shape.num": len(call.sizes),
            "shape.listed": call.listed,
            "shape.sizes": (*call.sizes, *[0] * 8)[:8],
        },
    )


def _pack_old_record(records: bytearray, at: int, number: int, call: Call, arena: Arena, rank: int, ranks: str) -> None:
    identity = (call.identity,) if call.identity else ()
    group = arena.text(call.group, call.desc, rank, ranks, *identity)
    place = arena.text(call.filename, call.line, call.function) if call.line else 0
    struct.pack_into("<QIIQq", records, at, number, STATES[call.state], group, call.seq, call.count)
    struct.pack_into("<QQ", records, at + 32, *_bytes(call))
    struct.pack_into("<qqq", records, at + 48, *_times(call))
    struct.pack_into("<IIi", records, at + 72, place, call.tag, call.peer)
    struct.pack_into(
        "<BbBBB",
        records,
        at + 84,
        255 if call.op == MAKING else _native.OP_NUMBERS[call.op],
        -1 if call.reduce_op is None else REDUCE_OP_NAMES.index(call.reduce_op),
        0 if call.dtype is None else DTYPES[call.dtype],
        call.flags | (8 if call.listed else 0),
        len(call.sizes),
    )
    struct.pack_into("<BHI", records, at + 89, FAILURES.index(call.failure), call.blamed + 1, call.timeout_ms)
    kept = call.sizes[:8]
    struct.pack_into(f"<{len(kept)}I", records, at + 96, *kept)


def box_of(*calls: Call, **header: object) -> Box:
    return read_box(make_box(*calls, **header))  # type: ignore[arg-type]
