"""Tells ranks of calls that they wait for and that a peer refused."""

from __future__ import annotations

from phalanx.transports.refusals import Refusal, awaited_refusals
from phalanx.transports.reports import describe_awaited_refusals, describe_refusals
from phalanx.transports.threads.agreement import Agreement
from phalanx.transports.threads.in_flight import InFlight, MessageInFlight
from phalanx.types import GroupInfo

__all__ = ["RefusedCalls"]


class RefusedCalls:
    """Which rank was told of which call that a peer refused. All methods are called with the group's lock held."""

    def __init__(self, info: GroupInfo, agreement: Agreement) -> None:
        self._info = info
        self._agreement = agreement
        # The ranks that have refused a call so far.
        self._ranks: set[int] = set()
        # Which rank, about which peer, of what.
        self._told: set[tuple[int, int, Refusal]] = set()

    def add(self, rank: int, refusal: Refusal) -> None:
        self._ranks.add(rank)
        self._agreement.refuse(rank, refusal)

    def close(self, made: InFlight) -> bool:
        """Before a call is handed over: closes the note about it. True: some rank has an open note."""
        if made.rank in self._ranks:
            self._agreement.close_note(made)
        return any(self._agreement.refusals(rank) for rank in self._ranks)

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
        missing = [rank for rank in waiting.missing() if rank in self._ranks]
        return awaited_refusals(self._agreement, waiting.rank, waiting.op, waiting.seq, tag, missing)
