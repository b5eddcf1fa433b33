"""Tensors of gigabytes that take little memory: the same pages are mapped again and again, one after another.

Fresh memory of that size takes longer than the calls that a test makes with it, on some machines a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["PERIOD", "last_of", "repeating"]

# A prime number of pages, so that no chunk that lands in the wrong place has the same bytes.
PERIOD = 16381 * mmap.PAGESIZE
_FAILED = ctypes.c_void_p(-1).value
_NO_ACCESS, _FIXED = 0, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@contextlib.contextmanager
def repeating(num_bytes: int) -> Iterator[Tensor]:
    """Zeros of uint8. Byte i and byte i + PERIOD are the same one, but for the last part, which has its own memory."""
    size = -(-num_bytes // PERIOD) * PERIOD
    with _memory() as shared:
        base = _libc.mmap(None, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base != _FAILED
        try:
            for place in range(base, base + size - PERIOD, PERIOD):
                _map(place, mmap.MAP_SHARED, shared)
            _map(base + size - PERIOD, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            yield torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(base), dtype=torch.uint8)
        finally:
            _libc.munmap(base, size)


def last_of(tensor: Tensor) -> Tensor:
    """The last part."""
    return tensor[(len(tensor) - 1) // PERIOD * PERIOD :]


@contextlib.contextmanager
def _memory() -> Iterator[int]:
    memory = os.memfd_create("repeating")
    try:
        os.ftruncate(memory, PERIOD)
        yield memory
    finally:
        os.close(memory)


def _map(place: int, flags: int, memory: int) -> None:
    assert _libc.mmap(place, PERIOD, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, memory, 0) == place
