"""How black boxes know a group."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx import _native
from phalanx.types import GroupInfo

__all__ = ["remember_group"]


def remember_group(box: _native.BlackBox, info: GroupInfo, *, identity: str = "", venue: str = "") -> int:
    """The group in the box, for its records.

    No other group of the job has this identity. A group that is being made has none yet, and a venue where its ranks
    meet.
    """
    return box.remember_group(
        info.name, info.rank, _runs_of(info.job_ranks), description=info.desc, identity=identity, venue=venue
    )


def _runs_of(ranks: Iterable[int]) -> str:
    """Numbers that follow each other are one run, "4-7": a box has little room."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
