"""Shared memory between the processes of one host: turns calls into requests to the native core.

`rendezvous` makes the segment, `failures` turns what went wrong into exceptions.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.statistics import OpStatistics
from phalanx.transports import failures, identities, limits, rendezvous, splitting
from phalanx.transports.base import BaseTransport, Exchange
from phalanx.transports.copying import CopiesInFlight
from phalanx.transports.hello import Hello
from phalanx.transports.identities import Identity
from phalanx.transports.leaving import leaving
from phalanx.transports.pending import ShmPending
from phalanx.transports.plain_memory import (
    Pairs,
    clone,
    copy_back,
    is_plain,
    like,
    to_plain,
    to_plain_unread,
    with_plain_tensors,
)
from phalanx.transports.refusals import Refusal
from phalanx.transports.rendezvous import Known, Met
from phalanx.types import Call, GroupInfo, Store

_FINISHED = _native.FINISHED
_OVERLAP = _native.Obstacle.overlap
_OBSTACLES = {
    _native.Obstacle.not_writable: _native.NOT_WRITABLE,
    _native.Obstacle.no_memory: _native.NO_MEMORY,
}


def join(store: Store, info: GroupInfo, timeout: float, scope: str = "", known: Known | None = None) -> ShmTransport:
    """Meets the other ranks and returns this rank's end of their segment. See `rendezvous.join`."""
    return rendezvous.join(store, info, timeout, _make, scope=scope, known=known)


def _make(met: Met) -> ShmTransport:
    group = _native.GroupEnd(met.segment, met.info.rank)
    group.watch(met.identities)
    return ShmTransport(group, met.info, met.identities, met.folder, met.began_ns, met.hellos)


class ShmTransport(BaseTransport):
    """One rank's end of a segment. The native group is thread-safe and keeps calls in order."""

    __slots__ = (
        "__weakref__",
        "_copies",
        "_group",
        "_info",
        "_left_at",
        "_process",
        "_statistics",
        "_steps_lock",
        "began_ns",
        "folder",
        "front",
        "hellos",
        "identities",
        "level",
    )

    def __init__(
        self,
        group: _native.GroupEnd,
        info: GroupInfo,
        identities: Sequence[Identity] = (),
        folder: str = "",
        began_ns: int = 0,
        hellos: Sequence[Hello] = (),
    ) -> None:
        # Of the processes of the ranks, as `rendezvous` gives them; what the first rank offers to the job; when this
        # rank began to make the group, on the monotonic clock; and what each rank told of itself.
        self.identities = identities
        self.folder = folder
        self.began_ns = began_ns
        self.hellos = hellos
        self._group: _native.GroupEnd | None = group
        self.level = group.level
        self._info = info
        self._left_at = 0
        self._steps_lock, self._process = threading.Lock(), os.getpid()
        # Kept when the group is left.
        self._statistics = group.statistics
        # Of calls without a Python frame of ours. Whoever makes the group sets its timeout.
        self.front = _native.Front(group, 0.0)
        self._copies = CopiesInFlight(self.front)

    @property
    def has_left(self) -> bool:
        return self._group is None

    kind = "shm"
    spans_processes = True

    @property
    def quick(self) -> ShmTransport:
        return self

    @property
    def state(self) -> str:
        group = self._group
        forked = group is not None and group.forked
        failure = group.failure() if group is not None and not forked and group.broken else None
        return failures.describe_state(self._info, left=group is None, forked=forked, failure=failure)

    @property
    def native(self) -> _native.GroupEnd | None:
        """None once the group was left."""
        return self._group

    @property
    def seq(self) -> int:
        group = self._group
        return self._left_at if group is None else group.seq

    def split(
        self, info: GroupInfo | None, members: Sequence[int], propose: Exchange, exchange: Exchange
    ) -> ShmTransport | None:
        began_ns = time.monotonic_ns()
        ids = [self.identities[rank] for rank in members]
        hellos = [self.hellos[rank] for rank in members]
        group = splitting.split(self._info, info, members, hellos, ids, propose, exchange)
        if info is None or group is None:
            return None
        return ShmTransport(group, info, ids, self.folder, began_ns, hellos)

    def exclude_others(self) -> AbstractContextManager[object]:
        if self._process != os.getpid():
            # A thread of the parent may hold it.
            self._steps_lock, self._process = threading.Lock(), os.getpid()
        return self._steps_lock

    def decline(self, store: Store, info: GroupInfo, timeout: float, error: PhalanxError) -> None:
        rendezvous.decline(store, info, timeout, error)

    def check_whole(self, op: str) -> None:
        group = self._group
        if group is None or group.forked:
            return
        if group.broken:
            raise failures.explain(group, self._info, op, _native.WAS_BROKEN)
        for rank, identity in enumerate(self.identities):
            # First: a rank that has left may have ended since, and has said why.
            if group.has_left(rank):
                words = group.last_words(rank)
                raise failures.lost_while_joining(self._info, rank, _native.UNKNOWN_STATUS, dead=False, words=words)
            peer = None if rank == self._info.rank else _native.Peer.watch(*identity)
            if peer is not None and peer.dead:
                raise failures.lost_while_joining(self._info, rank, peer.status)

    def statistics(self) -> dict[str, OpStatistics]:
        sums = self._statistics.read()
        return {_native.OPS[op].name: OpStatistics(calls, size, *seconds) for op, calls, size, *seconds in sums}

    def abort(self, reason: str) -> None:
        group = self._group
        if group is not None and not group.forked:
            group.abort(reason)

    def say_last_words(self, text: str) -> None:
        group = self._group
        if group is not None and not group.forked:
            group.say_last_words(text)

    def refuse(self, refusal: Refusal) -> None:
        group = self._group
        if group is None or group.forked or group.broken:
            return
        if refusal.is_message:
            group.refuse_message(refusal.op == "send", refusal.peer, refusal.tag, refusal.pack())
        else:
            group.refuse_call(refusal.pack())

    def complete(self, patience: float) -> None:
        group = self._group
        if group is None:
            return
        until = leaving.begin(patience)
        while (rest := group.drain()) != _native.REST_NOTHING:
            now = time.monotonic()
            if rest == _native.REST_MOVING:
                until = now + patience
            elif now >= until:
                break
        leaving.end()
        if not group.forked:
            self._copies.bring_back_ended()

    def _forget_lost(self, group: _native.GroupEnd) -> None:
        """The death that broke the group has been told: whoever makes a new one waits for another process."""
        failure = group.failure()
        if failure.kind == _native.FAILURE_LOST and self.identities:
            identities.forget(self.identities[failure.peer])

    def words_of_left(self, rank: int) -> str | None:
        group = self._group
        if group is None or group.forked or not group.has_left(rank):
            return None
        return group.last_words(rank)

    def close(self, exiting: bool = False) -> None:
        group, self._group = self._group, None
        self.front.close()
        if group is not None:
            self._left_at = group.seq
            try:
                if not group.forked and group.broken:
                    self._forget_lost(group)
                    if not group.was_told:
                        failures.tell_at_last(group, self._info)
            finally:
                group.leave(exiting)

    def run(self, call: Call, timeout: float) -> None:
        group = self._group
        if group is None:
            raise self._left(call.op)
        handed, pairs = self._hand_over(_native.run_call, group, call, timeout)
        if handed.result != _FINISHED:
            raise failures.explain(group, self._info, call.op, handed.result, timeout, handed.seq)
        self._copy_back(call.op, pairs)

    def start(self, call: Call, timeout: float) -> ShmPending | None:
        group = self._group
        if group is None:
            raise self._left(call.op)
        handed, pairs = self._hand_over(_native.start_call, group, call, timeout)
        if handed.result == _FINISHED:
            self._copy_back(call.op, pairs)
            return None
        if handed.pending is None:
            raise failures.explain(group, self._info, call.op, handed.result, timeout)
        return self.adopt(group, handed.pending, call.op, timeout, handed.written, pairs)

    def _hand_over(
        self, hand: Callable[..., _native.Handed], group: _native.GroupEnd, call: Call, timeout: float
    ) -> tuple[_native.Handed, Pairs]:
        """Gives the core a call whose tensors are plain, or have plain copies. The pairs are to be copied back."""
        stand_ins = self._copies.make_way(call.tensors()) if self._copies.has_collectives else {}
        self._check_writable(call)
        if call.inputs is not None:
            self.catch_up([t for t in call.inputs.tensors if not is_plain(t) and id(t) not in stand_ins])
        inputs, pairs = with_plain_tensors(call.inputs, stand_ins, to_plain)
        if _native.TRAITS[call.op].in_place and call.outputs is not None:
            outputs = inputs
        else:
            # Every op writes each element of its outputs.
            outputs, pairs = with_plain_tensors(call.outputs, stand_ins, to_plain_unread)
        handed = hand(group, call.description, inputs, outputs, timeout)
        if handed.obstacle == _OVERLAP:
            assert inputs is not None
            self.catch_up(inputs.tensors)
            inputs = like(inputs, [clone(tensor) for tensor in inputs.tensors])
            handed = hand(group, call.description, inputs, outputs, timeout)
        if handed.obstacle in _OBSTACLES:
            raise failures.explain(None, self._info, call.op, _OBSTACLES[handed.obstacle])
        return handed, pairs

    def adopt(
        self,
        group: _native.GroupEnd,
        native: _native.CallHandle,
        op: str,
        timeout: float,
        written: Sequence[tuple[int, int]],
        pairs: Pairs | None = None,
    ) -> ShmPending:
        copies = self._copies.add(native, pairs, is_message=op in _native.MESSAGE_OPS) if pairs else None
        pending = ShmPending(self._copies, group, self._info, native, op, timeout, copies)
        if written:
            self._copies.add_writing(native, written)
        if number := _native.progress_error():
            limits.warn(
                "starting the progress thread",
                RuntimeError(os.strerror(number)),
                "calls in flight make progress only while this process waits for one of them",
            )
        return pending

    def catch_up(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._copies.has_writers:
            self._copies.catch_up(tensors)

    def _check_writable(self, call: Call) -> None:
        """Memory that is not torch's own may be mapped read-only, and the core would crash."""
        for tensor in () if call.outputs is None else call.outputs.tensors:
            if not tensor.untyped_storage().resizable():
                failures.check_writable(self._info, call.op, tensor)

    def _copy_back(self, op: str, pairs: Pairs) -> None:
        """Of a call that has finished, and those before it."""
        if self._copies.has_collectives or op == "barrier":
            self._copies.bring_back_ended(messages=op == "barrier")
        if pairs:
            copy_back(pairs)

    def start_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float
    ) -> ShmPending | None:
        op = "send" if sends else "recv"
        group = self._group
        if group is None:
            raise self._left(op)
        memory = to_plain(tensor) if sends else to_plain_unread(tensor)
        if not sends and memory is not tensor:
            failures.check_writable(self._info, op, tensor)
        handed = _native.start_message(group, sends, memory, peer, tag, timeout)
        if handed.obstacle in _OBSTACLES:
            raise failures.explain(None, self._info, op, _OBSTACLES[handed.obstacle])
        pairs = [] if sends or memory is tensor else [(tensor.detach(), memory)]
        if handed.result == _FINISHED:
            copy_back(pairs)
            return None
        if handed.pending is None:
            raise failures.explain(group, self._info, op, handed.result, timeout)
        return self.adopt(group, handed.pending, op, timeout, [], pairs)

    def _left(self, op: str) -> PhalanxError:
        return failures.explain(None, self._info, op, _native.LEFT)
