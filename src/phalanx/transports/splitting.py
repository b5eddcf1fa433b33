"""How the ranks of a group of processes come to share the segment of a smaller group.

They know and watch each other already, so no store is needed: what `rendezvous` says through a store is said in calls
of the group that is split. All of its ranks take part in every step, also those that are not in the smaller group:

1. The first rank of each new group makes a segment, a memfd, and says where it is. Ranks propose the new groups in the
   same step: if they do not agree, the segments are dropped.
2. Every rank opens the segment of its own new group and says whether it could. If any rank could not, all ranks try
   once more with files in /dev/shm.

A rank that dies meanwhile ends the steps of all, with PeerLost: it is missing in a call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from phalanx import _native
from phalanx.errors import GroupError
from phalanx.transports import limits, segments
from phalanx.transports.base import Exchange
from phalanx.transports.hello import Hello, Offer, Opening
from phalanx.transports.identities import Identity
from phalanx.types import GroupInfo

__all__ = ["split"]

_Maker = Callable[..., contextlib.AbstractContextManager[segments.Made]]


def split(
    whole: GroupInfo,
    info: GroupInfo | None,
    members: Sequence[int],
    hellos: Sequence[Hello],
    identities: Sequence[Identity],
    propose: Exchange,
    exchange: Exchange,
) -> _native.GroupEnd | None:
    """This rank's end of the new group's segment. None without `info`: this rank is not in any.

    `members` are the new group's ranks in the parent, whose info is `whole`. `hellos` and `identities` are what the
    parent knows of these ranks. `exchange` gives every rank of the parent every rank's text; so does `propose`, which
    comes first, and raises where ranks do not agree.
    """
    side = _Side(whole, info, members, hellos, identities)
    found: list[dict[int, str]] = []
    for tell, make in ((propose, segments.made_memfd), (exchange, segments.made_file)):
        try:
            with contextlib.ExitStack() as stack:
                offers = tell(side.offer(stack, make))
                answers = exchange(side.open(offers))
        except BaseException:
            side.close()
            raise
        problems = {rank: answer.problem for rank, answer in enumerate(Opening.read_all(answers)) if answer.problem}
        found.append(problems)
        if not found[-1]:
            return side.group
        side.close()
    raise side.error(found)


class _Side:
    """One rank's side."""

    def __init__(
        self,
        whole: GroupInfo,
        info: GroupInfo | None,
        members: Sequence[int],
        hellos: Sequence[Hello],
        identities: Sequence[Identity],
    ) -> None:
        self._whole = whole
        self._info = info
        self._members = members
        self.hellos = hellos
        self.identities = identities
        self._segment: _native.Segment | None = None
        self.group: _native.GroupEnd | None = None
        self._problem = ""
        # The limit of the system that stopped this rank.
        self._limit: GroupError | None = None

    def offer(self, stack: contextlib.ExitStack, make: _Maker) -> str:
        """What this rank says of the segment that it has made; nothing where it makes none."""
        self._problem, self._limit = "", None
        if self._info is None or self._info.rank != 0:
            return ""
        offer: Offer | None = None
        with self._noting_problems():
            offer, self._segment = stack.enter_context(make(self.hellos, os.urandom(16), own=True))
        offer = offer or Offer(error=self._problem)
        self._problem = offer.error
        return offer.text()

    def open(self, offers: list[str]) -> str:
        """What this rank says of its try to open the segment of its new group, and to watch the others."""
        if self._info is not None and not self._problem:
            with self._noting_problems():
                segment = self._segment or self._opened(offers[self._members[0]])
                self.group = _native.GroupEnd(segment, self._info.rank)
                self.group.watch(self.identities)
        return Opening(self._problem).text()

    def _opened(self, text: str) -> _native.Segment:
        offer = Offer.read(text.encode())
        if offer.error:
            raise OSError(offer.error)
        segments.check_path(offer, self.hellos[0])
        return _native.Segment.open(offer.path, bytes.fromhex(offer.nonce), len(self._members))

    @contextlib.contextmanager
    def _noting_problems(self) -> Iterator[None]:
        try:
            with limits.named(self._whole, "the making of the group"):
                yield
        except GroupError as error:
            self._limit = error
            self._problem = error.message
        except (OSError, MemoryError, RuntimeError) as error:
            self._problem = limits.describe(error)

    def close(self) -> None:
        """The group is not made."""
        if self.group is not None:
            self.group.leave(False)
        self.group = self._segment = None

    def error(self, found: list[dict[int, str]]) -> GroupError:
        """What all ranks of the parent raise: no group was made."""
        if self._limit is not None:
            return self._limit
        lines = ["no group was made, because not all ranks could share its memory"]
        for rank in sorted({rank for problems in found for rank in problems}):
            lines.append(f"  {self._whole.describe(rank)}:")
            lines += [f"    {problems[rank]}" for problems in found if rank in problems]
        return GroupError(
            "\n".join(lines),
            code="GROUP:NOT_SHARED",
            group=self._whole.name,
            rank=self._whole.rank,
            op="split_group",
            hint="fix these problems, then call split_group again on all ranks: the group itself still works",
        )
