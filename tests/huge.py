"""Tensors of gigabytes, whose memory comes in pages of 2 MiB: small pages take several times as long as the test."""

from __future__ import annotations

import mmap

import torch

__all__ = ["huge_tensor"]


def huge_tensor(num_bytes: int) -> torch.Tensor:
    """Zeros of uint8, one byte each."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
