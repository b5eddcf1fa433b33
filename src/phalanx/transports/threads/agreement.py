"""The native agreement of ranks that are threads.

The engine is that of processes which post their calls (`_core/agreement.hpp`), over memory of this process. It finds
where calls differ, keeps the first failure of the group with what was known of each rank, and knows which ranks have
left. The scheduler has the clock, so the hub says when a report waits no longer for ranks that have not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from phalanx import _native
from phalanx.transports import levels
from phalanx.transports.base import Scheduler
from phalanx.transports.refusals import Refusal
from phalanx.transports.threads.in_flight import CallInFlight, InFlight
from phalanx.transports.threads.measuring import hash_of_result
from phalanx.types import Call

__all__ = ["Agreement"]


class Agreement:
    """What the ranks of a group have posted. All methods are called with the group's lock held."""

    def __init__(self, size: int, level: int, scheduler: Scheduler) -> None:
        self.level = level
        self._scheduler = scheduler
        tuning = _native.tuning_for(size, 1)
        tuning.only_posts, tuning.level = True, level
        segment = _native.Segment.create_private(size, tuning)
        self._ranks = [_native.LocalAgreement(segment, rank) for rank in range(size)]
        # At the level FULL, by rank: a hash of what the last call gave.
        self._results = [0] * size
        # The rank that was the first to post the call that is next.
        self._first: int | None = None
        # The rank that has found a difference.
        self._finder: _native.LocalAgreement | None = None
        # The first failure of the group, and what was known of each rank then, once it is asked for.
        self.failure: _native.Failure | None = None
        self._testimonies: list[_native.Testimony] | None = None
        # Whether some rank makes no further call, and how many have left.
        self.is_anybody_gone = False
        self._num_left = 0

    # Collectives.

    def post(self, call: CallInFlight) -> _native.ShapeNote | None:
        """Compares the call with those of the ranks that have posted it.

        Returns what there is to be told: calls that agree but for the shape of a tensor.
        """
        mine = self._ranks[call.rank]
        mine.post(call.description, call.where, self._results[call.rank])
        if self._first is None:
            self._first = call.rank
        elif mine.compare_with(self._first) and self._finder is None:
            # Up to now all that have posted it agreed with the first.
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
        self._first = None
        for rank, call in enumerate(calls):
            self._ranks[rank].set_completed(seq)
            if self.level == levels.FULL:
                self._results[rank] = hash_of_result(call)

    # Failures.

    def fail(self, failure: _native.Failure) -> None:
        """Makes it the failure of the group, with testimonies of all ranks. The first failure stays."""
        finder = self._ranks[max(failure.rank, 0)]
        finder.fail(failure, self._scheduler.now())
        self.failure = finder.failure()

    def expire(self, late: InFlight, other_tags: list[int]) -> None:
        """Its time is up. `other_tags` are those of messages that came instead of the one that is missing."""
        mine = self._ranks[late.rank]
        mine.expire(late.description, late.seq, late.where, late.missing(), other_tags, self._scheduler.now())
        self.failure = mine.failure()

    def lose(self, gone: Sequence[int], waiting: InFlight) -> None:
        """It can't end because these ranks are gone."""
        left = [peer for peer in gone if self.has_left(peer)] or gone
        # Of several the one that has an exception to tell.
        peer = next((peer for peer in left if self.last_words(peer)), left[0])
        mine = self._ranks[waiting.rank]
        mine.lose(peer, waiting.description, waiting.seq, waiting.where, self._scheduler.now())
        self.failure = mine.failure()

    def testimonies(self) -> list[_native.Testimony]:
        """What was known of each rank when the group failed."""
        if self._testimonies is None:
            self._testimonies = self._ranks[0].testimonies()
        return self._testimonies

    # Ranks that make no further call.

    def leave(self, rank: int, leaving: int) -> None:
        self._ranks[rank].leave(leaving)
        self._count_left()

    def die(self, rank: int, status: int) -> None:
        self._ranks[rank].die(status)
        self._count_left()

    def _count_left(self) -> None:
        """With the last rank the native memory goes. Programs may keep the groups that they have left."""
        self.is_anybody_gone = True
        self._num_left += 1
        if self._num_left == len(self._ranks):
            words = [self.last_words(rank) for rank in range(len(self._ranks))]
            testimonies = [] if self.failure is None else self.testimonies()
            self._finder = None
            self._ranks = [cast(_native.LocalAgreement, _AllLeft(words, testimonies))] * len(words)

    def give_up(self, rank: int) -> None:
        """The rank was told that the group is broken."""
        self._ranks[rank].give_up()
        self.is_anybody_gone = True

    def has_left(self, rank: int) -> bool:
        """Whether it left or died."""
        return self._ranks[0].has_left(rank)

    def is_gone(self, rank: int) -> bool:
        return self._ranks[0].is_gone(rank)

    def say_last_words(self, rank: int, text: str) -> None:
        """The first words stay."""
        self._ranks[rank].say_last_words(text)

    def last_words(self, rank: int) -> str:
        return self._ranks[0].last_words(rank)

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


class _AllLeft:
    """What a group still answers that all ranks have left, in place of the native agreement of any of them."""

    def __init__(self, words: list[str], testimonies: list[_native.Testimony]) -> None:
        self._words = words
        self._testimonies = testimonies

    def has_left(self, rank: int) -> bool:
        return True

    def is_gone(self, rank: int) -> bool:
        return True

    def give_up(self) -> None:
        """No rank waits for another one any more."""

    def say_last_words(self, text: str) -> None:
        """No rank would hear them."""

    def last_words(self, rank: int) -> str:
        return self._words[rank]

    def refusals(self, rank: int) -> list[str]:
        return []

    def testimonies(self) -> list[_native.Testimony]:
        return self._testimonies
