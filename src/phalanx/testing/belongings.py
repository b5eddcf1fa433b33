"""What a process has one of and each rank needs for itself, or for its turn: random generators, CPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import sys
from typing import Any

import torch

from phalanx.testing.twister import PythonState, words_at

_SEED = 0
# What a rank allocates between two turns, and some more.
_YOUNG_PER_RANK = 100

__all__ = ["Cpus", "Generators", "YoungObjects", "seed_generators"]


class Generators:
    """The states of torch's, Python's and NumPy's random generators, as they are now."""

    __slots__ = ("_numpy", "_python", "_torch", "_torch_words")

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._torch_words = _bytes_of(self._torch)
        self._python = _python.read()
        self._numpy = _numpy.state()

    def are_in_place(self) -> bool:
        """Whether nothing was drawn since. Not always known of NumPy's: False then."""
        return (
            _bytes_of(torch.default_generator.get_state()) == self._torch_words
            and _python.read() == self._python
            and _numpy.state() is self._numpy
        )

    def restore(self) -> None:
        torch.default_generator.set_state(self._torch)
        _python.write(self._python)
        _numpy.restore(self._numpy)


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


class _Numpy:
    """NumPy's generator. Asking for its state takes longer than a turn, and few programs use it: one that is as it was
    seeded is known by its memory."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        self._first: Any = None
        self._first_words: bytes | None = None

    def seed(self) -> None:
        """What it is then counts as unused."""
        random_module = getattr(sys.modules.get("numpy"), "random", None)
        if random_module is not None:
            random_module.seed(_SEED)
            self._first = random_module.get_state(legacy=False)
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
        # NumPy before 1.24 does not tell.
        find = getattr(getattr(sys.modules.get("numpy"), "random", None), "get_bit_generator", None)
        if find is None:
            return None
        generator = find()
        if generator is not self._generator:
            self._generator = generator
            is_twister = type(generator).__name__ == "MT19937"
            self._memory = words_at(generator.ctypes.state_address) if is_twister else None
        return None if self._memory is None else self._memory.raw


_python = PythonState()
_numpy = _Numpy()


@functools.cache
def _seeded(with_numpy: bool) -> Generators:
    """To seed takes a good part of a short run."""
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    _numpy.seed()
    return Generators()


def seed_generators() -> Generators:
    """Seeds all of them, and returns their states: with these every rank begins, whatever was drawn before."""
    generators = _seeded("numpy" in sys.modules)
    generators.restore()
    return generators


class YoungObjects:
    """Has the garbage collector look at new objects less often the more ranks there are: what all of them have under
    way at once would be looked at again and again."""

    def __init__(self, ranks: int) -> None:
        self._before = gc.get_threshold()
        least = _YOUNG_PER_RANK * ranks
        if 0 < self._before[0] < least:
            gc.set_threshold(least, *self._before[1:])

    def restore(self) -> None:
        gc.set_threshold(*self._before)


class Cpus:
    """Has threads that take turns do so on one CPU: a turn that goes to another one takes five times as long.

    Threads that are started within the context stay there, and compute with one thread each.
    """

    def __init__(self) -> None:
        self._before = os.sched_getaffinity(0)
        self._policy = os.sched_getscheduler(0)
        self._num_threads = torch.get_num_threads()

    def __enter__(self) -> None:
        cpus = sorted(self._before)
        with contextlib.suppress(OSError):
            # Programs that run side by side, as those of pytest-xdist, take different ones.
            os.sched_setaffinity(0, {cpus[os.getpid() % len(cpus)]})
            # Whoever is given the turn does not push aside who gives it, and still has the GIL.
            if self._policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._before)
            if self._policy == os.SCHED_OTHER:
                os.sched_setscheduler(0, self._policy, os.sched_param(0))

    def restore_num_threads(self) -> None:
        """When all have ended, in the thread that made this: each of them has set the number for all to come."""
        torch.set_num_threads(self._num_threads)
