"""What the ranks of a group share: the calls and messages in flight, and how they end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from phalanx import _native
from phalanx.log import logger
from phalanx.transports import levels, limits
from phalanx.transports.base import Scheduler
from phalanx.transports.refusals import Refusal
from phalanx.transports.reports import describe_shapes
from phalanx.transports.threads.agreement import Agreement
from phalanx.transports.threads.calls import Calls
from phalanx.transports.threads.in_flight import CallInFlight, InFlight, MessageInFlight
from phalanx.transports.threads.measuring import find_splits
from phalanx.transports.threads.meeting import Meeting
from phalanx.transports.threads.messages import Deliver, Messages
from phalanx.transports.threads.refusals import RefusedCalls
from phalanx.types import GroupInfo

__all__ = ["Hub"]

_FAILED, _WAS_BROKEN, _LEFT = _native.FAILED, _native.WAS_BROKEN, _native.LEFT
# In black boxes, where groups may have the same name and ranks.
_identities = itertools.count(1)


class Hub:
    """All its methods are called with `lock` held."""

    def __init__(
        self, info: GroupInfo, scheduler: Scheduler, deliver: Deliver, owners: dict[int, int] | None = None
    ) -> None:
        """`owners` are the ranks of a group about which they have agreed already, as ranks of the run."""
        limits.check_size(info)
        self.info = info
        self.identity = str(next(_identities))
        self.size = info.size
        self.scheduler = scheduler
        self.lock = threading.RLock()
        self.meeting = Meeting(info, owners)
        with limits.named(info, "the making of the group"):
            self.agreement = Agreement(info.size, max(levels.asked_level(), levels.ON), scheduler)
        self.calls = Calls(info.size)
        self.messages = Messages(deliver)
        self.refused = RefusedCalls(info, self.agreement)
        # Of a timeout: lines that say where the ranks were that did not come.
        self.whereabouts: list[str] = []

    @property
    def failure(self) -> _native.Failure | None:
        """The first failure of the group."""
        return self.agreement.failure

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
            self._end_next_call()
        else:
            self.check_gone()

    def _post(self, call: CallInFlight) -> None:
        had_difference = self.agreement.has_difference
        note = self.agreement.post(call)
        if note is not None:
            logger.warning(describe_shapes(self.info, note))
        if self.agreement.has_difference and not had_difference:
            # The report waits for the other ranks: which call is wrong shows when all have come.
            self.scheduler.at(_native.MISMATCH_GRACE, self._report_after_grace, lambda: call.ended)

    def _report_after_grace(self) -> None:
        with self.lock:
            self.report_difference()

    def report_difference(self) -> None:
        """Breaks the group if the ranks that have come to the next call differ in it."""
        if self.agreement.has_difference:
            self.agreement.report_difference()
            self._end_all()

    def _end_next_call(self) -> None:
        """All have come to it: carries it out, or breaks the group."""
        if self.agreement.has_difference:
            self.report_difference()
            return
        calls, seq = self.calls.next_calls(), self.calls.next
        splits = find_splits(calls)
        if splits is not None:
            self._fail_by_splits(splits)
            return
        try:
            self.calls.carry_out(self.scheduler.now())
        except Exception as error:
            self.abort(_native.NO_RANK, seq, f"{type(error).__name__}: {error}")
            return
        self.agreement.complete(seq, calls)
        self.calls.end_next()
        # Some ranks may have made the call after it.
        for call in self.calls.come():
            self._post(call)

    def _fail_by_splits(self, splits: _native.Splits) -> None:
        sender = next(call for call in self.calls.come() if call.rank == splits.sender)
        self.fail(
            _native.Failure(
                kind=_native.FAILURE_MISMATCH,
                rank=splits.sender,
                peer=splits.receiver,
                seq=sender.seq,
                call=sender.description,
                splits=splits,
            )
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
        if sent.description.fits(receive.description):
            self.messages.deliver(sent, receive)
            return
        self.messages.put_back(sent, receive)
        self.fail(
            _native.Failure(
                kind=_native.FAILURE_MESSAGE,
                rank=receive.rank,
                peer=sent.rank,
                seq=receive.seq,
                call=receive.description,
                where=receive.where,
                misfit=_native.Misfit(sent=sent.description, where=sent.where),
            )
        )

    # Calls that were refused.

    def refuse(self, rank: int, refusal: Refusal) -> None:
        """The rank's arguments were wrong. Ranks that wait for the call are told, unless the rank makes it soon."""
        if self.failure is None and not self.agreement.is_gone(rank):
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

    def fail(self, failure: _native.Failure) -> None:
        """Breaks the group for all: every call and message ends."""
        self.agreement.fail(failure)
        self._end_all()

    def _end_all(self, late: InFlight | None = None) -> None:
        """The group is broken. `late` is the one whose time was up."""
        for one in self.pending():
            one.end(_FAILED if late in (None, one) else _WAS_BROKEN)
        self.calls.clear()
        self.messages.clear()

    def expire(self, late: InFlight, whereabouts: list[str]) -> None:
        """Its time is up. `whereabouts` are lines that say where the ranks are that did not come."""
        if self.failure is None:
            self.whereabouts = whereabouts
        self.agreement.expire(late, self.messages.tags_instead_of(late) if isinstance(late, MessageInFlight) else [])
        self._end_all(late)

    def abort(self, rank: int, seq: int, reason: str) -> None:
        call = _native.Description("barrier")
        self.fail(_native.Failure(kind=_native.FAILURE_ABORTED, rank=rank, call=call, seq=seq, reason=reason))

    # Ranks that make no further call.

    def leave(self, rank: int, leaving: int) -> None:
        """The rank leaves. What it has under way ends, and so does what needs it."""
        if not self.agreement.has_left(rank):
            # What is known of its call goes with it.
            self.report_difference()
            self.agreement.leave(rank, leaving)
            self._end_calls_of(rank)

    def die(self, rank: int, status: int) -> None:
        if not self.agreement.has_left(rank):
            self.report_difference()
            self.agreement.die(rank, status)
            self._end_calls_of(rank)

    def _end_calls_of(self, rank: int) -> None:
        for one in self.pending_of(rank):
            self._remove(one)
            one.end(_LEFT)
        self.check_gone()

    def give_up(self, rank: int) -> None:
        """The rank has been told that the group is broken: it makes no further call."""
        self.agreement.give_up(rank)
        self.check_gone()

    def check_gone(self) -> None:
        """Ends what can't be carried out because a rank is gone."""
        if not self.agreement.is_anybody_gone:
            return
        self.report_difference()
        for one in sorted(self.pending(), key=lambda one: (one.rank, one.seq)):
            gone = [rank for rank in one.missing() if self.agreement.is_gone(rank)]
            if not one.ended and not one.can_end_without(gone):
                self._end_without(gone, one)

    def _end_without(self, gone: Sequence[int], one: InFlight) -> None:
        self.agreement.lose(gone, one)
        self._remove(one)
        one.end(_FAILED)
        if isinstance(one, CallInFlight):
            for behind in self.calls.pending():
                if behind.rank == one.rank:
                    self.calls.remove(behind)
                    behind.end(_WAS_BROKEN)
