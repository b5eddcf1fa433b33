"""Black boxes made by hand, byte by byte, as _core/black_box.hpp lays them out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx import _native
from phalanx.debug.records import MAKING, Box, read_box
from phalanx.types import DTYPE_CODES, REDUCE_OP_NAMES

ARENA_BYTES = 262144
RECORDS_OFFSET = 4096 + ARENA_BYTES
RECORD_BYTES = 128
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
    peer: int = -1
    tag: int = 0
    at: float = 1.0
    took: float = 0.001
    began: bool = True
    line: int = 20
    function: str = "step"
    flags: int = 0
    sizes: tuple[int, ...] = ()
    timeout_ms: int = 30_000
    bytes_in: int | None = None
    bytes_out: int | None = None
    identity: str = ""  # of the group
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
    version: int = 2,
    ended_at: float = 0.0,
    how: int = 0,
    status: int = _native.UNKNOWN_STATUS,
    exception: str = "",
    num_hidden: int = 0,
    deaths: Sequence[tuple[float, int, int, int] | tuple[float, int, int, int, int]] = (),
) -> bytearray:
    """The bytes of a box that these calls were made in, one after another.

    `deaths` are those of other processes: when, pid, start, status, and the rank where it is known.
    """
    arena = bytearray(b"\0")
    offsets: dict[str, int] = {}

    def remember(*parts: object) -> int:
        text = "\x1f".join(map(str, parts))
        if text not in offsets:
            offsets[text] = len(arena)
            arena.extend(text.encode() + b"\0")
        return offsets[text]

    records = bytearray(capacity * RECORD_BYTES)
    for number, call in enumerate(calls, 1):
        own = rank if call.rank is None else call.rank
        ranks = tuple(range(world_size)) if call.ranks is None else call.ranks
        identity = (call.identity,) if call.identity else ()
        group = remember(call.group, call.desc, own, ",".join(map(str, ranks)), *identity)
        place = remember(call.filename, call.line, call.function) if call.line else 0
        created = int(call.at * SECOND)
        started = created if call.state != "scheduled" and call.began else 0
        ended = created + int(call.took * SECOND) if call.state in ("completed", "failed") else 0
        size = max(call.count, 0) * BYTES.get(call.dtype or "", 1)
        offset = (number - 1) % capacity * RECORD_BYTES
        struct.pack_into("<QIIQq", records, offset, number, STATES[call.state], group, call.seq, call.count)
        struct.pack_into(
            "<QQ",
            records,
            offset + 32,
            size if call.bytes_in is None else call.bytes_in,
            size if call.bytes_out is None else call.bytes_out,
        )
        struct.pack_into("<qqq", records, offset + 48, created, started, ended)
        struct.pack_into("<IIi", records, offset + 72, place, call.tag, call.peer)
        struct.pack_into(
            "<BbBBB",
            records,
            offset + 84,
            _native.MAKING if call.op == MAKING else _native.OP_NUMBERS[call.op],
            -1 if call.reduce_op is None else REDUCE_OP_NAMES.index(call.reduce_op),
            0 if call.dtype is None else DTYPES[call.dtype],
            call.flags,
            len(call.sizes),
        )
        struct.pack_into("<BHI", records, offset + 89, FAILURES.index(call.failure), call.blamed + 1, call.timeout_ms)
        kept = call.sizes[:8]
        struct.pack_into(f"<{len(kept)}I", records, offset + 96, *kept)
    header = bytearray(4096)
    struct.pack_into("<8sIIII", header, 0, b"PHXBOX01", version, capacity, ARENA_BYTES, RECORD_BYTES)
    struct.pack_into("<qQqii", header, 24, pid, start, EPOCH, rank, world_size)
    struct.pack_into("<QII", header, 56, len(calls), len(arena), ending)
    struct.pack_into("<256s", header, 72, program.encode())
    struct.pack_into("<qIiqI", header, 328, int(ended_at * SECOND), how, status + 1, num_hidden, len(deaths))
    for number, death in enumerate(deaths):
        at, dead, began, why = death[:4]
        rank_of = (death[4] if len(death) == 5 else -1) + 1
        struct.pack_into("<qqQiHH", header, 360 + 32 * number, int(at * SECOND), dead, began, why, 0, rank_of)
    struct.pack_into("<1024s", header, 872, exception.encode())
    return header + arena.ljust(ARENA_BYTES, b"\0") + records


def box_of(*calls: Call, **header: object) -> Box:
    return read_box(make_box(*calls, **header))  # type: ignore[arg-type]
