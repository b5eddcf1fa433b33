"""Where everything is in the bytes of a black box, by name (_core/black_box.hpp).

Version 1 had neither the second half of the header, nor a group's identity, nor why a call failed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

__all__ = [
    "DEATH",
    "EXCEPTION_BYTES",
    "HEADER",
    "HEADER_BYTES",
    "MAGIC",
    "MORE",
    "MOST_DEATHS",
    "NUMBERS",
    "RECORD",
    "VERSIONS",
    "Layout",
]

MAGIC = b"PHXBOX01"
VERSIONS = (1, 2)
HEADER_BYTES = 4096
MOST_DEATHS = 16
EXCEPTION_BYTES = 1024
# The bits of a record's number. The highest bit is set while the record is marked, also if the process dies meanwhile.
NUMBERS = 2**63 - 1


class Layout:
    """Named fields, one after another, from `offset` on."""

    def __init__(self, offset: int, fields: Sequence[tuple[str, str]]) -> None:
        self.offset = offset
        self._struct = struct.Struct("<" + "".join(code for _, code in fields))
        self.size = self._struct.size
        self.names = [name for name, code in fields if not code.endswith("x")]
        # Where each field is, and its format.
        self.places: dict[str, tuple[int, str]] = {}
        at = offset
        for name, code in fields:
            self.places[name] = (at, code)
            at += struct.calcsize(f"<{code}")

    @property
    def end(self) -> int:
        return self.offset + self.size

    def unpack(self, data: bytes | bytearray, at: int = 0) -> dict[str, Any]:
        return dict(zip(self.names, self._struct.unpack_from(data, at + self.offset), strict=True))


HEADER = Layout(
    0,
    [
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
        ("begun", "Q"),
        ("arena_used", "I"),
        ("ending", "I"),
        ("program", "256s"),
    ],
)
# From version 2 on.
MORE = Layout(
    HEADER.end,
    [
        ("ended", "q"),
        ("how", "I"),
        ("exit_status", "i"),
        ("num_hidden", "q"),
        ("num_deaths", "I"),
        ("padding", "4x"),
    ],
)
# One of MOST_DEATHS that follow, before the exception.
DEATH = Layout(
    MORE.end, [("seen", "q"), ("pid", "q"), ("start", "Q"), ("status", "i"), ("replaced", "H"), ("rank", "H")]
)
RECORD = Layout(
    0,
    [
        ("number", "Q"),
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
        ("num_sizes", "B"),
        ("failure", "B"),
        ("blamed", "H"),
        ("timeout_ms", "I"),
        *((f"size{number}", "I") for number in range(8)),
    ],
)
