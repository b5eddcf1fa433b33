"""Deadlocks, of ranks that are threads and of ranks that are processes: the shortest cycle, and what to do about it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

__all__ = ["HINTS", "Cycle", "shortest_cycle"]

# By the kind of deadlock, which is the end of the error's code.
HINTS = {
    "P2P": "let one side receive first, or use isend and irecv, or batch_isend_irecv",
    "ORDER": "make all ranks issue the calls of these groups in the same order, or asynchronously",
}


class Cycle(NamedTuple):
    """Ranks that wait for each other, in words."""

    kind: str  # of HINTS
    is_sure: bool  # no other thread can end it
    head: str
    lines: list[str]
    hint: str


_Node = TypeVar("_Node", bound=Hashable)


def shortest_cycle(edges: Mapping[_Node, Iterable[_Node]]) -> list[_Node]:
    """The ranks of a shortest cycle of waits, from the first one in `edges` on; none where there is no cycle."""
    cycles = [cycle for start in edges if (cycle := _way_back(start, edges))]
    return min(cycles, key=len, default=[])


def _way_back(start: _Node, edges: Mapping[_Node, Iterable[_Node]]) -> list[_Node]:
    """The shortest way along the edges from a rank to itself."""
    came_from: dict[_Node, _Node] = {}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for peer in edges[rank]:
            if peer == start:
                way = [rank]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if peer not in came_from:
                came_from[peer] = rank
                queue.append(peer)
    return []
