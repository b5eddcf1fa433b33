"""What the ranks of a group share: the calls and messages in flight, and how they end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Required, TypedDict, Unpack

from phalanx import _native
from phalanx.log import logger
from phalanx.transports.base import Scheduler
from phalanx.transports.levels import asked_level
from phalanx.transports.refusals import Refusal
from phalanx.transports.reports import describe_shapes
from phalanx.transports.threads.calls import Calls
from phalanx.transports.threads.comparing import Comparing, find_splits
from phalanx.transports.threads.in_flight import CallInFlight, InFlight, MessageInFlight
from phalanx.transports.threads.meeting import Meeting
from phalanx.transports.threads.messages import Deliver, Messages
from phalanx.transports.threads.refusals import RefusedCalls
from phalanx.types import GroupInfo

__all__ = ["Hub"]

_NO_RANK = _native.NO_RANK
_NOT_LEFT = _native.LEAVING_NO
_FAILED, _WAS_BROKEN, _LEFT = _native.FAILED, _native.WAS_BROKEN, _native.LEFT
# In black boxes, where groups may have the same name and ranks.
_identities = itertools.count(1)


class _Facts(TypedDict, total=False):
    """Of a failure, as `_native.Failure` has them."""

    rank: Required[int]
    call: Required[_native.Description]
    seq: Required[int]
    where: str
    peer: int
    misfit: _native.Misfit
    splits: _native.Splits | None
    missing: list[int]
    other_tags: list[int]
    leaving: int
    status: int
    reason: str


class Hub:
    """All its methods are called with `lock` held."""

    def __init__(
        self, info: GroupInfo, scheduler: Scheduler, deliver: Deliver, owners: dict[int, int] | None = None
    ) -> None:
        """`owners` are the ranks of a group about which they have agreed already, as ranks of the run."""
        self.info = info
        self.identity = str(next(_identities))
        self.size = size = info.size
        self.scheduler = scheduler
        self.lock = threading.RLock()
        self.check = max(asked_level(), _native.CHECK_ON)
        self.meeting = Meeting(info, owners)
        self.calls = Calls(size)
        self.messages = Messages(deliver)
        self.refused = RefusedCalls(info)
        self._comparing = Comparing(size, self.check)
        self.failure: _native.Failure | None = None
        self.testimonies: list[_native.Testimony] = []
        # Of a timeout: lines that say where the ranks were that did not come.
        self.whereabouts: list[str] = []
        # By rank: how it left, whether it died, and its last words; whether it was told that the group is broken.
        self.leaving = [_NOT_LEFT] * size
        self.status = [_native.UNKNOWN_STATUS] * size
        self.dead = [False] * size
        self.words = [""] * size
        self.gave_up = [False] * size
        self._anybody_gone = False

    # What is in flight.

    def owners_of(self, ranks: Sequence[int]) -> list[int]:
        """Ranks of the group, as ranks of the run."""
        known = self.meeting.owners | dict(enumerate(self.info.global_ranks))
        return [known.get(rank, rank) for rank in ranks]

    def missing_to_make(self) -> list[int]:
        return self.meeting.missing()

    def missing_from(self, seq: int) -> list[int]:
        return self.calls.missing(seq)

    def pending(self) -> list[InFlight]:
        """Calls and messages that have not ended."""
        return [*self.calls.pending(), *self.messages.pending()]

    def pending_of(self, rank: int) -> list[InFlight]:
        return [one for one in self.pending() if one.rank == rank]

    def _remove(self, one: InFlight) -> None:
        if isinstance(one, CallInFlight):
            self.calls.remove(one)
        elif isinstance(one, MessageInFlight):
            self.messages.remove(one)

    # Collectives.

    def come(self, call: CallInFlight) -> None:
        """Its rank has come to the call."""
        self.calls.add(call)
        if call.seq == self.calls.next:
            self._post(call)
        if self.calls.have_all_come():
            self._carry_out()
        else:
            self.check_gone()

    def _post(self, call: CallInFlight) -> None:
        """Compares the call with those of the ranks that have come."""
        had_found = self._comparing.difference is not None
        self._comparing.post(call)
        if self._comparing.difference is not None and not had_found:
            # The report waits for the other ranks: which call is wrong shows when all have come.
            self.scheduler.at(_native.MISMATCH_GRACE, self._report_after_grace, lambda: call.ended)
        note, self._comparing.note = self._comparing.note, None
        if note is not None:
            logger.warning(describe_shapes(self.info, note))

    def _carry_out(self) -> None:
        """All have come to the next call."""
        calls, seq = self.calls.next_calls(), self.calls.next
        if self._comparing.difference is not None:
            self.report_difference()
            return
        splits = find_splits(calls)
        if splits is not None:
            self._comparing.difference = splits.sender, splits.receiver
            self.report_difference(splits)
            return
        try:
            self.calls.carry_out(self.scheduler.now())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self.abort(_NO_RANK, seq, reason)
            return
        self._comparing.complete(calls)
        self.calls.end_next()
        for call in self.calls.come():
            self._post(call)

    def _report_after_grace(self) -> None:
        with self.lock:
            self.report_difference()

    def report_difference(self, splits: _native.Splits | None = None) -> None:
        """Reports that ranks disagree, if they do, although some have not come."""
        if self._comparing.difference is None or self.failure is not None:
            return
        first, second = self._comparing.difference
        calls = self._comparing.calls()
        self.testimonies = [
            _native.Testimony(
                call=calls.get(rank),
                completed=self._comparing.completed[rank],
                refused=self.refused.last_of(rank, is_message=False),
            )
            for rank in range(self.size)
        ]
        self.fail(
            _native.FAILURE_MISMATCH,
            rank=first,
            peer=second,
            seq=self.calls.next,
            call=calls[first].description,
            splits=splits,
        )

    # Messages.

    def send(self, sent: MessageInFlight) -> None:
        receive = self.messages.find_receive(sent)
        if receive is not None:
            self._match(sent, receive)
            return
        self.messages.add_send(sent)
        self.check_gone()

    def receive(self, receive: MessageInFlight) -> None:
        sent = self.messages.find_send(receive)
        if sent is not None:
            self._match(sent, receive)
            return
        self.messages.add_receive(receive)
        self.check_gone()

    def _match(self, sent: MessageInFlight, receive: MessageInFlight) -> None:
        receive.source = sent.rank
        sent.met = receive.met = self.scheduler.now()
        if sent.description.carries_as(receive.description):
            self.messages.deliver(sent, receive)
            return
        self.messages.put_back(sent, receive)
        self.testimonies = [
            _native.Testimony(completed=completed, refused=self.refused.last_of(rank, is_message=True))
            for rank, completed in enumerate(self._comparing.completed)
        ]
        self.fail(
            _native.FAILURE_MESSAGE,
            rank=receive.rank,
            peer=sent.rank,
            seq=receive.seq,
            call=receive.description,
            where=receive.where,
            misfit=_native.Misfit(sent=sent.description, where=sent.where),
        )

    # Calls that were refused.

    def refuse(self, rank: int, refusal: Refusal) -> None:
        """The rank's arguments were wrong. Ranks that wait for the call are told, unless the rank makes it soon."""
        if self.failure is None and not self._is_gone(rank):
            self.refused.add(rank, refusal)
            for one in self.pending():
                self._watch_refusals(one)

    def note_made(self, made: InFlight) -> None:
        """It is about to be handed over."""
        if self.refused.close(made):
            self._watch_refusals(made)

    def describe_refusals(self, in_flight: InFlight) -> list[str]:
        return self.refused.describe(in_flight)

    def _watch_refusals(self, waiting: InFlight) -> None:
        self.scheduler.at(_native.REFUSAL_GRACE, lambda: self._tell_refusals(waiting), lambda: waiting.ended)

    def _tell_refusals(self, waiting: InFlight) -> None:
        with self.lock:
            warning = self.refused.take_warning(waiting)
        if warning:
            logger.warning("%s", warning)

    # Failures.

    def fail(self, kind: int, *, late: InFlight | None = None, **facts: Unpack[_Facts]) -> None:
        """Breaks the group for all: every call and message ends. `late` is the one whose time was up."""
        self._break_with(kind, **facts)
        for one in self.pending():
            one.end(_FAILED if late in (None, one) else _WAS_BROKEN)
        self.calls.clear()
        self.messages.clear()

    def _break_with(self, kind: int, **facts: Unpack[_Facts]) -> None:
        """The first failure stays."""
        if self.failure is None:
            self.failure = _native.Failure(kind=kind, **facts)

    def expire(self, late: InFlight, whereabouts: list[str]) -> None:
        """Its time is up. `whereabouts` are lines that say where the ranks are that did not come."""
        if self.failure is None:
            self.whereabouts = whereabouts
        self.fail(
            _native.FAILURE_TIMEOUT,
            late=late,
            rank=late.rank,
            call=late.description,
            seq=late.seq,
            where=late.where,
            missing=late.missing(),
            other_tags=self.messages.tags_instead_of(late) if isinstance(late, MessageInFlight) else [],
        )

    def abort(self, rank: int, seq: int, reason: str) -> None:
        call = _native.Description("barrier")
        self.fail(_native.FAILURE_ABORTED, rank=rank, call=call, seq=seq, reason=reason)

    # Ranks that make no further call.

    def leave(self, rank: int, leaving: int, *, dead: bool = False, status: int = _native.UNKNOWN_STATUS) -> None:
        """The rank makes no further call. What it has under way ends, and so does what needs it."""
        if self.leaving[rank] or self.dead[rank]:
            return
        # What is known of its call goes with it.
        self.report_difference()
        self.leaving[rank], self.dead[rank], self.status[rank] = leaving, dead, status
        self._anybody_gone = True
        for one in self.pending_of(rank):
            self._remove(one)
            one.end(_LEFT)
        self.check_gone()

    def give_up(self, rank: int) -> None:
        """The rank has been told that the group is broken: it makes no further call."""
        self.gave_up[rank] = True
        self._anybody_gone = True
        self.check_gone()

    def _is_gone(self, rank: int) -> bool:
        return bool(self.leaving[rank]) or self.dead[rank] or self.gave_up[rank]

    def check_gone(self) -> None:
        """Ends what can't be carried out because a rank is gone, or has been told that the group is broken."""
        if not self._anybody_gone:
            return
        self.report_difference()
        for one in sorted(self.pending(), key=lambda one: (one.rank, one.seq)):
            gone = [rank for rank in one.missing() if self._is_gone(rank)]
            if not one.ended and not one.can_end_without(gone):
                self._end_without(one, gone)

    def _end_without(self, one: InFlight, gone: Sequence[int]) -> None:
        ended = [rank for rank in gone if self.leaving[rank] or self.dead[rank]] or gone
        # Of several the one that has an exception to tell.
        first = next((rank for rank in ended if self.words[rank]), ended[0])
        self._break_with(
            _native.FAILURE_LOST if self.dead[first] else _native.FAILURE_LEFT,
            rank=one.rank,
            peer=first,
            call=one.description,
            seq=one.seq,
            leaving=self.leaving[first],
            status=self.status[first],
            where=one.where,
        )
        self._remove(one)
        one.end(_FAILED)
        if isinstance(one, CallInFlight):
            for behind in self.calls.pending():
                if behind.rank == one.rank:
                    self.calls.remove(behind)
                    behind.end(_WAS_BROKEN)
