"""The state of a Mersenne twister, read and written where it lies in memory.

The public way makes a tuple of 625 integers of Python's generator, and so many more steps that a run of 16 ranks as
threads takes a sixth longer (decision 17). Where the memory does not look as expected, the public way is taken.

Imports nothing but the standard library: tests run it on interpreters that have no torch.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any

__all__ = ["PythonState", "words_at"]

# The words of a twister, and the position among them.
_NUM_WORDS = 624
_BYTES = (_NUM_WORDS + 1) * 4


def words_at(address: int) -> Any:
    """The memory of a twister: `raw` reads and writes all of it."""
    return (ctypes.c_char * _BYTES).from_address(address)


class PythonState:
    """The state of Python's global generator."""

    def __init__(self) -> None:
        # The functions of the module are methods of one object.
        self._generator: Any = getattr(random.random, "__self__", None)
        self._memory: Any = None
        known = random.Random(0)
        words = struct.pack("624I", *known.getstate()[1][:_NUM_WORDS])
        # The position among the words lies before them.
        offset = ctypes.string_at(id(known), sys.getsizeof(known)).find(words) - 4
        if type(self._generator) is random.Random and offset > 0 and _reads_position(known, offset):
            self._memory = words_at(id(self._generator) + offset)

    @property
    def is_quick(self) -> bool:
        """Whether the memory looks as expected."""
        return self._memory is not None

    def read(self) -> Any:
        """Equal to what was read before if nothing was drawn since."""
        if self._memory is None:
            return random.getstate()
        return self._memory.raw, self._generator.gauss_next

    def write(self, state: Any) -> None:
        if self._memory is None:
            random.setstate(state)
        else:
            self._memory.raw, self._generator.gauss_next = state


def _reads_position(known: random.Random, offset: int) -> bool:
    positions = []
    for _ in range(2):
        positions.append(int.from_bytes(ctypes.string_at(id(known) + offset, 4), sys.byteorder))
        known.getrandbits(32)
    return positions == [_NUM_WORDS, 1]
