"""Phrases that errors and reports share. They need no torch, so the commands that only read files start without it."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["describe_ranks", "describe_sizes", "elements", "short_path"]


def describe_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


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
