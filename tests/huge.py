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

__all__ = ["PERIOD", "repeating"]

# A prime number of pages, so that no chunk that lands in the wrong place has the same bytes.
PERIOD = 16381 * mmap.PAGESIZE
_FAILED = ctypes.c_void_p(-1).value
_NO_ACCESS, _SHARED, _FIXED = 0, 1, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@contextlib.contextmanager
def repeating(num_bytes: int) -> Iterator[torch.Tensor]:
    """`num_bytes` of uint8: byte i and byte i + PERIOD are the same one. Zeros, until something is written."""
    size = -(-num_bytes // PERIOD) * PERIOD
    memory = os.memfd_create("repeating")
    os.ftruncate(memory, PERIOD)
    base = _libc.mmap(None, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert base != _FAILED
    try:
        for offset in range(0, size, PERIOD):
            place = base + offset
            assert _libc.mmap(place, PERIOD, mmap.PROT_READ | mmap.PROT_WRITE, _SHARED | _FIXED, memory, 0) == place
        yield torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(base), dtype=torch.uint8)
    finally:
        _libc.munmap(base, size)
        os.close(memory)
