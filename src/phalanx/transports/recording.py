"""How black boxes know a group."""

from __future__ import annotations

from phalanx import _native
from phalanx.phrases import runs_of
from phalanx.types import GroupInfo

__all__ = ["remember_group"]


def remember_group(box: _native.BlackBox, info: GroupInfo, *, identity: str = "", venue: str = "") -> int:
    """The group in the box, for its records.

    No other group of the job has this identity. A group that is being made has none yet, and a venue where its ranks
    meet.
    """
    # A box has little room.
    ranks = runs_of(info.job_ranks)
    return box.remember_group(info.name, info.rank, ranks, description=info.desc, identity=identity, venue=venue)
