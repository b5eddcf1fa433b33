"""Signatures as the native core keeps them, in words."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from phalanx import _native
from phalanx.types import DTYPE_CODES, NO_REDUCE_OP, NO_ROOT, REDUCE_OP_NAMES, Call

__all__ = ["FIELDS", "Signature", "Sizes", "dtype_name", "dtype_width", "elements", "facts_of", "layout_of", "sizes_of"]

# A signature as the native core gives it.
Facts = tuple[Any, ...]

_DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in DTYPE_CODES.items()}
_DTYPE_NAMES[0] = "bytes"
_DTYPE_WIDTHS = {code: dtype.itemsize for dtype, code in DTYPE_CODES.items()}
_MOST_SIZES = 8


def dtype_name(code: int) -> str:
    return _DTYPE_NAMES[code]


def dtype_width(code: int) -> int:
    """Bytes of an element; 0 where the dtype has no code."""
    return _DTYPE_WIDTHS.get(code, 0)


def elements(num: int) -> str:
    return "1 element" if num == 1 else f"{num} elements"


def layout_of(call: Call) -> int:
    """How the elements are divided, and, for the dtypes that have no code of their own, which dtype they are."""
    if call.dtype is None or call.dtype in DTYPE_CODES:
        return call.layout
    return zlib.crc32(f"{call.dtype} {call.layout}".encode())


def sizes_of(call: Call) -> tuple[int, ...] | list[int]:
    """The shape of the one tensor that the count is about; a list of the sizes where elements are divided."""
    sides = [blocks for blocks in (call.inputs, call.outputs) if blocks is not None]
    if call.op in ("scatter", "reduce_scatter"):
        sides.reverse()
    if call.layout or call.count < 0:
        # Of what is divided, rather than of a part.
        sides.sort(key=lambda blocks: blocks.sizes is None and len(blocks.tensors) == 1)
    if not sides:
        return []
    blocks = sides[0]
    if blocks.sizes is not None:
        return blocks.sizes
    if len(blocks.tensors) == 1 and not call.layout:
        return blocks.tensors[0].shape
    return [tensor.numel() for tensor in blocks.tensors]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A shape, or the sizes of a list of tensors; of many only the first are known."""

    listed: bool = False
    num: int = 0
    first: tuple[int, ...] = ()

    def describe(self) -> str:
        first = ", ".join(map(str, self.first))
        if self.num > len(self.first):
            first += ", ..."
        if self.listed:
            return f"sizes {first}"
        return f"shape ({first},)" if self.num == 1 else f"shape ({first})"


@dataclass(frozen=True, slots=True)
class Signature:
    """The part of a call that must agree across ranks, and what else a report says of it."""

    seq: int
    op: str
    reduce_op: int
    root: int
    dtype: int
    count: int
    layout: int
    # Of what the call before gave, where that is compared.
    result: int
    sizes: Sizes
    where: str
    flags: int

    @classmethod
    def from_native(cls, fields: Facts) -> Signature:
        seq, op, reduce_op, root, dtype, count, layout, result, sizes, where, flags = fields
        return cls(
            seq, _native.OPS[op].name, reduce_op, root, dtype, count, layout, result, Sizes(*sizes), where, flags
        )

    def describe(self, *, shape: bool = False) -> str:
        parts = []
        if self.reduce_op != NO_REDUCE_OP:
            parts.append(REDUCE_OP_NAMES[self.reduce_op])
        if self.root != NO_ROOT:
            parts.append(f"root {self.root}")
        if self.op != "barrier":
            parts.append(f"{elements(self.count) if self.count >= 0 else 'elements'} of {dtype_name(self.dtype)}")
        if self.sizes.num and (shape or (self.sizes.listed and self.layout)):
            parts.append(self.sizes.describe())
        return f"{self.op}({', '.join(parts)})"

    def place(self) -> str:
        """Where in the program the call was made."""
        if self.flags & _native.BY_REDUCER:
            how = " (in the backward pass, by DDP's reducer)"
        else:
            how = " (in the backward pass)" if self.flags & _native.IN_BACKWARD else ""
        return f"{self.where or 'a line that is not known'}{how}"


# What may differ: the code of the mismatch, what ranks disagree about, and how a call's own value is put into words.
# In the order in which they are looked at.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("OP", "op", "the op"),
    ("REDUCE_OP", "reduce_op", "the reduce op"),
    ("ROOT", "root", "the root"),
    ("DTYPE", "dtype", "the dtype"),
    ("COUNT", "count", "the number of elements"),
    ("SHAPE", "layout", "how the elements are divided between tensors"),
    ("SHAPE", "sizes", "the shape of the tensor"),
    ("RESULT", "result", "the result of the call before"),
)


def facts_of(call: Call, seq: int, where: str, flags: int) -> Facts:
    """What the native core would say of the call."""
    sizes = sizes_of(call)
    described = (isinstance(sizes, list), len(sizes), tuple(sizes[:_MOST_SIZES]))
    return (
        seq,
        _native.OP_NUMBERS[call.op],
        call.reduce_op,
        call.root,
        0 if call.dtype is None else DTYPE_CODES.get(call.dtype, 0),
        call.count,
        layout_of(call),
        0,
        described,
        where,
        flags,
    )
