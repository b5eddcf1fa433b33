"""Keeps the garbage collector from what is loaded: a full collection of torch's modules takes 250 ms."""

from __future__ import annotations

import gc
import sys

__all__ = ["can_freeze", "freeze_loaded"]


def can_freeze() -> bool:
    """Triton, which a build of torch for CUDA loads, would print at the end that its objects were never freed."""
    return "triton._C.libtriton" not in sys.modules


def freeze_loaded() -> None:
    if can_freeze():
        gc.freeze()
