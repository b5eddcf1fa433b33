"""One rank's end of a group whose ranks are threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

import torch

from phalanx import _native
from phalanx.errors import CallTimeout, GroupError, PhalanxError
from phalanx.memory import meet
from phalanx.statistics import OpStatistics
from phalanx.transports import failures
from phalanx.transports.base import BaseTransport, Exchange, Pending
from phalanx.transports.refusals import Refusal
from phalanx.transports.threads.counting import Counts
from phalanx.transports.threads.here import Origin, Run, this_thread
from phalanx.transports.threads.hub import Hub
from phalanx.transports.threads.in_flight import CallInFlight, InFlight, Joining, MessageInFlight
from phalanx.transports.threads.pending import ThreadsPending
from phalanx.transports.threads.recording import Recorder
from phalanx.types import Call, GroupInfo

__all__ = ["WAIT_FOR_THREADS", "ThreadsTransport"]

# What to do about a call that comes after the end of its rank's function.
WAIT_FOR_THREADS = "let the rank wait for the threads that it has started, for example with join()"

_FINISHED = _native.FINISHED
# Whose whereabouts an error tells.
_MOST_RANKS = 8


class ThreadsTransport(BaseTransport):
    """One rank's end of a group. `owner` is the rank among those of the run."""

    def __init__(self, hub: Hub, info: GroupInfo, owner: int, box: _native.BlackBox | None = None) -> None:
        self.hub = hub
        self.scheduler = hub.scheduler
        self._info = info
        self._owner = owner
        self._recorder = None if box is None else Recorder(box, info, hub.identity)
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
        failure = self.hub.failure
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
        assert self.hub.failure is not None
        return self.hub.failure

    @property
    def level(self) -> int:
        return self.hub.agreement.level

    def testimonies(self) -> list[_native.Testimony]:
        return self.hub.agreement.testimonies()

    def whereabouts(self) -> list[str]:
        return self.hub.whereabouts

    def refusals(self, rank: int) -> list[str]:
        return self.hub.agreement.refusals(rank)

    def last_words(self, rank: int) -> str:
        return self.hub.agreement.last_words(rank)

    def lost(self, peer: int) -> list[str]:
        calls = self._run().last_calls(self._owner_of(peer))
        return (
            [f"  the last calls of {self._info.describe(peer)}:", *(f"    {line}" for line in calls)] if calls else []
        )

    def _describe_whereabouts(self, missing: Sequence[int]) -> list[str]:
        """Lines that say where these ranks are."""
        lines = []
        for rank in missing[:_MOST_RANKS]:
            text, stack = self._run().whereabouts(self._owner_of(rank))
            lines.append(f"  {self._info.describe(rank)} {text}")
            if stack:
                lines += ["    its stack, innermost last:", *(f"      {line}" for line in stack)]
        if len(missing) > _MOST_RANKS:
            lines.append(f"  and {len(missing) - _MOST_RANKS} more ranks")
        return lines

    def _owner_of(self, rank: int) -> int:
        return self.hub.meeting.owners.get(rank, rank)

    def _run(self) -> Run:
        assert this_thread.run is not None
        return this_thread.run

    # How a group is made.

    def join(self, timeout: float) -> None:
        """Waits until all ranks of the group have come."""
        self.scheduler.pause()
        hub, meeting = self.hub, self.hub.meeting
        joining = Joining(hub, self._owner, self._info.rank)
        with hub.lock:
            meeting.join(joining)
        try:
            if not joining.ended:
                self.scheduler.wait(joining, timeout)
        finally:
            with hub.lock:
                missing = [] if joining.ended else meeting.missing()
                meeting.give_up(joining)
        if joining.result == _native.FAILED:
            raise meeting.explain(self._info)
        if not joining.ended:
            raise CallTimeout(
                f"gave up after a timeout of {timeout:g} s: {self._info.describe(*missing)} did not come to make the "
                "group",
                group=self._info.name,
                rank=self._info.rank,
                op="new_group",
                hint="look whether these ranks make the same groups in the same order",
            )

    def split(
        self, info: GroupInfo | None, members: Sequence[int], propose: Exchange, exchange: Exchange
    ) -> ThreadsTransport | None:
        # The first rank of each new group chooses a key that no other group has.
        keys = propose(os.urandom(8).hex())
        if info is None:
            return None
        owners = {rank: self.hub.meeting.owners[member] for rank, member in enumerate(members)}
        return self._run().join_split(keys[members[0]], info, owners)

    # Calls and messages.

    def run(self, call: Call, timeout: float) -> None:
        made = self._make_call(call, timeout)
        if not made.ended:
            self.scheduler.wait(made, None)
        if made.result != _FINISHED:
            raise self.explain(made, timeout)

    def start(self, call: Call, timeout: float) -> Pending | None:
        made = self._make_call(call, timeout)
        return None if made.result == _FINISHED else ThreadsPending(self, made, timeout)

    def _make_call(self, call: Call, timeout: float) -> CallInFlight:
        self._check_memory(call.op, call.tensors(), () if call.outputs is None else call.outputs.tensors)
        self._check_process(call.op)
        hub, made = self.hub, CallInFlight(self.hub, self._owner, self._info.rank, call.with_aliases())
        what = call.description
        self.scheduler.point(made.op, self._info.name, what.root, what.reduce_op, _dtype_of(call), what.count)
        with hub.lock:
            self._check_open(made, timeout)
            self._seq += 1
            made.seq = self._seq
            if self._recorder is not None:
                self._recorder.record_call(made, timeout)
            self._begin(made)
            hub.come(made)
            self._set_deadline(made, timeout)
        return made

    def start_message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float) -> Pending | None:
        op = "send" if sends else "recv"
        self._check_memory(op, [tensor], [] if sends else [tensor])
        self._check_process(op)
        hub = self.hub
        made = MessageInFlight(
            hub, self._owner, self._info.rank, sends=sends, tensor=tensor.detach(), peer=peer, tag=tag
        )
        self.scheduler.point(op, self._info.name, peer, tag, tensor.dtype, tensor.numel())
        with hub.lock:
            self._check_open(made, timeout)
            made.seq = self._num_messages[sends, peer] = self._num_messages.get((sends, peer), 0) + 1
            if self._recorder is not None:
                self._recorder.record_message(made, timeout)
            self._begin(made)
            if sends:
                hub.send(made)
            else:
                hub.receive(made)
            self._set_deadline(made, timeout)
        if made.result == _FINISHED and peer != _native.ANY_SOURCE:
            return None
        return ThreadsPending(self, made, timeout)

    def _check_memory(self, op: str, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.data_ptr() == 0 and tensor.nbytes > 0:
                raise failures.explain(None, self._info, op, _native.NO_MEMORY)
        for tensor in written:
            failures.check_writable(self._info, op, tensor)

    def _check_process(self, op: str) -> None:
        if self.is_forked:
            raise self.forked(op)

    def _check_open(self, made: InFlight, timeout: float) -> None:
        """Raises where this rank has left the group, or the group is broken."""
        refused = _native.LEFT if self._closed else _native.WAS_BROKEN if self.hub.failure is not None else _FINISHED
        if refused != _FINISHED:
            self.hub.give_up(self._info.rank)
            raise self._explain(made, refused, timeout)

    def _begin(self, made: InFlight) -> None:
        self.hub.note_made(made)
        made.counts, made.made = self._counts, self.scheduler.now()

    def _set_deadline(self, made: InFlight, timeout: float) -> None:
        if timeout != math.inf and not made.ended:
            self.scheduler.at(timeout, lambda: self._expire(made), lambda: made.ended)

    def _expire(self, made: InFlight) -> None:
        with self.hub.lock:
            # The ranks that came may have disagreed by then, which says more.
            self.hub.report_difference()
            if not made.ended:
                # Now: the ranks that are absent may be the ones to explain it.
                self.hub.expire(made, self._describe_whereabouts(made.missing()))

    def catch_up(self, tensors: Sequence[torch.Tensor]) -> None:
        rank = self._info.rank
        with self.hub.lock:
            mine = [made for made in self.hub.calls.pending() if made.rank == rank]
        for made in mine:
            # It may have ended meanwhile.
            outputs = None if made.call is None else made.call.outputs
            if outputs is not None and any(meet(one, other) for one in tensors for other in outputs.tensors):
                self.scheduler.wait(made, None)

    def refuse(self, refusal: Refusal) -> None:
        if not self._closed and not self.is_forked:
            with self.hub.lock:
                self.hub.refuse(self._info.rank, refusal)

    # How it ends.

    def abort(self, reason: str) -> None:
        # One that was killed says nothing any more.
        if self.is_forked or self._closed:
            return
        with self.hub.lock:
            self.hub.abort(self._info.rank, self._seq, reason)

    def say_last_words(self, text: str) -> None:
        self.hub.agreement.say_last_words(self._info.rank, text)

    def complete(self, patience: float) -> None:
        until = self.scheduler.now() + patience
        while not self._closed and not self.is_forked:
            with self.hub.lock:
                pending = self.hub.pending_of(self._info.rank)
            if not pending or not self.scheduler.wait(pending[0], until - self.scheduler.now()):
                return
            until = self.scheduler.now() + patience

    def close(self, exiting: bool = False) -> None:
        if not self._closed and not self.is_forked:
            self._closed, self._has_returned = True, exiting
            with self.hub.lock:
                self.hub.leave(self._info.rank, _native.LEAVING_EXITING if exiting else _native.LEAVING_CLOSED)

    def die(self, status: int) -> None:
        """As a process that was killed: nobody is told but by its absence."""
        self._closed = True
        with self.hub.lock:
            self.hub.die(self._info.rank, status)

    # What errors say.

    def explain(self, in_flight: InFlight, timeout: float) -> PhalanxError:
        """Why a call did not finish. From now on this rank knows that the group is broken."""
        with self.hub.lock:
            if self.hub.failure is not None:
                self.hub.give_up(self._info.rank)
        return self._explain(in_flight, in_flight.result, timeout)

    def _explain(self, in_flight: InFlight, status: int, timeout: float) -> PhalanxError:
        if status == _native.LEFT and self._has_returned:
            return GroupError(
                "the function of this rank has returned without waiting for this call",
                code="GROUP:CLOSED",
                group=self._info.name,
                rank=self._info.rank,
                op=in_flight.op,
                hint=WAIT_FOR_THREADS,
            )
        return failures.explain(self, self._info, in_flight.op, status, timeout, in_flight.seq)

    def explain_waiting(self, in_flight: InFlight, seconds: float) -> CallTimeout:
        with self.hub.lock:
            missing = [] if in_flight.ended else in_flight.missing()
        return failures.still_under_way(self, self._info, in_flight.op, in_flight.seq, seconds, missing)


def _dtype_of(call: Call) -> torch.dtype | None:
    tensors = call.tensors()
    return tensors[0].dtype if tensors else None
