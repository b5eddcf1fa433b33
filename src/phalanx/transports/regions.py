"""Regions of memory in use, ordered so that those which a region meets are found without a look at all of them.

Regions whose extents overlap form a cluster. Clusters share no address and are ordered by it, so bisection finds those
that a region touches. Tensors that interleave, such as the columns of a matrix, are in one cluster: there, regions of
the same period are ordered by their place in the period. Both only leave out regions that can't meet; `regions_meet`
decides about the rest.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, TypeVar

from phalanx.memory import Region, regions_meet

__all__ = ["Entry", "Regions"]

T = TypeVar("T")
_start_of = attrgetter("start")
_numbers = itertools.count()


class Entry(Generic[T]):
    """A region in use, and whose it is."""

    __slots__ = ("item", "kind", "number", "phase", "region")

    def __init__(self, region: Region, item: T) -> None:
        start, _, run, steps = region
        self.region = region
        self.item = item
        self.number = next(_numbers)
        period = math.gcd(*steps)
        # The period, 0 for memory without gaps, and how many bits the lengths of the runs have.
        self.kind = (period, (run - 1).bit_length())
        self.phase = start % period if period else start


class Regions(Generic[T]):
    """Not thread-safe. No region is empty."""

    __slots__ = ("_clusters",)

    def __init__(self) -> None:
        self._clusters: list[_Cluster[T]] = []

    def add(self, region: Region, item: T) -> Entry[T]:
        entry = Entry(region, item)
        first, last = self._touched(region)
        touched = self._clusters[first:last]
        # The others move to the largest one: a region moves at most log n times.
        cluster: _Cluster[T] = max(touched, key=len) if touched else _Cluster(region[0], region[1])
        for other in touched:
            if other is not cluster:
                cluster.take(other)
        cluster.start = min(cluster.start, region[0])
        cluster.end = max(cluster.end, region[1])
        cluster.add(entry)
        self._clusters[first:last] = [cluster]
        return entry

    def remove(self, entry: Entry[T]) -> None:
        place = bisect_right(self._clusters, entry.region[0], key=_start_of) - 1
        cluster = self._clusters[place]
        cluster.remove(entry)
        if not len(cluster):
            del self._clusters[place]

    def find(self, region: Region) -> list[T]:
        """What was added with regions that this one may share a byte with."""
        first, last = self._touched(region)
        return [
            entry.item
            for cluster in self._clusters[first:last]
            for entry in cluster.candidates(region)
            if regions_meet(region, entry.region)
        ]

    def _touched(self, region: Region) -> tuple[int, int]:
        """The clusters whose extents overlap the region's, as a slice."""
        start, end, _, _ = region
        first = bisect_right(self._clusters, start, key=_start_of)
        if first and self._clusters[first - 1].end > start:
            first -= 1
        return first, bisect_left(self._clusters, end, first, key=_start_of)


class _Cluster(Generic[T]):
    __slots__ = ("_by_kind", "_num", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self._num = 0
        # By phase; the number keeps entries from being compared.
        self._by_kind: dict[tuple[int, int], list[tuple[int, int, Entry[T]]]] = {}

    def __len__(self) -> int:
        return self._num

    def add(self, entry: Entry[T]) -> None:
        insort(self._by_kind.setdefault(entry.kind, []), (entry.phase, entry.number, entry))
        self._num += 1

    def remove(self, entry: Entry[T]) -> None:
        entries = self._by_kind[entry.kind]
        del entries[bisect_left(entries, (entry.phase, entry.number))]
        if not entries:
            del self._by_kind[entry.kind]
        self._num -= 1

    def take(self, other: _Cluster[T]) -> None:
        for entries in other._by_kind.values():
            for _, _, entry in entries:
                self.add(entry)
        self.start = min(self.start, other.start)
        self.end = max(self.end, other.end)

    def candidates(self, region: Region) -> Iterator[Entry[T]]:
        start, end, run, steps = region
        for (period, bits), entries in self._by_kind.items():
            longest = 1 << bits
            if period == 0:
                yield from _between(entries, start - longest + 1, end)
            elif math.gcd(period, *steps) != period or run + longest > period:
                # They repeat differently, or fill the period.
                yield from _between(entries, 0, period)
            else:
                first, last = start % period - longest + 1, start % period + run
                yield from _between(entries, first, last)
                # The part that lies in the period before, or in the next one.
                yield from _between(entries, first + period, period)
                yield from _between(entries, 0, last - period)


def _between(entries: list[tuple[int, int, Entry[T]]], first: int, last: int) -> Iterator[Entry[T]]:
    """Those with phases from the first one to before the last one."""
    if first < last:
        for _, _, entry in entries[bisect_left(entries, (first,)) : bisect_left(entries, (last,))]:
            yield entry
