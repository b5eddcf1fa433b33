"""Where everything is in the bytes of a black box, by name.

The layout of the version that this core writes comes from the core (`_core/box_format.hpp`). The tables of earlier
versions are frozen here: they describe files that exist, and nothing writes them any more. What they say is given in
the terms of the newest version; what they do not know is 0.

- Version 1 had neither the second half of the header, nor a group's identity, nor why a call failed.
- Version 2 had one field for the root and the peer, the making of a group in place of an op, a group as one text, and
  neither device, engine, sender, last arriver nor host.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx import _native

__all__ = ["FORMATS", "HEADER_BYTES", "MAGIC", "NEWEST", "NUMBERS", "Format", "Layout"]

Found = dict[str, Any]

MAGIC = _native.BOX_MAGIC
HEADER_BYTES = _native.BOX_HEADER_BYTES
# The bits of a record's id that are its number. The other one is set while the record is marked, also if the process
# dies meanwhile.
NUMBERS = _native.BOX_MARKING - 1


class Layout:
    """Named fields: each with its offset, and its format as the struct module spells it."""

    def __init__(self, fields: Sequence[tuple[str, int, str]]) -> None:
        self.places = {name: (offset, code) for name, offset, code in fields}
        self.names = [name for name, _, code in fields if not code.endswith("x")]
        codes, self.size = "<", 0
        # The values of each field among those of all.
        self._values: list[tuple[str, int, int]] = []
        num_values = 0
        for name, offset, code in fields:
            if offset != self.size:
                raise ValueError(f"expected {name} at {self.size}, got it at {offset}")
            codes += code
            self.size += struct.calcsize(f"<{code}")
            num = len(struct.unpack(f"<{code}", bytes(struct.calcsize(f"<{code}"))))
            if num:
                self._values.append((name, num_values, num))
            num_values += num
        self._struct = struct.Struct(codes)

    def unpack(self, data: bytes | bytearray, at: int = 0) -> Found:
        """The value of each field; a tuple where it is an array."""
        values = self._struct.unpack_from(data, at)
        return {name: values[first] if num == 1 else values[first : first + num] for name, first, num in self._values}

    def pack_into(self, data: bytearray, at: int, /, **values: Any) -> None:
        for name, value in values.items():
            offset, code = self.places[name]
            struct.pack_into(f"<{code}", data, at + offset, *(value if isinstance(value, tuple) else (value,)))


@dataclass(frozen=True)
class Format:
    """A version. `upgrade` gives what a header or a record says in the terms of the newest version."""

    version: int
    header: Layout
    death: Layout | None
    record: Layout
    group: Layout | None  # None: a group is a text
    upgrade_header: Callable[[Found], Found]
    upgrade_record: Callable[[Found], Found]

    def read_header(self, data: bytes) -> Found:
        return self.upgrade_header(self.header.unpack(data))

    def read_record(self, data: bytes) -> Found:
        return self.upgrade_record(self.record.unpack(data))

    def read_deaths(self, data: bytes) -> list[Found]:
        if self.death is None:
            return []
        first, num = self.header.places["deaths"][0], _native.BOX_MOST_DEATHS
        return [self.death.unpack(data, first + number * self.death.size) for number in range(num)]


def _in_order(fields: Iterable[tuple[str, str]]) -> Layout:
    rows, at = [], 0
    for name, code in fields:
        rows.append((name, at, code))
        at += struct.calcsize(f"<{code}")
    return Layout(rows)


_HEADER_1 = [
    ("magic", "8s"),
    ("version", "I"),
    ("capacity", "I"),
    ("arena_bytes", "I"),
    ("record_bytes", "I"),
    ("pid", "q"),
    ("start", "Q"),
    ("clock_offset", "q"),
    ("rank", "i"),
    ("world_size", "i"),
    ("next", "Q"),
    ("arena_used", "I"),
    ("ending", "I"),
    ("program", "256s"),
]
_HEADER_2 = [
    *_HEADER_1,
    ("ended", "q"),
    ("how", "I"),
    ("exit_status", "i"),
    ("num_hidden", "q"),
    ("num_deaths", "I"),
    ("spare", "4x"),
    ("deaths", "512x"),
    ("exception", "1024s"),
]
_DEATH_2 = [("seen", "q"), ("pid", "q"), ("start", "Q"), ("status", "i"), ("replaced", "H"), ("rank", "H")]
_RECORD_2 = [
    ("id", "Q"),
    ("state", "I"),
    ("group", "I"),
    ("seq", "Q"),
    ("count", "q"),
    ("bytes_in", "Q"),
    ("bytes_out", "Q"),
    ("created", "q"),
    ("started", "q"),
    ("ended", "q"),
    ("location", "I"),
    ("tag", "I"),
    ("peer", "i"),
    ("op", "B"),
    ("reduce_op", "b"),
    ("dtype", "B"),
    ("flags", "B"),
    ("shape.num", "B"),
    ("failure", "B"),
    ("blamed", "H"),
    ("timeout_ms", "I"),
    ("shape.sizes", "8I"),
]
# In place of an op: the making of a group. Among the flags: the sizes are those of a list.
_MAKING_2, _LISTED_2 = 255, 8


def _as_it_is(found: Found) -> Found:
    return found


NEWEST = Format(
    _native.BOX_VERSION,
    Layout(_native.BOX_HEADER_FIELDS),
    Layout(_native.BOX_DEATH_FIELDS),
    Layout(_native.BOX_RECORD_FIELDS),
    Layout(_native.BOX_GROUP_FIELDS),
    _as_it_is,
    _as_it_is,
)
# What is not known is 0, but for ranks.
_NO_HEADER = NEWEST.header.unpack(bytes(NEWEST.header.size))
_NO_RECORD = NEWEST.record.unpack(bytes(NEWEST.record.size)) | {
    "sender": _native.NO_RANK,
    "last_arriver": _native.NO_RANK,
}


def _upgrade_header(found: Found) -> Found:
    return _NO_HEADER | found


def _upgrade_record(found: Found) -> Found:
    op, other = found["op"], found["peer"]
    is_making = op == _MAKING_2
    is_message = op < len(_native.OPS) and _native.OPS[op].is_message
    return (
        _NO_RECORD
        | found
        | {
            "kind": _native.RECORD_MAKING if is_making else _native.RECORD_CALL,
            "op": 0 if is_making else op,
            "root": _native.NO_RANK if is_message else other,
            "peer": other if is_message else _native.NO_RANK,
            "blamed": found["blamed"] - 1,
            "flags": found["flags"] & ~_LISTED_2,
            "shape.listed": bool(found["flags"] & _LISTED_2),
        }
    )


_OLD = [
    Format(1, _in_order(_HEADER_1), None, _in_order(_RECORD_2), None, _upgrade_header, _upgrade_record),
    Format(2, _in_order(_HEADER_2), _in_order(_DEATH_2), _in_order(_RECORD_2), None, _upgrade_header, _upgrade_record),
]
FORMATS = {each.version: each for each in [*_OLD, NEWEST]}
