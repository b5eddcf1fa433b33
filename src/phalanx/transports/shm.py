"""Shared memory between the processes of one host: turns calls into requests to the native core.

`rendezvous` makes the segment, `failures` turns what went wrong into exceptions.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from phalanx import _native
from phalanx.errors import CallTimeout
from phalanx.transports import failures
from phalanx.transports.spans import (
    IN_PLACE_OPS,
    Copies,
    clone,
    copy_back,
    like,
    overlap,
    plain,
    plain_tensor,
    spans_of,
)
from phalanx.types import DTYPE_CODES, NO_ROOT, Call, GroupInfo

_OP_NUMBERS = {name: number for number, name in enumerate(_native.OPS)}
_ALL_REDUCE = _OP_NUMBERS["all_reduce"]
_SINGLE_OPS = frozenset({"all_reduce", "broadcast", "reduce"})
# 0 for the dtypes that only move, and for calls without tensors.
_dtype_code: Callable[[torch.dtype | None, int], int] = DTYPE_CODES.get  # type: ignore[assignment]
_COMPLEX = frozenset(code for dtype, code in DTYPE_CODES.items() if dtype.is_complex)
_FOREVER = -1.0
_FINISHED = _native.FINISHED
# Held while a call that has ended is settled: by whoever comes first, and nobody goes on before that is done. Settling
# may collect garbage, and that may settle other calls.
_settling = threading.RLock()


class ShmTransport:
    """One rank's end of a segment. The native group is thread-safe and keeps calls in order."""

    __slots__ = ("__weakref__", "_copying", "_group", "_info", "_left_at", "_run_single", "identities")

    def __init__(self, group: _native.Group, info: GroupInfo, identities: Sequence[tuple[int, int]] = ()) -> None:
        # Of the processes of the ranks, as `rendezvous` gives them.
        self.identities = identities
        self._group: _native.Group | None = group
        self._info = info
        self._run_single = group.run_single
        self._left_at = 0
        # Calls that write to copies, which are copied back when somebody looks: at a barrier at the latest.
        self._copying: list[ShmPending] = []

    @property
    def seq(self) -> int:
        group = self._group
        return self._left_at if group is None else group.seq

    def abort(self, reason: str) -> None:
        group = self._group
        if group is not None and not group.forked:
            group.abort(reason)

    def say_last_words(self, text: str) -> None:
        group = self._group
        if group is not None and not group.forked:
            group.say_last_words(text)

    def close(self, exiting: bool = False) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._left_at = group.seq
            self._run_single = _closed
            group.leave(exiting)

    def all_reduce_plain(self, tensor: torch.Tensor, dtype_code: int, reduce_op: int, timeout: float) -> None:
        address, size = tensor.data_ptr(), tensor.nbytes
        status = self._run_single(
            _ALL_REDUCE, reduce_op, NO_ROOT, dtype_code, tensor.numel(), 0, 1.0, timeout, address, size, True, True
        )
        if status != _native.FINISHED:
            self._raise("all_reduce", status, timeout)

    def start_all_reduce_plain(
        self, tensor: torch.Tensor, dtype_code: int, reduce_op: int, timeout: float
    ) -> ShmPending | None:
        address, size = tensor.data_ptr(), tensor.nbytes
        group = self._group
        if group is None:
            self._raise("all_reduce", _native.LEFT, timeout)
        started = group.start_single(
            tensor,
            _ALL_REDUCE,
            reduce_op,
            NO_ROOT,
            dtype_code,
            tensor.numel(),
            0,
            1.0,
            timeout,
            address,
            size,
            True,
            True,
        )
        if started == _native.FINISHED:
            return None
        return self._pending(group, started, "all_reduce", timeout, [])

    def run(self, call: Call, timeout: float) -> None:
        single = _single(call, timeout)
        if single is not None:
            status = self._run_single(*single)
            if status != _native.FINISHED:
                self._raise(call.op, status, timeout)
            return
        arguments, kept, copies = self._prepare(call, timeout)
        group = self._group
        status = _native.LEFT if group is None else group.run(*arguments)
        del kept
        if status != _native.FINISHED:
            self._raise(call.op, status, timeout)
        if copies:
            copy_back(copies)
        if self._copying and call.op == "barrier":
            self.settle_copies()

    def start(self, call: Call, timeout: float) -> ShmPending | None:
        group = self._group
        if group is None:
            self._raise(call.op, _native.LEFT, timeout)
        single = _single(call, timeout)
        copies: Copies = []
        if single is not None:
            started = group.start_single(call, *single)
        else:
            arguments, kept, copies = self._prepare(call, timeout)
            started = group.start(kept, *arguments)
        if started == _native.FINISHED:
            if copies:
                copy_back(copies)
            if self._copying and call.op == "barrier":
                self.settle_copies()
            return None
        return self._pending(group, started, call.op, timeout, copies)

    def start_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float, dtype_code: int
    ) -> ShmPending | None:
        group = self._group
        if group is None:
            self._raise("send" if sends else "recv", _native.LEFT, timeout)
        memory, layout = tensor, 0
        if not dtype_code:
            memory = plain_tensor(tensor)
            dtype_code = _dtype_code(tensor.dtype, 0)
            layout = 0 if dtype_code else zlib.crc32(str(tensor.dtype).encode())
        started = group.message(
            memory, sends, peer, tag, dtype_code, layout, memory.numel(), timeout, memory.data_ptr(), memory.nbytes
        )
        copies = [] if sends or memory is tensor else [(tensor, memory)]
        if started == _FINISHED:
            if copies:
                copy_back(copies)
            return None
        return self._pending(group, started, "send" if sends else "recv", timeout, copies)

    def settle_copies(self) -> None:
        """Copies back what calls before have written."""
        for pending in self._copying.copy():
            if pending.ended:
                pending.finish()

    def _prepare(self, call: Call, timeout: float) -> tuple[tuple[Any, ...], Any, Copies]:
        """The arguments for the native core, what must be kept until it is done, and what to copy back then."""
        inputs, input_copies = plain(call.inputs)
        outputs, output_copies = plain(call.outputs)
        if input_copies and call.op in IN_PLACE_OPS and outputs is not None:
            outputs, output_copies = inputs, input_copies
        spans_in, spans_out = spans_of(inputs), spans_of(outputs)
        if overlap(call, spans_in, spans_out, self._info.rank):
            assert inputs is not None
            inputs = like(inputs, [clone(tensor) for tensor in inputs.tensors])
            spans_in = spans_of(inputs)
        arguments = (
            _OP_NUMBERS[call.op],
            call.reduce_op,
            call.root,
            _dtype_code(call.dtype, 0),
            call.count,
            _layout(call),
            call.factor,
            timeout,
            *spans_in,
            *spans_out,
        )
        return arguments, (inputs, outputs), output_copies

    def _pending(
        self, group: _native.Group, started: int | _native.Pending, op: str, timeout: float, copies: Copies
    ) -> ShmPending:
        if isinstance(started, int):
            raise failures.explain(group, self._info, op, started, timeout)
        pending = ShmPending(self, group, self._info, started, op, timeout, copies)
        if copies:
            self._copying.append(pending)
        return pending

    def forget_copies(self, pending: ShmPending) -> None:
        self._copying.remove(pending)

    def _raise(self, op: str, status: int, timeout: float) -> NoReturn:
        raise failures.explain(self._group, self._info, op, status, timeout)


class ShmPending:
    """A call under way in the native core, whose handle keeps what the call reads and writes."""

    __slots__ = (
        "_copies",
        "_error",
        "_group",
        "_info",
        "_native",
        "_op",
        "_plain",
        "_settled",
        "_timeout",
        "_transport",
    )

    def __init__(
        self,
        transport: ShmTransport,
        group: _native.Group,
        info: GroupInfo,
        native: _native.Pending,
        op: str,
        timeout: float,
        copies: Copies,
    ) -> None:
        self._transport = transport
        self._group: _native.Group | None = group
        self._info = info
        self._native: _native.Pending | _Over = native
        self._op = op
        self._timeout = timeout
        self._copies = copies
        self._settled = False
        # Nothing remains to be done when it has finished.
        self._plain = not copies and op != "barrier"
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self._native.result != _native.PENDING

    @property
    def source(self) -> int:
        return self._native.source

    def notify(self, token: int) -> bool:
        return self._native.notify(token)

    def wait(self, timeout: float | None) -> bool:
        result = self._native.wait(_FOREVER if timeout is None else timeout)
        if result == _FINISHED and self._plain:
            return True
        if result == _native.PENDING:
            return False
        self.settle()
        return True

    def explain_waiting(self, seconds: float) -> CallTimeout:
        return failures.still_under_way(self._info, self._op, self._native.seq, seconds, self._native.missing())

    def settle(self) -> None:
        self.finish()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """`settle` without raising."""
        if self._settled or (self._plain and self._native.result == _native.FINISHED):
            return
        with _settling:
            if self._settled:
                return
            status = self._native.result
            if status != _native.FINISHED:
                self._error = failures.explain(
                    self._group, self._info, self._op, status, self._timeout, self._native.seq
                )
            try:
                if self._error is None and self._copies:
                    copy_back(self._copies)
            except Exception as error:
                self._error = error
            if self._copies:
                self._transport.forget_copies(self)
            self._copies = []
            self._settled = True
            # A call that is over does not keep the group's memory mapped.
            self._native = _Over(self._native)
            self._group = None
        if self._op == "barrier" and self._error is None:
            self._transport.settle_copies()


class _Over:
    """What is left of a native call that has ended."""

    __slots__ = ("result", "seq", "source")

    def __init__(self, native: _native.Pending | _Over) -> None:
        self.result: int = native.result
        self.seq: int = native.seq
        self.source: int = native.source

    def wait(self, timeout: float) -> int:
        return self.result

    def notify(self, token: int) -> bool:
        return False

    def missing(self) -> list[int]:
        return []


def _renew_lock() -> None:
    global _settling
    _settling = threading.RLock()


# A thread that a forked child does not have may have held it.
os.register_at_fork(after_in_child=_renew_lock)


def _closed(*_: object) -> int:
    return _native.LEFT


def _single(call: Call, timeout: float) -> tuple[Any, ...] | None:
    """The arguments of a call of one plain tensor, read, written or both; None for others."""
    inputs, outputs = call.inputs, call.outputs
    blocks = inputs or outputs
    if call.op not in _SINGLE_OPS or blocks is None or len(blocks.tensors) != 1:
        return None
    tensor = blocks.tensors[0]
    dtype = _dtype_code(call.dtype, 0)
    if not tensor.is_contiguous() or tensor.is_neg() or (dtype in _COMPLEX and tensor.is_conj()):
        return None
    return (
        _OP_NUMBERS[call.op],
        call.reduce_op,
        call.root,
        dtype,
        call.count,
        call.layout if dtype else _layout(call),
        call.factor,
        timeout,
        tensor.data_ptr(),
        tensor.nbytes,
        inputs is not None,
        outputs is not None,
    )


def _layout(call: Call) -> int:
    """How the elements are divided, and, for the dtypes that have no code of their own, which dtype they are."""
    if call.dtype is None or call.dtype in DTYPE_CODES:
        return call.layout
    return zlib.crc32(f"{call.dtype} {call.layout}".encode())
