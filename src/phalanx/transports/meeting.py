"""What the ranks of a group share where they are threads: calls meet, and their own meaning is carried out once all
have come; messages and receives find each other; what can't end any more fails."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Required, TypedDict, Unpack

import torch

from phalanx import _native
from phalanx.log import logger
from phalanx.transports.base import Scheduler
from phalanx.transports.levels import asked_level
from phalanx.transports.refusals import Refusal, Refusals, awaited_refusals
from phalanx.transports.reports import describe_awaited_refusals, describe_refusals, describe_shapes
from phalanx.transports.tickets import Ticket, result_of, splits_of
from phalanx.types import GroupInfo, carry_out

__all__ = ["CLOSED", "EXITING", "NOT_LEFT", "Meeting"]


# Copies what was sent to where it is received.
Deliver = Callable[[torch.Tensor, torch.Tensor], None]

NOT_LEFT, CLOSED, EXITING = _native.LEAVING_NO, _native.LEAVING_CLOSED, _native.LEAVING_EXITING
_FINISHED, _PENDING = _native.FINISHED, _native.PENDING
_FAILED, _WAS_BROKEN, _LEFT = _native.FAILED, _native.WAS_BROKEN, _native.LEFT
_ANY_SOURCE = _native.ANY_SOURCE
_NOBODY = -1
# As between processes: what fits into an envelope is sent when it is handed over, as long as there are envelopes.
_INLINE_BYTES, _ENVELOPES = _native.INLINE_BYTES, _native.ENVELOPES
# Likewise: seconds that a report of a mismatch waits for ranks that have not made the call yet.
_GRACE = _native.MISMATCH_GRACE
# Likewise: seconds that a rank may take to make a call after all that it has refused.
_REFUSAL_GRACE = _native.REFUSAL_GRACE
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


class Absent(NamedTuple):
    """A rank that did not come to make the group, and how it ended."""

    rank: int
    dead: bool
    status: int
    words: str


class Meeting:
    """What the ranks of a group share. All its methods are called with `lock` held."""

    def __init__(self, info: GroupInfo, scheduler: Scheduler, deliver: Deliver) -> None:
        self.info = info
        # In black boxes, where groups may have the same name and ranks.
        self.identity = str(next(_identities))
        self.size = size = info.size
        self.scheduler = scheduler
        self.lock = threading.RLock()
        self._deliver = deliver
        # Who is which rank of the group, as far as they have come, and those who wait for the others to come.
        self.owners: dict[int, int] = {}
        self.joining: list[Ticket] = []
        # Why it will never be made: a rank that will not come, or ranks that wait for each other because they mean
        # different groups, which are given as each of them means it.
        self.absent: Absent | None = None
        self.circle: Sequence[GroupInfo] = ()
        self.calls: dict[int, dict[int, Ticket]] = {}
        # Messages that nobody has received, by (from, to), and receives that have no message, by receiver.
        self.sent: dict[tuple[int, int], deque[Ticket]] = {}
        self.posted: dict[int, list[Ticket]] = {}
        self.failure: _native.Failure | None = None
        # Of a timeout: lines that say where those were who did not come.
        self.whereabouts: list[str] = []
        self.leaving = [NOT_LEFT] * size
        self.status = [_native.UNKNOWN_STATUS] * size
        self.dead = [False] * size
        self.words = [""] * size
        self.gave_up = [False] * size
        self._anybody_gone = False
        self.check = max(asked_level(), _native.CHECK_ON)
        # Calls about which ranks disagree, until that is reported, and who was found to.
        self._disagreeing: dict[int, tuple[int, int]] = {}
        self._shapes_noted = False
        # By rank: the last call that it completed, and the hash of what that gave, where it is compared.
        self._completed: list[_native.MadeCall | None] = [None] * size
        self._results = [0] * size
        self.testimonies: list[_native.Testimony] = []
        self._refusals = Refusals(size)
        # What was told: to whom, of whom.
        self._refusals_told: set[tuple[int, int, Refusal]] = set()

    @property
    def name(self) -> str:
        """As of now: torch tells a group its name when it is made."""
        return self.info.name

    def join(self, ticket: Ticket) -> None:
        self.joining.append(ticket)
        if self.absent is not None or self.circle:
            self._end_joining(_FAILED)
            return
        self.owners[ticket.rank] = ticket.owner
        if len(self.owners) == self.size:
            self._end_joining(_FINISHED)

    def give_up_joining(self, ticket: Ticket) -> None:
        """Whoever comes now does not find the rank, unless the group was made."""
        if ticket in self.joining:
            self.joining.remove(ticket)
            del self.owners[ticket.rank]

    def disagree(self, circle: Sequence[GroupInfo]) -> None:
        """Ranks that have come here wait for others that mean different groups, and the other way round."""
        self.circle = circle
        self._end_joining(_FAILED)

    def miss(self, owner: int, world_size: int, dead: bool, status: int, words: str) -> None:
        """A rank, of all, has ended: if it has not come, and had to, nobody can join."""
        members = self.info.global_ranks or (range(world_size) if self.size == world_size else ())
        if len(self.owners) < self.size and owner in members and owner not in self.owners.values():
            missing = [rank for rank in range(self.size) if rank not in self.owners]
            rank = list(members).index(owner)
            self.absent = self.absent or Absent(rank if rank in missing else missing[0], dead, status, words)
            self._end_joining(_FAILED)

    def _end_joining(self, result: int) -> None:
        joining, self.joining = self.joining, []
        for ticket in joining:
            self._end(ticket, result)

    # Collectives.

    def come(self, ticket: Ticket) -> None:
        tickets = self.calls.setdefault(ticket.seq, {})
        tickets[ticket.rank] = ticket
        ticket.set_made()
        # Any one that came before.
        first = next(iter(tickets.values()))
        if not ticket.agrees_with(first, self.check) and ticket.seq not in self._disagreeing:
            # The report waits for the others: who is wrong shows when all have come.
            self._disagreeing[ticket.seq] = first.rank, ticket.rank
            self.scheduler.at(_GRACE, lambda: self._disagree(ticket.seq), lambda: ticket.ended)
        elif not ticket.has_shape_of(first) and ticket.seq not in self._disagreeing:
            self._note_shapes(first, ticket)
        if len(tickets) < self.size:
            self.check_gone()
            return
        self._compare_results(tickets)
        if ticket.seq in self._disagreeing:
            self._disagree(ticket.seq)
        else:
            self._carry_out(ticket.seq)

    def _compare_results(self, tickets: dict[int, Ticket]) -> None:
        """Of the call before, which is over on all ranks once all have come to this one."""
        for rank, ticket in tickets.items():
            ticket.set_made(self._results[rank])
            if self._results[rank] != self._results[0]:
                self._disagreeing.setdefault(ticket.seq, (0, rank))

    def _note_shapes(self, *tickets: Ticket) -> None:
        if not self._shapes_noted:
            self._shapes_noted = True
            one, other = sorted(tickets, key=lambda ticket: ticket.rank)
            note = _native.ShapeNote(op=one.op, seq=one.seq, one=_shape_side(one), other=_shape_side(other))
            logger.warning(describe_shapes(self.info, note))

    def report_disagreements(self) -> None:
        """Now, whoever has not come yet."""
        for seq in list(self._disagreeing):
            self._disagree(seq)

    def _disagree(self, seq: int, splits: _native.Splits | None = None) -> None:
        """Calls do not fit together."""
        with self.lock:
            if seq not in self._disagreeing or seq not in self.calls:
                return
            first, second = self._disagreeing.pop(seq)
            tickets = self.calls[seq]
            self.testimonies = [
                _native.Testimony(
                    call=tickets[rank].made_call if rank in tickets else None,
                    completed=self._completed[rank],
                    refused=self._refusals.last_of(rank, is_message=False),
                )
                for rank in range(self.size)
            ]
            call = tickets[first].description
            self.fail(_native.FAILURE_MISMATCH, rank=first, peer=second, seq=seq, call=call, splits=splits)

    def _carry_out(self, seq: int) -> None:
        tickets = self.calls[seq]
        calls = [ticket.call for _, ticket in sorted(tickets.items()) if ticket.call is not None]
        splits = splits_of(calls)
        if splits is not None:
            self._disagreeing[seq] = splits.sender, splits.receiver
            self._disagree(seq, splits)
            return
        now = self.scheduler.now()
        last = next(reversed(tickets))
        for ticket in tickets.values():
            ticket.met, ticket.last_arriver = now, last
        try:
            carry_out(calls)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            call = next(iter(tickets.values())).description
            self.fail(_native.FAILURE_ABORTED, rank=_NOBODY, seq=seq, call=call, reason=reason)
            return
        del self.calls[seq]
        for rank, ticket in tickets.items():
            self._completed[rank] = ticket.made_call
            if self.check == _native.CHECK_FULL and ticket.call is not None:
                self._results[rank] = result_of(ticket.call)
            self._end(ticket, _FINISHED)

    # Messages.

    def send(self, ticket: Ticket) -> None:
        for posted in self.posted.get(ticket.peer, []):
            if posted.tag == ticket.tag and posted.peer in (ticket.rank, _ANY_SOURCE):
                if posted.peer == _ANY_SOURCE and ticket.rank == posted.rank:
                    continue
                self.posted[ticket.peer].remove(posted)
                return self._match(ticket, posted)
        channel = self.sent.setdefault((ticket.rank, ticket.peer), deque())
        tensor = ticket.tensor
        assert tensor is not None
        channel.append(ticket)
        if tensor.nbytes <= _INLINE_BYTES and len(channel) <= _ENVELOPES:
            ticket.tensor = torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
            # The receiver need not have come.
            ticket.met = ticket.made
            self._copy(tensor, ticket.tensor)
            self._end(ticket, _FINISHED)
        else:
            self.check_gone()
        return None

    def receive(self, ticket: Ticket) -> None:
        sources = [ticket.peer] if ticket.peer != _ANY_SOURCE else [r for r in range(self.size) if r != ticket.rank]
        for source in sources:
            channel = self.sent.get((source, ticket.rank), deque())
            for sent in channel:
                if sent.tag == ticket.tag:
                    channel.remove(sent)
                    return self._match(sent, ticket)
        self.posted.setdefault(ticket.rank, []).append(ticket)
        self.check_gone()
        return None

    def _match(self, sent: Ticket, received: Ticket) -> None:
        received.source = sent.rank
        sent.met = received.met = self.scheduler.now()
        assert sent.tensor is not None
        assert received.tensor is not None
        if not sent.fits(received):
            self.posted.setdefault(received.rank, []).append(received)
            if not sent.ended:
                self.sent.setdefault((sent.rank, sent.peer), deque()).append(sent)
            self.testimonies = [
                _native.Testimony(completed=completed, refused=self._refusals.last_of(rank, is_message=True))
                for rank, completed in enumerate(self._completed)
            ]
            self.fail(
                _native.FAILURE_MESSAGE,
                rank=received.rank,
                peer=sent.rank,
                seq=received.seq,
                call=received.description,
                where=received.where,
                misfit=_native.Misfit(sent=sent.description, where=sent.where),
            )
            return
        self._copy(sent.tensor, received.tensor)
        if not sent.ended:
            self._end(sent, _FINISHED)
        self._end(received, _FINISHED)

    def _copy(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        with torch.inference_mode():
            self._deliver(sent, received)

    # Calls that were refused.

    def refuse(self, rank: int, refusal: Refusal) -> None:
        """The rank's arguments were wrong. Those who wait for the call are told, unless the rank makes it soon."""
        if self.failure is None and not self._is_gone(rank):
            self._refusals.add(rank, refusal)
            for ticket in self._pending():
                self._watch_refusals(ticket)

    def note_made(self, ticket: Ticket) -> None:
        """It is about to be handed over."""
        if self._refusals.is_empty:
            return
        if ticket.call is not None:
            self._refusals.call_made(ticket.rank)
        else:
            self._refusals.message_made(ticket.rank, ticket.op, ticket.peer, ticket.tag)
        if self._refusals.has_open():
            self._watch_refusals(ticket)

    def refusals(self, rank: int) -> list[str]:
        return self._refusals.open_of(rank)

    def _awaited_refusals(self, ticket: Ticket) -> dict[int, Refusal]:
        return awaited_refusals(self, ticket.rank, ticket.op, ticket.seq, ticket.tag, self.waited_for(ticket))

    def describe_refusals(self, ticket: Ticket) -> list[str]:
        """Lines about calls that the ticket waits for and that were refused."""
        return describe_refusals(self.info, self._awaited_refusals(ticket))

    def _watch_refusals(self, ticket: Ticket) -> None:
        self.scheduler.at(_REFUSAL_GRACE, lambda: self._tell_refusals(ticket), lambda: ticket.ended)

    def _tell_refusals(self, ticket: Ticket) -> None:
        with self.lock:
            found = self._awaited_refusals(ticket)
            new = {peer: one for peer, one in found.items() if (ticket.rank, peer, one) not in self._refusals_told}
            self._refusals_told |= {(ticket.rank, peer, one) for peer, one in new.items()}
        if new:
            logger.warning("%s", describe_awaited_refusals(self.info, ticket.rank, ticket.op, ticket.seq, new))

    # Failures.

    def fail(self, kind: int, *, late: Ticket | None = None, **facts: Unpack[_Facts]) -> None:
        """Breaks the group for all: every call and message ends. `late` is the one whose time was up."""
        self.break_with(kind, **facts)
        for ticket in self._pending():
            self._end(ticket, _FAILED if late in (None, ticket) else _WAS_BROKEN)
        self.calls.clear()
        self.posted.clear()
        self.sent.clear()

    def break_with(self, kind: int, **facts: Unpack[_Facts]) -> None:
        """The first failure stays."""
        if self.failure is None:
            self.failure = _native.Failure(kind=kind, **facts)

    def expire(self, ticket: Ticket, absent: list[str]) -> None:
        """Its time is up. `absent` are lines that say where those are who did not come."""
        missing = self.waited_for(ticket)
        others = {sent.tag for peer in missing for sent in self.sent.get((peer, ticket.rank), ())}
        if self.failure is None:
            self.whereabouts = absent
        self.fail(
            _native.FAILURE_TIMEOUT,
            late=ticket,
            rank=ticket.rank,
            call=ticket.description,
            seq=ticket.seq,
            where=ticket.where,
            missing=missing,
            other_tags=sorted(others) if ticket.op == "recv" else [],
        )

    def owners_waited_for(self, ticket: Ticket) -> list[int]:
        """The same among all ranks."""
        known = self.owners | dict(enumerate(self.info.global_ranks))
        return [known.get(rank, rank) for rank in self.waited_for(ticket)]

    def waited_for(self, ticket: Ticket) -> list[int]:
        """The ranks without which the ticket can't end."""
        if ticket.op == "new_group":
            return [rank for rank in range(self.size) if rank not in self.owners]
        if ticket.call is not None:
            return [rank for rank in range(self.size) if rank not in self.calls.get(ticket.seq, {})]
        if ticket.peer != _ANY_SOURCE:
            return [ticket.peer]
        return [rank for rank in range(self.size) if rank != ticket.rank]

    def leave(self, rank: int, leaving: int, *, dead: bool = False, status: int = _native.UNKNOWN_STATUS) -> None:
        """The rank makes no further call. What it has under way ends, and so does what needs it."""
        if self.leaving[rank] or self.dead[rank]:
            return
        # What is known of its call goes with it.
        self.report_disagreements()
        self.leaving[rank], self.dead[rank], self.status[rank] = leaving, dead, status
        self._anybody_gone = True
        for ticket in self._pending():
            if ticket.rank == rank:
                self._remove(ticket)
                self._end(ticket, _LEFT)
        self.check_gone()

    def pending_of(self, rank: int) -> list[Ticket]:
        """Calls and messages of the rank that have not ended."""
        return [ticket for ticket in self._pending() if ticket.rank == rank]

    def check_gone(self) -> None:
        """Ends what can't be carried out because a rank is gone, or has been told that the group is broken."""
        if not self._anybody_gone:
            return
        self.report_disagreements()
        for ticket in sorted(self._pending(), key=lambda ticket: (ticket.rank, ticket.seq)):
            gone = [rank for rank in self.waited_for(ticket) if self._is_gone(rank)]
            needed = gone if ticket.peer != _ANY_SOURCE or ticket.call is not None else gone[self.size - 2 :]
            if ticket.ended or not needed:
                continue
            ended = [rank for rank in gone if self.leaving[rank] or self.dead[rank]] or needed
            # Of several the one that has an exception to tell.
            first = next((rank for rank in ended if self.words[rank]), ended[0])
            self.break_with(
                _native.FAILURE_LOST if self.dead[first] else _native.FAILURE_LEFT,
                rank=ticket.rank,
                peer=first,
                call=ticket.description,
                seq=ticket.seq,
                leaving=self.leaving[first],
                status=self.status[first],
                where=ticket.where,
            )
            self._remove(ticket)
            behind = [other for other in self._pending() if other.rank == ticket.rank and ticket.call and other.call]
            self._end(ticket, _FAILED)
            for other in behind:
                self._remove(other)
                self._end(other, _WAS_BROKEN)

    def give_up(self, rank: int) -> None:
        """The rank has been told that the group is broken: it makes no further call."""
        self.gave_up[rank] = True
        self._anybody_gone = True
        self.check_gone()

    def _is_gone(self, rank: int) -> bool:
        return bool(self.leaving[rank]) or self.dead[rank] or self.gave_up[rank]

    def _pending(self) -> list[Ticket]:
        tickets = [ticket for tickets in self.calls.values() for ticket in tickets.values()]
        tickets += [ticket for channel in self.sent.values() for ticket in channel]
        tickets += [ticket for posted in self.posted.values() for ticket in posted]
        return [ticket for ticket in tickets if not ticket.ended]

    def _remove(self, ticket: Ticket) -> None:
        if ticket.call is not None:
            self.calls.get(ticket.seq, {}).pop(ticket.rank, None)
        elif ticket.op == "send":
            self.sent[(ticket.rank, ticket.peer)].remove(ticket)
        else:
            self.posted[ticket.rank].remove(ticket)

    def _end(self, ticket: Ticket, result: int) -> None:
        if ticket.ended:
            return
        if ticket.counts is not None:
            ticket.counts.add(ticket, finished=result == _FINISHED, now=self.scheduler.now())
        ticket.result = result
        ticket.call = None
        if ticket.on_end is not None:
            ticket.on_end(result == _FINISHED)
        self.scheduler.wake(ticket)
        callbacks, ticket.callbacks = ticket.callbacks, None
        for callback in callbacks or ():
            self.scheduler.call_as(ticket.owner, callback)


def _shape_side(ticket: Ticket) -> _native.ShapeSide:
    return _native.ShapeSide(rank=ticket.rank, shape=ticket.description.shape, where=ticket.where)
