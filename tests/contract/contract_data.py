"""Deterministic tensors of every dtype, in every arrangement in memory, and their comparison bit for bit.

The same (dtype, lane, seed) gives the same values in every process, so that each rank can make all ranks' inputs.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from phalanx.types import REDUCIBLE

__all__ = ["ARRANGEMENTS", "UNCOMMON", "arrange", "difference", "fingerprint", "values"]

# Dtypes that only move. Torch can't even copy the integers of less than a byte.
_types: Any = torch
UNCOMMON: tuple[torch.dtype, ...] = (
    torch.float8_e8m0fnu,
    torch.bits8,
    torch.bits16,
    torch.float4_e2m1fn_x2,
    _types.int4,
    _types.uint1,
)
ARRANGEMENTS = ("flat", "matrix", "transposed", "strided", "shifted")
_PERIOD = 4099  # a prime, so that shifted copies do not line up
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def values(dtype: torch.dtype, count: int, lane: int, seed: int) -> Tensor:
    """A fresh flat tensor."""
    start = seed * 613 % _PERIOD
    repeats = (start + count) // _PERIOD + 1
    return _period(dtype, lane).repeat(repeats, 1)[start : start + count].flatten().view(dtype)


def arrange(flat: Tensor, arrangement: str) -> Tensor:
    """The same values in the same logical order, placed otherwise in memory. One element may become zero-dim.

    "lazy" is for complex numbers, float32 and float64: memory holds their conjugates or negatives.
    """
    count = flat.numel()
    if arrangement == "lazy":
        if flat.is_complex():
            return flat.conj().resolve_conj().conj()
        return torch.complex(flat, -flat).conj().imag
    if arrangement == "flat" or flat.dtype not in REDUCIBLE:
        return flat
    if arrangement == "shifted":
        return torch.cat([flat[:1], flat])[min(1, count) :]
    if arrangement == "strided":
        return torch.stack([flat, flat], dim=1)[:, 0]
    if count == 1:
        return flat.view(())
    rows = next(n for n in (17, 13, 7, 5, 3, 2, 1) if count % n == 0)
    matrix = flat.view(rows, count // rows)
    return matrix if arrangement == "matrix" else matrix.t().contiguous().t()


def difference(got: Tensor, expected: Tensor, *, nan_is_nan: bool) -> str | None:
    """None if both have the same bits, or a NaN where the other has one if that is enough."""
    got, expected = _parts(got), _parts(expected)
    if torch.equal(_bytes(got), _bytes(expected)):
        return None
    different = (_bytes(got) != _bytes(expected)).any(dim=1)
    if nan_is_nan and got.is_floating_point() and different.any():
        different &= ~(got.double().isnan() & expected.double().isnan())
    if not different.any():
        return None
    i = int(different.nonzero()[0])
    return (
        f"{int(different.sum())} of {got.numel()} values, first {i}: expected {_show(expected[i])}, got {_show(got[i])}"
    )


def fingerprint(tensor: Tensor, *, nan_is_nan: bool) -> bytes:
    """Equal for two tensors if `difference` finds none between them."""
    flat = _parts(tensor)
    data, digest = _bytes(flat), hashlib.sha1(usedforsecurity=False)
    if nan_is_nan and flat.is_floating_point():
        nans = (flat if flat.dtype.itemsize > 1 else flat.float()).isnan()
        if nans.any():
            data = flat.contiguous().view(_INTEGERS[flat.dtype.itemsize]).masked_fill(nans, 0)
            digest.update(_buffer(nans))
    digest.update(_buffer(data))
    return digest.digest()


@functools.cache
def _period(dtype: torch.dtype, lane: int) -> Tensor:
    """The bytes of _PERIOD elements, one row each."""
    if dtype in _PARTS:
        parts = _period(_PARTS[dtype], lane)
        return torch.cat([parts, parts.roll(1777, dims=0)], dim=1)
    generator = torch.Generator().manual_seed(1000 + lane)
    anything = torch.randint(0, 256, (_PERIOD, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype is torch.bool:
        return anything >> 7
    if dtype not in REDUCIBLE:
        return anything
    if not dtype.is_floating_point:
        unsigned = str(dtype).startswith("torch.u")
        high = (1 << (8 * dtype.itemsize - (not unsigned))) - 1
        low = 0 if unsigned else -high - 1
        for i, extreme in enumerate((low, high, 0, 1, high - 1, low + 1)):
            anything[i::97] = torch.tensor([extreme], dtype=dtype).view(torch.uint8)
        return anything
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, limits.max, limits.min, limits.tiny]
    chosen = torch.tensor(special).double()[torch.randint(0, len(special), (_PERIOD,), generator=generator)]
    numbers = torch.randn(_PERIOD, generator=generator, dtype=torch.float64) * 4
    which = torch.rand(_PERIOD, generator=generator)
    mixed = torch.where(which < 0.1, chosen, numbers).to(dtype).view(torch.uint8).view(_PERIOD, dtype.itemsize)
    # Some are any bits at all: denormals, and NaNs of every payload.
    return torch.where(which[:, None] > 0.8, anything, mixed)


def _parts(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.view_as_real(flat).flatten() if flat.is_complex() else flat


def _bytes(flat: Tensor) -> Tensor:
    dense = flat.contiguous().as_strided((flat.numel(),), (1,))
    return dense.view(torch.uint8).view(flat.numel(), flat.dtype.itemsize)


def _buffer(dense: Tensor) -> Any:
    return dense.numpy()


def _show(element: Tensor) -> str:
    raw = bytes(_bytes(element.reshape(1)).flatten().tolist()).hex(" ")
    return f"{element.item()} ({raw})" if element.dtype in REDUCIBLE else raw
