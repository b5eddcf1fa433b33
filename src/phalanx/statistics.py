"""What the calls of one rank in one group have taken so far."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OpStatistics"]


@dataclass(frozen=True, slots=True)
class OpStatistics:
    """The calls of one op that have ended, on this rank.

    - `calls` counts every call that was handed over and has ended, also one that failed. A call that was refused
      (`InvalidCall`, a broken or closed group) does not count.
    - `bytes` adds up the calls that finished. The size of a call is that of its tensors on this rank: the larger one of
      what the rank gives and what it gets.
    - `waiting` is how long the calls waited for peers that had not made their side, in seconds, from the beginning of
      each call. A collective begins when the collectives before it have ended, a message when it is made.
    - `moving` is the rest, in seconds, to the end of each call.
    """

    calls: int
    bytes: int
    waiting: float
    moving: float
