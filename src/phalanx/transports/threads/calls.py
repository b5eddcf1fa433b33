"""Collectives of ranks that are threads: calls of one seq come together, and their meaning is carried out once."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx import _native
from phalanx.transports.threads.in_flight import CallInFlight
from phalanx.types import Call, carry_out

__all__ = ["Calls"]


class Calls:
    """The calls in flight. All methods are called with the group's lock held.

    The calls of a seq end on all ranks at once. So the group has one call that is next, and calls that ranks have made
    beyond it wait until it has ended, as between processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_seq: dict[int, dict[int, CallInFlight]] = {}
        # The seq of the call that is next.
        self.next = 1

    def add(self, call: CallInFlight) -> None:
        self._by_seq.setdefault(call.seq, {})[call.rank] = call

    def come(self) -> Iterable[CallInFlight]:
        """Those of the next call, in the order in which their ranks came."""
        return self._by_seq.get(self.next, {}).values()

    def have_all_come(self) -> bool:
        """To the next call."""
        return len(self._by_seq.get(self.next, ())) == self._size

    def missing(self, seq: int) -> list[int]:
        """The ranks that have not made the call."""
        made = self._by_seq.get(seq, {})
        return [rank for rank in range(self._size) if rank not in made]

    def carry_out(self, now: float) -> None:
        """The meaning of the next call, to which all have come. Raises what that raises."""
        calls = self._by_seq[self.next]
        last = next(reversed(calls))
        for call in calls.values():
            call.met, call.last_arriver = now, last
        carry_out(self.next_calls())

    def next_calls(self) -> list[Call]:
        """What all ranks pass to the next call, in rank order."""
        calls = sorted(self._by_seq[self.next].items())
        return [made.call for _, made in calls if made.call is not None]

    def end_next(self) -> None:
        """Ends the next call on all ranks."""
        calls = self._by_seq.pop(self.next)
        self.next += 1
        for call in calls.values():
            call.end(_native.FINISHED)

    def pending(self) -> list[CallInFlight]:
        """Those that have not ended."""
        return [call for calls in self._by_seq.values() for call in calls.values() if not call.ended]

    def remove(self, call: CallInFlight) -> None:
        self._by_seq.get(call.seq, {}).pop(call.rank, None)

    def clear(self) -> None:
        self._by_seq.clear()
