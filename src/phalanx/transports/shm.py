"""Shared memory between the processes of one host: turns calls into requests to the native core.

`rendezvous` makes the segment, `failures` turns what went wrong into exceptions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.statistics import OpStatistics
from phalanx.transports import failures, identities, limits
from phalanx.transports.copying import Copying
from phalanx.transports.hello import Hello
from phalanx.transports.identities import Identity
from phalanx.transports.leaving import leaving
from phalanx.transports.pending import ShmPending
from phalanx.transports.refusals import Refusal
from phalanx.transports.signatures import dtype_code, sizes_of, unlisted_dtype
from phalanx.transports.spans import (
    IN_PLACE_OPS,
    Copies,
    Spans,
    StandIns,
    clone,
    copy_back,
    hold,
    is_plain,
    like,
    overlap,
    plain,
    plain_tensor,
    spans_of,
)
from phalanx.types import DTYPE_CODES, NO_ROOT, Call, GroupInfo

_ALL_REDUCE = _native.OP_NUMBERS["all_reduce"]
# Those that have one tensor on each rank: in place, or of a root that all get.
_SINGLE_OPS = frozenset(op.name for op in _native.OPS if op.in_place or (op.rooted and op.shared_result))
_WIDTHS = tuple(dtype.width for dtype in _native.DTYPES)
_COMPLEX = frozenset(code for dtype, code in DTYPE_CODES.items() if dtype.is_complex)
_FINISHED = _native.FINISHED
_OTHER_DTYPE = _native.OTHER_DTYPE


class ShmTransport:
    """One rank's end of a segment. The native group is thread-safe and keeps calls in order."""

    __slots__ = (
        "__weakref__",
        "_copying",
        "_group",
        "_info",
        "_left_at",
        "_statistics",
        "began_ns",
        "check",
        "folder",
        "hellos",
        "identities",
    )

    def __init__(
        self,
        group: _native.Group,
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
        self._group: _native.Group | None = group
        self.check = group.check
        self._info = info
        self._left_at = 0
        # Kept when the group is left.
        self._statistics = group.statistics
        self._copying = Copying()

    @property
    def has_left(self) -> bool:
        return self._group is None

    kind = "shm"

    @property
    def state(self) -> str:
        group = self._group
        forked = group is not None and group.forked
        failure = group.failure() if group is not None and not forked and group.broken else None
        return failures.describe_state(self._info, left=group is None, forked=forked, failure=failure)

    @property
    def native(self) -> _native.Group | None:
        """None once the group was left."""
        return self._group

    @property
    def seq(self) -> int:
        group = self._group
        return self._left_at if group is None else group.seq

    def check_whole(self, op: str) -> None:
        """Raises where the group is broken, or a rank is gone. For waits outside a call."""
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
            self._copying.settle()

    def _forget_lost(self, group: _native.Group) -> None:
        """The death that broke the group has been told: whoever makes a new one waits for another process."""
        failure = group.failure()
        if failure.kind == _native.FAILURE_LOST and self.identities:
            identities.forget(self.identities[failure.peer])

    def words_of_left(self, rank: int) -> str | None:
        """The last words of a rank that has left the group; None: it has not left."""
        group = self._group
        if group is None or group.forked or not group.has_left(rank):
            return None
        return group.last_words(rank)

    def close(self, exiting: bool = False) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._left_at = group.seq
            try:
                if not group.forked and group.broken:
                    self._forget_lost(group)
                    if not group.was_told:
                        failures.tell_at_last(group, self._info)
            finally:
                group.leave(exiting)

    def all_reduce_plain(self, tensor: torch.Tensor, code: int, reduce_op: int, timeout: float) -> None:
        """`run` for an all_reduce of one contiguous tensor, without a Call: the quick way for most calls."""
        group = self._group
        if group is None:
            raise self._left("all_reduce")
        if self._copying.calls:
            self._copying.make_way([tensor])
        # Held while the GIL is not: another thread may give the tensor object other memory.
        storage = tensor.untyped_storage()
        if not storage.resizable():
            failures.check_writable(self._info, "all_reduce", tensor)
        numel = tensor.numel()
        failed = group.run_single(
            _ALL_REDUCE,
            reduce_op,
            NO_ROOT,
            code,
            numel,
            0,
            0,
            1.0,
            timeout,
            tensor.data_ptr(),
            numel * _WIDTHS[code],
            True,
            True,
            tensor.shape,
        )
        if failed:
            raise failures.explain(group, self._info, "all_reduce", failed[0], timeout, failed[1])

    def start_all_reduce_plain(
        self, tensor: torch.Tensor, code: int, reduce_op: int, timeout: float
    ) -> ShmPending | None:
        """`start` likewise."""
        group = self._group
        if group is None:
            raise self._left("all_reduce")
        if self._copying.calls:
            self._copying.make_way([tensor])
        storage = tensor.untyped_storage()
        if not storage.resizable():
            failures.check_writable(self._info, "all_reduce", tensor)
        address, numel = tensor.data_ptr(), tensor.numel()
        size = numel * _WIDTHS[code]
        started = group.start_single(
            storage,
            _ALL_REDUCE,
            reduce_op,
            NO_ROOT,
            code,
            numel,
            0,
            0,
            1.0,
            timeout,
            address,
            size,
            True,
            True,
            tensor.shape,
        )
        if started == _FINISHED:
            return None
        pending = self._pending(group, started, "all_reduce", timeout, [])
        self._copying.add_writing(pending, ((address, address + size),))
        return pending

    def run(self, call: Call, timeout: float) -> None:
        group = self._group
        if group is None:
            raise self._left(call.op)
        stand_ins = self._copying.make_way(call.tensors()) if self._copying.calls else {}
        single = _single(call, timeout)
        copies: Copies = []
        self._check_writable(call)
        if single is not None:
            # Held while the GIL is not: another thread may give the tensor object other memory.
            kept = hold(call.tensors())
            failed = group.run_single(*single)
        else:
            arguments, kept, copies, _ = self._prepare(call, timeout, stand_ins)
            failed = group.run(*arguments)
        del kept
        if failed:
            raise failures.explain(group, self._info, call.op, failed[0], timeout, failed[1])
        self._copy_back(call.op, copies)

    def start(self, call: Call, timeout: float) -> ShmPending | None:
        group = self._group
        if group is None:
            raise self._left(call.op)
        stand_ins = self._copying.make_way(call.tensors()) if self._copying.calls else {}
        single = _single(call, timeout)
        copies: Copies = []
        self._check_writable(call)
        if single is not None:
            started = group.start_single(hold(call.tensors()), *single)
            address, size, _, writes = single[-5:-1]
            written = [(address, address + size)] if writes else []
        else:
            arguments, kept, copies, (addresses, sizes, *_) = self._prepare(call, timeout, stand_ins)
            started = group.start(kept, *arguments)
            written = [(address, address + size) for address, size in zip(addresses, sizes, strict=True)]
        if started == _FINISHED:
            self._copy_back(call.op, copies)
            return None
        pending = self._pending(group, started, call.op, timeout, copies)
        if written:
            self._copying.add_writing(pending, written)
        return pending

    def catch_up(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._copying.has_calls:
            self._copying.catch_up(tensors)

    def _check_writable(self, call: Call) -> None:
        """Memory that is not torch's own may be mapped read-only, and the core would crash."""
        for tensor in () if call.outputs is None else call.outputs.tensors:
            if not tensor.untyped_storage().resizable():
                failures.check_writable(self._info, call.op, tensor)

    def _copy_back(self, op: str, copies: Copies) -> None:
        """Of a call that has finished, and those before it."""
        if self._copying.calls or op == "barrier":
            self._copying.settle(messages=op == "barrier")
        if copies:
            copy_back(copies)

    def start_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float, code: int | None
    ) -> ShmPending | None:
        group = self._group
        if group is None:
            raise self._left("send" if sends else "recv")
        memory, unlisted = tensor, 0
        if code is None:
            memory = plain_tensor(tensor)
            if not sends and memory is not tensor:
                failures.check_writable(self._info, "recv", tensor)
            code, unlisted = dtype_code(tensor.dtype), unlisted_dtype(tensor.dtype)
        started = group.message(
            memory.untyped_storage(),
            sends,
            peer,
            tag,
            code,
            unlisted,
            memory.numel(),
            timeout,
            memory.data_ptr(),
            memory.nbytes,
            tensor.shape,
        )
        copies = [] if sends or memory is tensor else [(tensor.detach(), memory)]
        if started == _FINISHED:
            if copies:
                copy_back(copies)
            return None
        return self._pending(group, started, "send" if sends else "recv", timeout, copies)

    def _prepare(
        self, call: Call, timeout: float, stand_ins: StandIns
    ) -> tuple[tuple[Any, ...], list[torch.UntypedStorage], Copies, Spans]:
        """The arguments for the native core, what must be kept until it is done, what to copy back then, and what the
        core writes."""
        in_place = call.op in IN_PLACE_OPS and call.outputs is not None
        if call.inputs is not None:
            self.catch_up([t for t in call.inputs.tensors if not is_plain(t) and id(t) not in stand_ins])
        inputs, copies = plain(call.inputs, stand_ins)
        outputs, copies = (inputs, copies) if in_place else plain(call.outputs, stand_ins)
        spans_in, spans_out = spans_of(inputs), spans_of(outputs)
        if overlap(call, spans_in, spans_out, self._info.rank):
            assert inputs is not None
            self.catch_up(inputs.tensors)
            inputs = like(inputs, [clone(tensor) for tensor in inputs.tensors])
            spans_in = spans_of(inputs)
        kept = [storage for blocks in (inputs, outputs) if blocks is not None for storage in hold(blocks.tensors)]
        code = dtype_code(call.dtype)
        arguments = (
            _native.OP_NUMBERS[call.op],
            call.reduce_op,
            call.root,
            code,
            call.count,
            call.layout,
            unlisted_dtype(call.dtype) if code == _OTHER_DTYPE else 0,
            call.factor,
            timeout,
            *spans_in,
            *spans_out,
            sizes_of(call),
        )
        return arguments, kept, copies, spans_out

    def _pending(
        self, group: _native.Group, started: int | _native.Pending, op: str, timeout: float, copies: Copies
    ) -> ShmPending:
        if isinstance(started, int):
            raise failures.explain(group, self._info, op, started, timeout)
        pending = ShmPending(self._copying, group, self._info, started, op, timeout, copies)
        if copies:
            self._copying.add(pending)
        if number := _native.progress_error():
            limits.warn(
                "starting the progress thread",
                RuntimeError(os.strerror(number)),
                "calls in flight make progress only while this process waits for one of them",
            )
        return pending

    def _left(self, op: str) -> PhalanxError:
        return failures.explain(None, self._info, op, _native.LEFT)


def _single(call: Call, timeout: float) -> tuple[Any, ...] | None:
    """The arguments of a call of one plain tensor, read, written or both; None for others."""
    inputs, outputs = call.inputs, call.outputs
    blocks = inputs or outputs
    if call.op not in _SINGLE_OPS or blocks is None or len(blocks.tensors) != 1:
        return None
    tensor = blocks.tensors[0]
    dtype = dtype_code(call.dtype)
    if not tensor.is_contiguous() or tensor.is_neg() or (dtype in _COMPLEX and tensor.is_conj()):
        return None
    return (
        _native.OP_NUMBERS[call.op],
        call.reduce_op,
        call.root,
        dtype,
        call.count,
        call.layout,
        unlisted_dtype(call.dtype) if dtype == _OTHER_DTYPE else 0,
        call.factor,
        timeout,
        tensor.data_ptr(),
        tensor.nbytes,
        inputs is not None,
        outputs is not None,
        tensor.shape,
    )
