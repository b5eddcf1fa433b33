"""What a process has one of and each rank needs for itself, or for its turn: random generators, CPUs."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from typing import Any

import torch

__all__ = ["Cpus", "Generators"]


class Generators:
    """The states of torch's, Python's and NumPy's random generators, as they are now."""

    __slots__ = ("_numpy", "_numpy_key", "_python", "_torch")

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy_key = _numpy_key()
        self._numpy = _numpy_state(self._numpy_key)

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None and self._numpy_key != _numpy_key():
            sys.modules["numpy"].random.set_state(self._numpy)


# The last state of NumPy's generator that was asked for: asking takes longer than a turn, and few programs use it.
_known: tuple[bytes, Any] | None = None


def _numpy_state(key: bytes | None) -> Any:
    global _known
    if key is None:
        return None
    if _known is None or _known[0] != key:
        _known = key, sys.modules["numpy"].random.get_state()
    return _known[1]


def _numpy_key() -> bytes | None:
    """What tells states of NumPy's generator apart, read from its memory; None where NumPy is not loaded."""
    numpy = sys.modules.get("numpy")
    mtrand = getattr(getattr(numpy, "random", None), "mtrand", None)
    if mtrand is None:
        return None
    # 624 words and a position.
    return ctypes.string_at(mtrand._rand._bit_generator.ctypes.state_address, 625 * 4)


class Cpus:
    """Has threads that take turns do so on one CPU: a turn that goes to another one takes five times as long.

    What they compute is then computed there, by one thread each.
    """

    def __init__(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        # Programs that run side by side, as those of pytest-xdist, take different ones.
        self._cpu = cpus[os.getpid() % len(cpus)]
        self._num_threads = torch.get_num_threads()

    def pin(self) -> None:
        """First of all in a rank's thread."""
        os.sched_setaffinity(0, {self._cpu})
        torch.set_num_threads(1)

    def restore(self) -> None:
        """In the thread that made this: threads that it starts from now on are as they were before."""
        torch.set_num_threads(self._num_threads)
