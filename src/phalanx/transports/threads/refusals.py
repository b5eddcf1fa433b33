"""Tells ranks of calls that they wait for and that a peer refused."""

from __future__ import annotations

from phalanx.transports.refusals import Refusal, Refusals, awaited_refusals
from phalanx.transports.reports import describe_awaited_refusals, describe_refusals
from phalanx.transports.threads.in_flight import CallInFlight, InFlight, MessageInFlight
from phalanx.types import GroupInfo

__all__ = ["RefusedCalls"]


class RefusedCalls:
    """The notes that ranks leave, and who was told of them. All methods are called with the group's lock held."""

    def __init__(self, info: GroupInfo) -> None:
        self._info = info
        self._notes = Refusals(info.size)
        # Which rank, about which peer, of what.
        self._told: set[tuple[int, int, Refusal]] = set()

    def add(self, rank: int, refusal: Refusal) -> None:
        self._notes.add(rank, refusal)

    def close(self, made: InFlight) -> bool:
        """Before a call is handed over: closes the note about it. True: some rank has an open note."""
        if self._notes.is_empty:
            return False
        if isinstance(made, CallInFlight):
            self._notes.call_made(made.rank)
        elif isinstance(made, MessageInFlight):
            self._notes.message_made(made.rank, made.op, made.peer, made.tag)
        return self._notes.has_open()

    def refusals(self, rank: int) -> list[str]:
        """The open notes of a rank."""
        return self._notes.open_of(rank)

    def last_of(self, rank: int, *, is_message: bool) -> str:
        return self._notes.last_of(rank, is_message=is_message)

    def describe(self, waiting: InFlight) -> list[str]:
        """Lines about calls that it waits for and that were refused."""
        return describe_refusals(self._info, self._awaited(waiting))

    def take_warning(self, waiting: InFlight) -> str:
        """About those of which its rank was not told before; empty: there are none."""
        found = self._awaited(waiting)
        new = {peer: one for peer, one in found.items() if (waiting.rank, peer, one) not in self._told}
        self._told |= {(waiting.rank, peer, one) for peer, one in new.items()}
        return describe_awaited_refusals(self._info, waiting.rank, waiting.op, waiting.seq, new) if new else ""

    def _awaited(self, waiting: InFlight) -> dict[int, Refusal]:
        tag = waiting.tag if isinstance(waiting, MessageInFlight) else 0
        return awaited_refusals(self, waiting.rank, waiting.op, waiting.seq, tag, waiting.missing())
