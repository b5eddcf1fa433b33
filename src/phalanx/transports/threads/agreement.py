"""The native agreement of ranks that are threads.

The engine is that of processes which post their calls (`_core/agreement.hpp`), over memory of this process. It finds
where calls differ, and keeps the first failure of the group with what was known of each rank. The hub has the clock and
knows which ranks are gone, so it says when a report waits no longer for ranks that have not come.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx import _native
from phalanx.transports.base import Scheduler
from phalanx.transports.refusals import Refusal
from phalanx.transports.threads.in_flight import CallInFlight, InFlight
from phalanx.transports.threads.measuring import hash_of_result
from phalanx.types import Call

__all__ = ["Agreement"]


class Agreement:
    """What the ranks of a group have posted. All methods are called with the group's lock held."""

    def __init__(self, size: int, check: int, scheduler: Scheduler) -> None:
        self.check = check
        self._scheduler = scheduler
        tuning = _native.tuning_for(size, 1)
        tuning.only_posts, tuning.check = True, check
        segment = _native.Segment.create_private(size, tuning)
        self._ranks = [_native.LocalAgreement(segment, rank) for rank in range(size)]
        # At the level FULL, by rank: a hash of what the last call gave.
        self._results = [0] * size
        # The rank that has found a difference.
        self._finder: _native.LocalAgreement | None = None
        # The first failure of the group.
        self.failure: _native.Failure | None = None

    # Collectives.

    def post(self, call: CallInFlight) -> _native.ShapeNote | None:
        """Compares the call with those of the ranks that have posted it.

        Returns what there is to be told: calls that agree but for the shape of a tensor.
        """
        mine = self._ranks[call.rank]
        mine.post(call.description, call.where, self._results[call.rank])
        if mine.compare() and self._finder is None:
            self._finder = mine
        return mine.take_note()

    @property
    def has_difference(self) -> bool:
        """Whether ranks that have posted a call differ in it."""
        return self._finder is not None

    def report_difference(self) -> None:
        """Makes it the failure of the group, although some ranks may not have come. The first failure stays."""
        if self._finder is not None:
            self._finder.report_now(self._scheduler.now())
            self.failure = self._finder.failure()

    def complete(self, seq: int, calls: Sequence[Call]) -> None:
        """The call has ended well on all ranks; `calls` are in rank order."""
        for rank, call in enumerate(calls):
            self._ranks[rank].set_completed(seq)
            if self.check == _native.CHECK_FULL:
                self._results[rank] = hash_of_result(call)

    # Failures.

    def fail(self, failure: _native.Failure) -> None:
        """Makes it the failure of the group, with testimonies of all ranks. The first failure stays."""
        finder = self._ranks[max(failure.rank, 0)]
        finder.fail(failure, self._scheduler.now())
        self.failure = finder.failure()

    def testimonies(self) -> list[_native.Testimony]:
        """What was known of each rank when the group failed."""
        return self._ranks[0].testimonies()

    # Notes about calls that a rank refused.

    def refuse(self, rank: int, refusal: Refusal) -> None:
        mine = self._ranks[rank]
        if refusal.is_message:
            mine.refuse_message(refusal.op == "send", refusal.peer, refusal.tag, refusal.pack())
        else:
            mine.refuse_call(refusal.pack())

    def close_note(self, made: InFlight) -> None:
        """Before a call or message is handed over: closes the note of its rank about it."""
        self._ranks[made.rank].close_note(made.description)

    def refusals(self, rank: int) -> list[str]:
        """The open notes of a rank."""
        return self._ranks[rank].refusals(rank)
