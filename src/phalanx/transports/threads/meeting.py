"""How the ranks of a new group come together, or learn that one of them will not come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.transports import failures
from phalanx.transports.circles import different_groups
from phalanx.transports.threads.in_flight import Joining
from phalanx.types import GroupInfo

__all__ = ["Meeting"]


class _Absent(NamedTuple):
    """A rank that will not come, and how it ended."""

    rank: int
    dead: bool
    status: int
    words: str


class Meeting:
    """The ranks that have come to make a group. All methods are called with the group's lock held."""

    def __init__(self, info: GroupInfo, owners: dict[int, int] | None = None) -> None:
        """`owners` are the ranks of a group about which they have agreed already, as ranks of the run."""
        self._info = info
        # Which rank of the run is which rank of the group, as far as they have come.
        self.owners: dict[int, int] = owners or {}
        self._waiting: list[Joining] = []
        # Why the group will never be made: a rank that will not come, or ranks that wait for each other because they
        # mean different groups.
        self._absent: _Absent | None = None
        self._circle: Sequence[GroupInfo] = ()

    def join(self, joining: Joining) -> None:
        """Ends at once where all have come, or where one will not."""
        self._waiting.append(joining)
        if self._absent is not None or self._circle:
            self._end(_native.FAILED)
            return
        self.owners[joining.rank] = joining.owner
        if len(self.owners) == self._info.size:
            self._end(_native.FINISHED)

    def give_up(self, joining: Joining) -> None:
        """Ranks that come later do not find this one, unless the group was made."""
        if joining in self._waiting:
            self._waiting.remove(joining)
            del self.owners[joining.rank]

    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self._info.size) if rank not in self.owners]

    def fail_with_circle(self, circle: Sequence[GroupInfo]) -> None:
        """Ranks that have come wait for others that mean different groups; `circle` has the group as each means it."""
        self._circle = circle
        self._end(_native.FAILED)

    def fail_without(self, owner: int, run_size: int, *, dead: bool, status: int, words: str) -> None:
        """A rank of the run has ended: if the group needs it, and it has not come, nobody can join."""
        if len(self.owners) == self._info.size:
            # All have come. Every rank of a large world ends, so this is the quick way out.
            return
        missing = self.missing()
        members = self._info.global_ranks or (range(run_size) if self._info.size == run_size else ())
        if owner in members and owner not in self.owners.values():
            rank = list(members).index(owner)
            self._absent = self._absent or _Absent(rank if rank in missing else missing[0], dead, status, words)
            self._end(_native.FAILED)

    def explain(self, info: GroupInfo) -> PhalanxError:
        """Why the group can't be made, for one of its ranks."""
        if self._circle:
            return different_groups(info, self._circle)
        assert self._absent is not None
        rank, dead, status, words = self._absent
        return failures.lost_while_joining(info, rank, status, dead=dead, words=words)

    def _end(self, result: int) -> None:
        waiting, self._waiting = self._waiting, []
        for joining in waiting:
            joining.end(result)
