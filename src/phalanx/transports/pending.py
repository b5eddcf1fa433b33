"""Calls under way in the native core, and the copies through which they write to tensors of any form."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.futures import Future

from phalanx import _native
from phalanx.errors import CallTimeout
from phalanx.memory import meet, touches
from phalanx.transports import failures, keeper, limits
from phalanx.transports.spans import Copies, copy_back, same_view
from phalanx.types import GroupInfo

__all__ = ["Copying", "ShmPending"]

_FOREVER = -1.0
_FINISHED = _native.FINISHED
_PENDING = _native.PENDING
# Held while a call that has ended is settled: by whoever comes first, and nobody goes on before that is done. Settling
# may collect garbage, and that may settle other calls.
_settling = threading.RLock()


class ShmPending:
    """A call under way in the native core, whose handle keeps what the call reads and writes."""

    __slots__ = (
        "__weakref__",
        "_copying",
        "_error",
        "_group",
        "_info",
        "_native",
        "_plain",
        "_settled",
        "_timeout",
        "copies",
        "op",
    )

    def __init__(
        self,
        copying: Copying,
        group: _native.Group,
        info: GroupInfo,
        native: _native.Pending,
        op: str,
        timeout: float,
        copies: Copies,
    ) -> None:
        self._copying = copying
        self._group: _native.Group | None = group
        self._info = info
        self._native: _native.Pending | _Over = native
        self._timeout = timeout
        self._settled = False
        # Nothing remains to be done when it has finished.
        self._plain = not copies and op != "barrier"
        self._error: Exception | None = None
        self.op = op
        self.copies = copies

    @property
    def ended(self) -> bool:
        return self._native.result != _PENDING

    @property
    def is_over(self) -> bool:
        """`ended`, for one who is in no hurry to see it end."""
        return self._native.is_over

    @property
    def source(self) -> int:
        return self._native.source

    def notify(self, token: int) -> bool:
        return self._native.notify(token)

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        try:
            keeper.keep(self, callback)
        except RuntimeError as error:
            step = f"the thread that completes the future of {self.op}"
            raise limits.group_error(self._info, step, error, limits.of_threads()) from None

    def drop(self) -> None:
        result = self._native.result
        # Nothing is left to be done for most calls that have ended, and a forked child has none of the calls.
        if not (self._settled or result == _native.FORKED or (self._plain and result == _FINISHED)):
            keeper.keep_dropped(self, self.finish)

    def make_future(self, wait: Callable[[], None]) -> Future[Any]:
        return Future()

    def wait(self, timeout: float | None) -> bool:
        result = self._native.wait(_FOREVER if timeout is None else timeout)
        if result == _FINISHED and self._plain:
            return True
        if result == _PENDING:
            return False
        self.settle()
        return True

    @property
    def is_message(self) -> bool:
        return self.op in ("send", "recv")

    def wait_and_finish(self) -> None:
        """For the sake of another call: a failure is told to those who wait for this one."""
        self._native.wait(_FOREVER)
        self.finish()

    def now(self) -> float:
        return time.monotonic()

    def explain_waiting(self, seconds: float) -> CallTimeout:
        group, missing = self._group, self._native.missing()
        return failures.still_under_way(group, self._info, self.op, self._native.seq, seconds, missing)

    def settle(self) -> None:
        self.finish()
        if self._error is not None:
            # Not with the frames of those who were told before.
            raise self._error.with_traceback(None)

    def finish(self) -> None:
        if self._settled or (self._plain and self._native.result == _FINISHED):
            return
        # Before the lock: peers may be asked, and other groups are not to wait for their answers.
        explained = self._explain()
        with _settling:
            self._copying.settle(before=self)
            # Settling may collect garbage, and that may settle this very call.
            if self._settled or self._group is None:
                return
            try:
                if explained is not None:
                    self._error = explained
                elif self.copies:
                    copy_back(self.copies)
            except Exception as error:
                self._error = error
            self._settled = True
            self._copying.forget(self)
            self.copies = []
            # A call that is over does not keep the group's memory mapped.
            self._native = _Over(self._native)
            self._group = None
        if self.op == "barrier" and self._error is None:
            self._copying.settle()

    def _explain(self) -> Exception | None:
        group, status = self._group, self._native.result
        if status == _FINISHED or group is None:
            return None
        try:
            return failures.explain(group, self._info, self.op, status, self._timeout, self._native.seq)
        except Exception as error:
            return error


class Copying:
    """What the collectives of a group that are in flight will write, and the copies of messages.

    The core carries out the collectives of a group in order, so that all it reads and writes is in order. Two things
    happen at other times, in Python: a call copies tensors that do not lie in plain memory when it is made, and what it
    wrote to copies of its outputs comes back when somebody looks, after it has ended. Hence the invariant: as long as a
    collective is in flight, all memory that the core writes for it is in `writing`, copies included, and all tensors
    that its copies come back to are in `calls`. Whoever is about to read memory here (`catch_up`), or to hand memory to
    the core (`make_way`), waits for the calls that have yet to write it. What calls read needs no record: nobody writes
    it before they have ended but the core, in order, and copies, which come back in the order of the calls.

    Messages and other groups are in no order with these calls: a program waits before it uses their tensors elsewhere.
    """

    __slots__ = ("calls", "writing")

    def __init__(self) -> None:
        # Calls and messages with copies, until what they wrote is where it belongs.
        self.calls: list[ShmPending] = []
        # Collectives, and the memory that the core writes for them, as addresses from and to. Not kept by this.
        self.writing: deque[tuple[weakref.ref[ShmPending], Sequence[tuple[int, int]]]] = deque()

    def add(self, call: ShmPending) -> None:
        """A call or a message with copies, which is in flight."""
        self.calls.append(call)

    def add_writing(self, call: ShmPending, written: Sequence[tuple[int, int]]) -> None:
        """A collective that is in flight."""
        writing = self.writing
        while writing and _is_over(writing[0][0]):
            writing.popleft()
        writing.append((weakref.ref(call), written))

    def settle(self, before: ShmPending | None = None, messages: bool = True) -> None:
        """Copies back what calls have written that have ended: all of them, or those before one."""
        for call in self.calls.copy():
            if call is before:
                return
            if (messages or not call.is_message) and call.ended:
                call.finish()
                self.forget(call)

    def forget(self, call: ShmPending) -> None:
        if call in self.calls:
            self.calls.remove(call)

    def make_way(self, tensors: Iterable[torch.Tensor]) -> Copies:
        """Before a call with these tensors: what they hold, or will hold when the calls before have ended.

        A call that takes the very same tensor as one before can use the copy, which the core reads and writes in order.
        One that takes another view of the same memory waits until the copy is back in it.
        """
        tensors = list(tensors)
        self.settle(messages=False)
        while (call := self._last_in_the_way(tensors)) is not None:
            # Collectives end in order: those before it have ended, too.
            call.wait_and_finish()
            self.settle(messages=False)
        return [
            (tensor, copy)
            for tensor in tensors
            for call in self.calls.copy()
            for written, copy in ([] if call.is_message else call.copies)
            if same_view(tensor, written)
        ]

    def _last_in_the_way(self, tensors: list[torch.Tensor]) -> ShmPending | None:
        """The last collective in flight that has a copy of the memory of these tensors under another view."""
        for call in reversed(self.calls.copy()):
            for written, _ in [] if call.is_message else call.copies:
                if any(not same_view(tensor, written) and meet(tensor, written) for tensor in tensors):
                    return call
        return None

    def catch_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Before these tensors are read here: waits for the collectives in flight that write to them."""
        for tensor in tensors:
            for reference, written in self.writing.copy():
                call = reference()
                if call is not None and any(touches(tensor, start, end) for start, end in written):
                    call.wait_and_finish()
            for call in self.calls.copy():
                if not call.is_message and any(meet(tensor, written) for written, _ in call.copies):
                    call.wait_and_finish()


def _is_over(reference: weakref.ref[ShmPending]) -> bool:
    call = reference()
    return call is None or call.is_over


class _Over:
    """What is left of a native call that has ended."""

    __slots__ = ("result", "seq", "source")

    def __init__(self, native: _native.Pending | _Over) -> None:
        self.result: int = native.result
        self.seq: int = native.seq
        self.source: int = native.source

    @property
    def is_over(self) -> bool:
        return True

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
