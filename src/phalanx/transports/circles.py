"""Ranks that wait for each other because they make different groups by mistake.

Ranks meet by the members of a group. Where they take different ranks for the members of one group, each waits for
another one that will not come. A single rank that makes another group of the same name proves nothing: disjoint groups
made by their members alone share torch's names, and a rank may come to this group later. A circle of ranks, each of
which waits for the next, does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from phalanx.errors import GroupError
from phalanx.types import GroupInfo

__all__ = ["different_groups", "find_circle"]

# Whoever is in a larger one has to wait for the timeout.
_LONGEST = 8


def find_circle(start: int, waits_for: Callable[[int], Iterable[int]]) -> list[int]:
    """Ranks, the first being `start`, that each wait for the next and the last for the first; empty: there are none."""
    # Breadth first: the shortest circle is the clearest.
    paths, seen = [[start]], {start}
    while paths and len(paths[0]) <= _LONGEST:
        longer = []
        for path in paths:
            for rank in waits_for(path[-1]):
                if rank == start:
                    return path
                if rank not in seen:
                    seen.add(rank)
                    longer.append([*path, rank])
        paths = longer
    return []


def different_groups(info: GroupInfo, circle: Sequence[GroupInfo]) -> GroupError:
    """`circle` is the group as each rank of the circle means it."""
    first = min(range(len(circle)), key=lambda index: _rank_of(circle[index]))
    told = [f"{one.ranks_text()} on rank {_rank_of(one)}" for one in [*circle[first:], *circle[:first]]]
    each = "each waits for the other" if len(told) == 2 else "each waits for the next, and the last for the first"
    return GroupError(
        f"expected the same ranks everywhere, got {', '.join(told[:-1])} and {told[-1]}; {each}",
        code="GROUP:SIZE" if len({one.size for one in circle}) > 1 else "GROUP:RANKS",
        group=info.name,
        rank=info.rank,
        op="new_group",
        hint="make the same groups, with the same ranks, in the same order on every rank that is in them; give each "
        "group a name or a store of its own",
    )


def _rank_of(info: GroupInfo) -> int:
    return info.members[info.rank]
