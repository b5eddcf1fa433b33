"""The bytes of black boxes, turned into what they say. Files may be damaged: what no writer writes is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from phalanx import _native
from phalanx.debug.box_layout import FORMATS, HEADER_BYTES, MAGIC, NEWEST, NUMBERS, Format
from phalanx.debug.box_texts import Texts
from phalanx.debug.records import (
    ABORTED,
    ENDED_WELL,
    FAILED,
    LEFT,
    LOST,
    MAKING,
    MISFIT,
    MISMATCH,
    RUNNING,
    TIMEOUT,
    Death,
    Header,
    Record,
)
from phalanx.printable import printable

__all__ = ["Sizes", "parse_header", "parse_record"]

_T = TypeVar("_T")
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
_KINDS = {_native.RECORD_CALL: False, _native.RECORD_MAKING: True}
_EXCEPTIONS = (_native.ENDING_EXCEPTION, _native.ENDING_CONSEQUENCE)
_ENDINGS = {_native.BOX_RUNNING: RUNNING, _native.BOX_ENDED_WELL: ENDED_WELL, _native.BOX_FAILED: FAILED}
_FAILURES = {
    _native.FAILURE_NONE: None,
    _native.FAILURE_MISMATCH: MISMATCH,
    _native.FAILURE_TIMEOUT: TIMEOUT,
    _native.FAILURE_ABORTED: ABORTED,
    _native.FAILURE_LEFT: LEFT,
    _native.FAILURE_LOST: LOST,
    _native.FAILURE_MESSAGE: MISFIT,
}


class Sizes(NamedTuple):
    """Of the arena, in bytes."""

    arena: int
    used: int


def parse_header(path: str, data: bytes) -> tuple[Header, Sizes]:
    """Raises ValueError for what is no box."""
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
    return header, Sizes(found["arena_bytes"], min(found["arena_used"], found["arena_bytes"]))


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


def parse_record(layout: Format, data: bytes, texts: Texts, offset: int) -> Record | None:
    """None where it says what no writer writes. `offset` leads from the box's clock to the epoch."""
    found = layout.read_record(data)
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
            location=texts.call_site(found["location"]),
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
    return None if number == _native.NO_REDUCE_OP else _at(_native.REDUCE_OPS, number)


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
