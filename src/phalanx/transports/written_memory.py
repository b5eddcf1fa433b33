"""Memory that the core writes for the collectives of a group in flight."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from phalanx.memory import Region, regions_meet
from phalanx.transports.regions import Entry, Regions

__all__ = ["CallInFlight", "WrittenMemory"]

# Addresses from and to.
Ranges = Sequence[tuple[int, int]]
# With more records than this, `add` looks for calls that have ended.
_MANY = 32


class CallInFlight(Protocol):
    """A native call. Asking it has no effect on it."""

    @property
    def is_over(self) -> bool: ...
    @property
    def result(self) -> int: ...
    def wait(self, timeout: float) -> int: ...


_Reference = weakref.ref[CallInFlight]


class WrittenMemory:
    """Which calls write which memory. It does not keep the calls alive: a call that is gone has ended.

    Thread-safe without a lock. `add` only appends a record. Records are ordered by address when a thread looks for the
    writers of a region. That thread takes `_regions` out of its list meanwhile, and only that thread removes records.
    A thread or a signal handler that finds the list empty looks at all records instead.
    """

    __slots__ = ("_new", "_ordered", "_regions")

    def __init__(self) -> None:
        self._new: deque[tuple[_Reference, Ranges]] = deque()
        self._ordered: deque[tuple[_Reference, Ranges, list[Entry[_Reference]]]] = deque()
        self._regions: list[Regions[_Reference]] = [Regions()]

    def __bool__(self) -> bool:
        return bool(self._new or self._ordered)

    def add(self, call: CallInFlight, written: Ranges) -> None:
        """A call that has begun. The core writes the memory between these addresses."""
        new = self._new
        new.append((weakref.ref(call), written))
        if len(new) > _MANY and _is_over(new[0][0]):
            self._remove_ended()

    def writers(self, region: Region) -> list[CallInFlight]:
        """The calls that write to this memory."""
        try:
            regions = self._regions.pop()
        except IndexError:
            return self._writers_among_all(region)
        try:
            self._order_new(regions)
            found = regions.find(region)
        except BaseException:
            # Interrupted, maybe while the regions changed: the next look orders all records again.
            self._new.extendleft([record[:2] for record in reversed(list(self._ordered))])
            self._ordered.clear()
            regions = Regions()
            raise
        finally:
            self._regions.append(regions)
        return _alive(found)

    def forget_all(self) -> None:
        self._new.clear()
        self._ordered.clear()
        self._regions = [Regions()]

    def _order_new(self, regions: Regions[_Reference]) -> None:
        ordered, new = self._ordered, self._new
        while ordered and _is_over(ordered[0][0]):
            for entry in ordered[0][2]:
                regions.remove(entry)
            ordered.popleft()
        while new:
            reference, written = new[0]
            if not _is_over(reference):
                entries = [regions.add(_region(start, end), reference) for start, end in written if start < end]
                # First here, and then away from there: other threads find it in one of them.
                ordered.append((reference, written, entries))
            new.popleft()

    def _writers_among_all(self, region: Region) -> list[CallInFlight]:
        # In this order: a record may go from the new ones to the ordered ones meanwhile.
        records = [*list(self._new), *(record[:2] for record in list(self._ordered))]
        return _alive(
            [
                reference
                for reference, written in records
                if any(start < end and regions_meet(region, _region(start, end)) for start, end in written)
            ]
        )

    def _remove_ended(self) -> None:
        try:
            regions = self._regions.pop()
        except IndexError:
            return
        try:
            while self._new and _is_over(self._new[0][0]):
                self._new.popleft()
        finally:
            self._regions.append(regions)


def _region(start: int, end: int) -> Region:
    return start, end, end - start, []


def _alive(references: Sequence[_Reference]) -> list[CallInFlight]:
    return [call for reference in references if (call := reference()) is not None]


def _is_over(reference: _Reference) -> bool:
    call = reference()
    return call is None or call.is_over
