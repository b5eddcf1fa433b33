"""What a process has one of and each rank needs for itself, or for its turn: random generators, CPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
from typing import Any

import torch

__all__ = ["Cpus", "Generators", "begin"]


class Generators:
    """The states of torch's, Python's and NumPy's random generators, as they are now."""

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = _numpy.state()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        _numpy.restore(self._numpy)


class _Numpy:
    """NumPy's generator. Asking for its state takes longer than a turn, and few programs use it: one that is as it was
    in the beginning is known by its memory."""

    def __init__(self) -> None:
        self._first: Any = None
        self._first_words: bytes | None = None

    def begin(self) -> None:
        """What it is now counts as unused."""
        self._first_words = None
        random_module = getattr(sys.modules.get("numpy"), "random", None)
        if random_module is None:
            return
        self._first = random_module.get_state(legacy=False)
        # A normal number that is left over would be drawn without a change of the words.
        if not self._first["has_gauss"]:
            self._first_words = self._words()

    def state(self) -> Any:
        words = self._words()
        if words is not None and words == self._first_words:
            return self._first
        random_module = getattr(sys.modules.get("numpy"), "random", None)
        return None if random_module is None else random_module.get_state(legacy=False)

    def restore(self, state: Any) -> None:
        if state is None or (state is self._first and self._words() == self._first_words is not None):
            return
        sys.modules["numpy"].random.set_state(state)

    def _words(self) -> bytes | None:
        mtrand = getattr(getattr(sys.modules.get("numpy"), "random", None), "mtrand", None)
        generator = None if mtrand is None else mtrand._rand._bit_generator
        if generator is None or type(generator).__name__ != "MT19937":
            return None
        # 624 words and a position.
        return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


_numpy = _Numpy()


def begin() -> None:
    """Before a run: generators that are as they are now are unused."""
    _numpy.begin()


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
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {self._cpu})
        torch.set_num_threads(1)

    def restore(self) -> None:
        """In the thread that made this: threads that it starts from now on are as they were before."""
        torch.set_num_threads(self._num_threads)
