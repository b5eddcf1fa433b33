"""The descriptions of calls, put into words."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from phalanx import _native
from phalanx.phrases import describe_sizes, elements
from phalanx.types import DTYPE_CODES, NO_REDUCE_OP, NO_ROOT, REDUCE_OP_NAMES

__all__ = [
    "FIELDS",
    "describe_call",
    "describe_dtype",
    "describe_shape",
    "device_name",
    "dtype_code",
    "dtype_of",
    "dtype_width",
    "place_of",
    "unlisted_dtype",
    "value_of",
]

_CODES: dict[torch.dtype | None, int] = {None: 0} | DTYPE_CODES
_OTHER_DTYPE = _native.OTHER_DTYPE
_NO_DTYPE_NAME = "bytes"
_USUAL_DEVICES = (0, _native.DEVICES.index("cpu"))


def dtype_code(dtype: torch.dtype | None) -> int:
    """The number of the dtype in the native table; None: the call has no tensors."""
    return _CODES.get(dtype, _OTHER_DTYPE)


def unlisted_dtype(dtype: torch.dtype | None) -> int:
    """What tells a dtype that is not in the native table from others; 0 for those that are."""
    return 0 if dtype in _CODES else zlib.crc32(str(dtype).encode())


def _unlisted_names() -> dict[int, str]:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {unlisted_dtype(dtype): str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in _CODES}


_UNLISTED_NAMES = _unlisted_names()


def describe_dtype(description: _native.Description) -> str:
    if description.dtype == _OTHER_DTYPE:
        return _UNLISTED_NAMES.get(description.unlisted_dtype, _NO_DTYPE_NAME)
    return _native.DTYPES[description.dtype].name if description.dtype else _NO_DTYPE_NAME


def dtype_of(description: _native.Description) -> tuple[int, int]:
    """What tells its dtype from all others."""
    return description.dtype, description.unlisted_dtype


def dtype_width(description: _native.Description) -> int:
    """Bytes of an element; 0 where that is not known."""
    return 0 if description.dtype == _OTHER_DTYPE else _native.DTYPES[description.dtype].width


def describe_shape(shape: _native.Shape) -> str:
    return describe_sizes(shape.sizes, shape.num, listed=shape.listed)


def describe_device(description: _native.Description) -> str:
    """On which kind of device the tensors are, where that is worth a word."""
    return "" if description.device in _USUAL_DEVICES else f" on {device_name(description)}"


def device_name(description: _native.Description) -> str:
    number = description.device
    return (_native.DEVICES[number] or "no device") if number < len(_native.DEVICES) else "another device"


def describe_call(description: _native.Description, *, shape: bool = False) -> str:
    parts = []
    if description.reduce_op != NO_REDUCE_OP:
        parts.append(REDUCE_OP_NAMES[description.reduce_op])
    if description.root != NO_ROOT:
        parts.append(f"root {description.root}")
    if description.op != "barrier":
        count = elements(description.count) if description.count >= 0 else "elements"
        parts.append(f"{count} of {describe_dtype(description)}{describe_device(description)}")
    sizes = description.shape
    if sizes.num and (shape or (sizes.listed and description.layout)):
        parts.append(describe_shape(sizes))
    return f"{description.op}({', '.join(parts)})"


def place_of(made: _native.MadeCall) -> str:
    """Where in the program the call was made."""
    if made.description.flags & _native.BY_REDUCER:
        how = " (in the backward pass, by DDP's reducer)"
    else:
        how = " (in the backward pass)" if made.description.flags & _native.IN_BACKWARD else ""
    return f"{made.where or 'a line that is not known'}{how}"


# What may differ: the code of the mismatch, the field, and what ranks disagree about. In the order in which they are
# looked at.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("OP", "op", "the op"),
    ("REDUCE_OP", "reduce_op", "the reduce op"),
    ("ROOT", "root", "the root"),
    ("DEVICE", "device", "the device type"),
    ("DTYPE", "dtype", "the dtype"),
    ("COUNT", "count", "the number of elements"),
    ("SHAPE", "layout", "how the elements are divided between tensors"),
    ("SHAPE", "shape", "the shape of the tensor"),
    ("RESULT", "result", "the result of the call before"),
)


def value_of(made: _native.MadeCall, field: str) -> Any:
    """One of FIELDS, to be compared."""
    if field == "result":
        return made.result
    if field == "dtype":
        return dtype_of(made.description)
    return getattr(made.description, field)
