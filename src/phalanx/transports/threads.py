"""Ranks that are threads of one process.

Each rank has a `ThreadsTransport`, its place in a meeting (meeting.py). Who runs when, what time it is and whom to wake
is the scheduler's business (base.py). Failures are told in the words of the other transports: this one keeps what
`failures` asks for.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.futures import Future

from phalanx import _native
from phalanx.errors import CallTimeout, GroupError, PhalanxError
from phalanx.memory import meet
from phalanx.statistics import OpStatistics
from phalanx.transports import failures
from phalanx.transports.base import BaseTransport, Exchange, Pending
from phalanx.transports.circles import different_groups
from phalanx.transports.counting import Counts, size_of
from phalanx.transports.futures import SharedTurnFuture
from phalanx.transports.meeting import CLOSED, EXITING, NOT_LEFT, Meeting
from phalanx.transports.recording import Recorder
from phalanx.transports.refusals import Refusal
from phalanx.transports.tickets import Ticket
from phalanx.types import Call, GroupInfo, Store

__all__ = ["WAIT_FOR_THREADS", "Origin", "ThreadsTransport", "place"]

# What to do about a call that comes after the end of its rank's function.
WAIT_FOR_THREADS = "let the rank wait for the threads that it has started, for example with join()"

_FINISHED, _PENDING = _native.FINISHED, _native.PENDING
# Whose whereabouts an error tells.
_MOST_RANKS = 8


class _Place(threading.local):
    """Where the groups of this thread's rank meet; None: the thread is no rank."""

    world: World | None = None


class World(Protocol):
    """The ranks that are threads of this process, as a group sees it."""

    def join(self, store: Store, info: GroupInfo, timeout: float, scope: str) -> ThreadsTransport:
        """Meets the other ranks of a group. Groups of one scope meet by their members, others by their name as well."""

    def join_split(self, key: str, info: GroupInfo, owners: dict[int, int]) -> ThreadsTransport:
        """Takes this rank's place in a group about which its ranks have agreed already; `key` is theirs alone.

        `owners` are the group's ranks as ranks of all.
        """

    def environment(self) -> tuple[Store, int, int]:
        """What processes have in their environment: a store, the rank and the number of ranks."""

    def has_ended(self, rank: int) -> bool:
        """Whether a rank, of all, was killed or has returned."""

    def whereabouts(self, rank: int) -> tuple[str, list[str]]:
        """What a rank, of all, does now, and its stack, innermost last."""

    def last_calls(self, rank: int) -> list[str]:
        """A line for each."""

    def own_box(self) -> _native.BlackBox | None:
        """That of the rank whose thread this is."""


place = _Place()


class _Forks:
    """How many forks lie between this process and the first one. A forked child has none of its parent's ranks."""

    num = 0


def _count_fork() -> None:
    _Forks.num += 1
    # The thread that called fork() is no rank here: groups that it makes are of processes.
    place.world = None


os.register_at_fork(after_in_child=_count_fork)


class Origin:
    """The process in which it was made."""

    def __init__(self) -> None:
        self._num_forks = _Forks.num

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of that process."""
        return self._num_forks != _Forks.num


class ThreadsTransport(BaseTransport):
    """One rank's place in a meeting."""

    def __init__(self, meeting: Meeting, info: GroupInfo, world_rank: int, box: _native.BlackBox | None = None) -> None:
        self.meeting = meeting
        self._recorder = None if box is None else Recorder(box, info, meeting.identity)
        self.scheduler = meeting.scheduler
        self._info = info
        self._world_rank = world_rank
        self._closed = False
        # By the end of the rank's function, not by the program.
        self._has_returned = False
        self._origin = Origin()
        self._seq = 0
        self._num_messages: dict[tuple[bool, int], int] = {}
        self._counts = Counts()

    kind = "threads"

    @property
    def has_left(self) -> bool:
        return self._closed

    @property
    def state(self) -> str:
        failure = self.meeting.failure
        return failures.describe_state(self._info, left=self._closed, forked=self.is_forked, failure=failure)

    @property
    def seq(self) -> int:
        return self._seq

    def statistics(self) -> dict[str, OpStatistics]:
        return {} if self.is_forked else self._counts.read()

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process whose threads the ranks are: it has none of them."""
        return self._origin.is_forked

    def forked(self, op: str) -> PhalanxError:
        return failures.explain(None, self._info, op, _native.FORKED)

    # What `failures` asks of a group.

    def failure(self) -> _native.Failure:
        assert self.meeting.failure is not None
        return self.meeting.failure

    @property
    def level(self) -> int:
        return self.meeting.check

    def testimonies(self) -> list[_native.Testimony]:
        return self.meeting.testimonies

    def whereabouts(self) -> list[str]:
        """Lines that say where those were who did not come to a call whose time was up."""
        return self.meeting.whereabouts

    def refusals(self, rank: int) -> list[str]:
        return self.meeting.refusals(rank)

    def last_words(self, rank: int) -> str:
        return self.meeting.words[rank]

    def _describe_absent(self, missing: Sequence[int]) -> list[str]:
        """Lines that say where these ranks are."""
        lines = []
        for rank in missing[:_MOST_RANKS]:
            text, stack = self._world().whereabouts(self._owner_of(rank))
            lines.append(f"  {self._info.describe(rank)} {text}")
            if stack:
                lines += ["    its stack, innermost last:", *(f"      {line}" for line in stack)]
        if len(missing) > _MOST_RANKS:
            lines.append(f"  and {len(missing) - _MOST_RANKS} more ranks")
        return lines

    def lost(self, peer: int) -> list[str]:
        """Lines that say what a rank did last."""
        calls = self._world().last_calls(self._owner_of(peer))
        return (
            [f"  the last calls of {self._info.describe(peer)}:", *(f"    {line}" for line in calls)] if calls else []
        )

    def _owner_of(self, rank: int) -> int:
        return self.meeting.owners.get(rank, rank)

    def _world(self) -> World:
        assert place.world is not None
        return place.world

    def join(self, timeout: float) -> None:
        """Waits until all ranks of the group have come."""
        self.scheduler.pause()
        meeting = self.meeting
        ticket = Ticket(meeting, self._world_rank, self._info.rank, "new_group")
        with meeting.lock:
            meeting.join(ticket)
        try:
            if not ticket.ended:
                self.scheduler.wait(ticket, timeout)
        finally:
            with meeting.lock:
                missing = [] if ticket.ended else meeting.waited_for(ticket)
                meeting.give_up_joining(ticket)
        if ticket.result == _native.FAILED:
            raise self._not_made()
        if not ticket.ended:
            raise CallTimeout(
                f"gave up after a timeout of {timeout:g} s: {self._info.describe(*missing)} did not come to make the "
                "group",
                group=self._info.name,
                rank=self._info.rank,
                op="new_group",
                hint="look whether these ranks make the same groups in the same order",
            )

    def _not_made(self) -> PhalanxError:
        """Why the group can't be made."""
        if self.meeting.circle:
            return different_groups(self._info, self.meeting.circle)
        assert self.meeting.absent is not None
        rank, dead, status, words = self.meeting.absent
        return failures.lost_while_joining(self._info, rank, status, dead=dead, words=words)

    def split(
        self, info: GroupInfo | None, members: Sequence[int], propose: Exchange, exchange: Exchange
    ) -> ThreadsTransport | None:
        # The first rank of each new group chooses a key that no other group has.
        keys = propose(os.urandom(8).hex())
        if info is None:
            return None
        owners = {rank: self.meeting.owners[member] for rank, member in enumerate(members)}
        return self._world().join_split(keys[members[0]], info, owners)

    # What a group asks of a transport.

    def run(self, call: Call, timeout: float) -> None:
        ticket = self._come(call, timeout)
        if not ticket.ended:
            self.scheduler.wait(ticket, None)
        if ticket.result != _FINISHED:
            raise self.explain(ticket, timeout)

    def _check_memory(self, op: str, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.data_ptr() == 0 and tensor.nbytes > 0:
                raise failures.explain(None, self._info, op, _native.NO_MEMORY)
        for tensor in written:
            failures.check_writable(self._info, op, tensor)

    def start(self, call: Call, timeout: float) -> Pending | None:
        ticket = self._come(call, timeout)
        return None if ticket.result == _FINISHED else ThreadsPending(self, ticket, timeout)

    def _come(self, call: Call, timeout: float) -> Ticket:
        self._check_memory(call.op, call.tensors(), () if call.outputs is None else call.outputs.tensors)
        ticket = Ticket(self.meeting, self._world_rank, self._info.rank, call.op)
        ticket.call = call.with_aliases()
        self._hand_over(ticket, timeout, self.meeting.come)
        return ticket

    def start_message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float) -> Pending | None:
        self._check_memory("send" if sends else "recv", [tensor], [] if sends else [tensor])
        ticket = Ticket(self.meeting, self._world_rank, self._info.rank, "send" if sends else "recv")
        ticket.peer, ticket.tag, ticket.tensor = peer, tag, tensor.detach()
        self._hand_over(ticket, timeout, self.meeting.send if sends else self.meeting.receive)
        if ticket.result == _FINISHED and peer != _native.ANY_SOURCE:
            return None
        return ThreadsPending(self, ticket, timeout)

    def refuse(self, refusal: Refusal) -> None:
        if not self._closed and not self.is_forked:
            with self.meeting.lock:
                self.meeting.refuse(self._info.rank, refusal)

    def catch_up(self, tensors: Sequence[torch.Tensor]) -> None:
        rank = self._info.rank
        with self.meeting.lock:
            mine = [tickets[rank] for tickets in self.meeting.calls.values() if rank in tickets]
        for ticket in mine:
            # None once it has ended.
            outputs = None if ticket.call is None else ticket.call.outputs
            if outputs is not None and any(meet(one, other) for one in tensors for other in outputs.tensors):
                self.scheduler.wait(ticket, None)

    def _hand_over(self, ticket: Ticket, timeout: float, hand_over: Callable[[Ticket], None]) -> None:
        if self.is_forked:
            raise self.forked(ticket.op)
        meeting, call = self.meeting, ticket.call
        what: tuple[object, ...]
        if call is not None:
            description = call.description
            what = (description.root, description.reduce_op, _dtype_of(call), description.count)
        else:
            assert ticket.tensor is not None
            what = (ticket.peer, ticket.tag, ticket.tensor.dtype, ticket.tensor.numel())
        ticket.where, flags = _native.origin()
        ticket.describe_with(flags)
        self.scheduler.point(ticket.op, self._info.name, *what)
        with meeting.lock:
            refused = _native.LEFT if self._closed else _native.WAS_BROKEN if meeting.failure is not None else _FINISHED
            if refused != _FINISHED:
                meeting.give_up(self._info.rank)
                raise self._explain(ticket, refused, timeout)
            if ticket.call is not None:
                self._seq += 1
                ticket.seq = self._seq
            else:
                key = (ticket.op == "send", ticket.peer)
                ticket.seq = self._num_messages[key] = self._num_messages.get(key, 0) + 1
            if self._recorder is not None:
                self._recorder.record(ticket, timeout)
            meeting.note_made(ticket)
            ticket.counts, ticket.made, ticket.size = self._counts, self.scheduler.now(), size_of(ticket)
            hand_over(ticket)
            if timeout != math.inf and not ticket.ended:
                self.scheduler.at(timeout, lambda: self._expire(ticket), lambda: ticket.ended)

    def _expire(self, ticket: Ticket) -> None:
        with self.meeting.lock:
            # Those who came may have disagreed by then, which says more.
            self.meeting.report_disagreements()
            if not ticket.ended:
                # As of now: those who are absent may be the ones to explain it.
                self.meeting.expire(ticket, self._describe_absent(self.meeting.waited_for(ticket)))

    def abort(self, reason: str) -> None:
        # One that was killed says nothing any more.
        if self.is_forked or self._closed:
            return
        with self.meeting.lock:
            self.meeting.fail(
                _native.FAILURE_ABORTED,
                rank=self._info.rank,
                call=_native.Description("barrier"),
                seq=self._seq,
                reason=reason,
            )

    def say_last_words(self, text: str) -> None:
        words = self.meeting.words
        words[self._info.rank] = words[self._info.rank] or text

    def complete(self, patience: float) -> None:
        until = self.scheduler.now() + patience
        while not self._closed and not self.is_forked:
            with self.meeting.lock:
                tickets = self.meeting.pending_of(self._info.rank)
            if not tickets or not self.scheduler.wait(tickets[0], until - self.scheduler.now()):
                return
            until = self.scheduler.now() + patience

    def close(self, exiting: bool = False) -> None:
        if not self._closed and not self.is_forked:
            self._closed, self._has_returned = True, exiting
            with self.meeting.lock:
                self.meeting.leave(self._info.rank, EXITING if exiting else CLOSED)

    def die(self, status: int) -> None:
        """As a process that was killed: nobody is told but by its absence."""
        self._closed = True
        with self.meeting.lock:
            self.meeting.leave(self._info.rank, NOT_LEFT, dead=True, status=status)

    def explain(self, ticket: Ticket, timeout: float) -> PhalanxError:
        with self.meeting.lock:
            # This rank is told now that the group is broken.
            if self.meeting.failure is not None:
                self.meeting.give_up(self._info.rank)
        return self._explain(ticket, ticket.result, timeout)

    def _explain(self, ticket: Ticket, status: int, timeout: float) -> PhalanxError:
        if status == _native.LEFT and self._has_returned:
            return GroupError(
                "the function of this rank has returned without waiting for this call",
                code="GROUP:CLOSED",
                group=self._info.name,
                rank=self._info.rank,
                op=ticket.op,
                hint=WAIT_FOR_THREADS,
            )
        return failures.explain(self, self._info, ticket.op, status, timeout, ticket.seq)

    def explain_waiting(self, ticket: Ticket, seconds: float) -> CallTimeout:
        with self.meeting.lock:
            missing = [] if ticket.ended else self.meeting.waited_for(ticket)
        return failures.still_under_way(self, self._info, ticket.op, ticket.seq, seconds, missing)


class ThreadsPending:
    """A call under way."""

    def __init__(self, transport: ThreadsTransport, ticket: Ticket, timeout: float) -> None:
        self._transport = transport
        self._ticket = ticket
        self._timeout = timeout
        self._error: PhalanxError | None = None

    @property
    def ended(self) -> bool:
        if self._transport.is_forked:
            return True
        # Whoever asks again and again would never let the others come.
        if not self._ticket.ended:
            self._transport.scheduler.pause()
        return self._ticket.ended

    @property
    def source(self) -> int:
        return self._ticket.source

    def wait(self, timeout: float | None) -> bool:
        is_over = self._ticket.ended or self._transport.is_forked
        if not is_over and not self._transport.scheduler.wait(self._ticket, timeout):
            return False
        self.deliver_or_raise()
        return True

    def now(self) -> float:
        return self._transport.scheduler.now()

    def explain_waiting(self, seconds: float) -> CallTimeout:
        return self._transport.explain_waiting(self._ticket, seconds)

    def deliver(self) -> None:
        if self._error is not None or self._ticket.result == _FINISHED:
            return
        if self._transport.is_forked:
            self._error = self._transport.forked(self._ticket.op)
        elif self._ticket.result != _PENDING:
            self._error = self._transport.explain(self._ticket, self._timeout)

    def deliver_or_raise(self) -> None:
        self.deliver()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """In the rank's own thread."""
        with self._transport.meeting.lock:
            ended = self._ticket.ended
            if not ended:
                self._ticket.callbacks = [*(self._ticket.callbacks or ()), callback]
        if ended:
            callback()

    def drop(self) -> None:
        """The meeting keeps what is under way."""

    def make_future(self, wait: Callable[[], None]) -> Future[Any]:
        scheduler, owner = self._transport.scheduler, self._ticket.owner
        return SharedTurnFuture(wait, scheduler.pause, partial(scheduler.interrupt, owner))


def _dtype_of(call: Call) -> torch.dtype | None:
    tensors = call.tensors()
    return tensors[0].dtype if tensors else None
