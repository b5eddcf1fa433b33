"""Phrases that errors and reports share. They need no torch, so the commands that only read files start without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["describe_ranks", "describe_sizes", "elements", "runs_of", "short_path"]


def describe_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def runs_of(ranks: Sequence[int]) -> str:
    """The same for the same ranks in the same order: `0-3,7`."""
    if ranks and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        # All ranks of a world, mostly. Each of them lists all, so the time for that would grow with their number.
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    ends = [0, *(at for at in range(1, len(ranks)) if ranks[at] != ranks[at - 1] + 1), len(ranks)]
    runs = [ranks[begin:end] for begin, end in pairwise(ends) if begin < end]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def elements(num: int) -> str:
    return "1 element" if num == 1 else f"{num} elements"


def describe_sizes(sizes: Sequence[int], num: int, *, listed: bool) -> str:
    """A shape, or the sizes of a list of tensors. Of `num` sizes only the first may be known."""
    first = ", ".join(map(str, sizes))
    if num > len(sizes):
        first += ", ..."
    if listed:
        return f"sizes {first}"
    return f"shape ({first},)" if num == 1 else f"shape ({first})"


def short_path(path: str) -> str:
    """The path as seen from the working folder, if it lies there."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if relative.startswith(os.pardir) else relative
