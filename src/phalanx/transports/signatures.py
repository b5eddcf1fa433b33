"""Signatures as the native core keeps them, in words."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from phalanx import _native
from phalanx.types import DTYPE_CODES, NO_REDUCE_OP, NO_ROOT, REDUCE_OP_NAMES, Call

_DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPE_CODES.items()}
_DTYPE_NAMES[0] = "bytes"


def dtype_name(code: int) -> str:
    return _DTYPE_NAMES[code]


def layout_of(call: Call) -> int:
    """How the elements are divided, and, for the dtypes that have no code of their own, which dtype they are."""
    if call.dtype is None or call.dtype in DTYPE_CODES:
        return call.layout
    return zlib.crc32(f"{call.dtype} {call.layout}".encode())


@dataclass(frozen=True, slots=True)
class Signature:
    """The part of a call that must agree across ranks."""

    seq: int
    op: str
    reduce_op: int
    root: int
    dtype: int
    count: int
    layout: int

    @classmethod
    def from_native(cls, fields: tuple[int, int, int, int, int, int, int]) -> Signature:
        seq, op, *rest = fields
        return cls(seq, _native.OPS[op], *rest)

    def describe(self, seq: int) -> str:
        if self.seq != seq:
            return f"has not made call {seq} (its last known one is seq {self.seq}, {self.op})"
        parts = []
        if self.reduce_op != NO_REDUCE_OP:
            parts.append(REDUCE_OP_NAMES[self.reduce_op])
        if self.root != NO_ROOT:
            parts.append(f"root {self.root}")
        if self.op != "barrier":
            parts.append(f"{self.count} elements of" if self.count >= 0 else "elements of")
            parts[-1] += f" {_DTYPE_NAMES[self.dtype]}"
        if self.layout:
            parts.append(f"division {self.layout:08x}")
        return f"{self.op}({', '.join(parts)})"


def compare(one: Signature, other: Signature, seq: int, detail: str) -> tuple[str, str]:
    """The name of the first field that differs, as in the error's code, and how it differs."""
    if detail:
        return "SPLITS", f" about the sizes they exchange: {detail}"
    if one.op != other.op or one.seq != seq or other.seq != seq:
        return "OP", " about the op"
    if one.reduce_op != other.reduce_op:
        return "REDUCE_OP", " about the reduce op"
    if one.root != other.root:
        return "ROOT", " about the root"
    if one.dtype != other.dtype:
        return "DTYPE", " about the dtype"
    if one.count != other.count:
        return "COUNT", " about the number of elements"
    return "SHAPE", " about how the elements are divided between tensors"
