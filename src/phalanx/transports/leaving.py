"""How long a rank that leaves its groups waits for peers that have not made their side of its calls in flight.

Groups that a rank leaves one after another, as `destroy_process_group` leaves all of them, share one deadline:
otherwise each group with an unmatched call would add to the time that leaving takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Leaving", "leaving"]

# Seconds. Groups that are left further apart have nothing to do with each other.
_MOST_APART = 0.1


class Leaving:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._ended = float("-inf")

    def begin(self, patience: float) -> float:
        """The rank begins to leave a group. Until when it waits."""
        now = self._clock()
        if not patience:
            return now
        if now - self._ended > _MOST_APART:
            self._until = now + patience
        return min(self._until, now + patience)

    def end(self) -> None:
        """The rank has left the group, or waits no longer."""
        self._ended = self._clock()


leaving = Leaving()
