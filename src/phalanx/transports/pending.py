"""Calls under way in the native core, and the copies through which they write to tensors of any form."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from phalanx import _native
from phalanx.errors import CallTimeout
from phalanx.transports import failures, keeper, limits
from phalanx.transports.copying import Copying
from phalanx.transports.plain_memory import Copies, copy_back
from phalanx.types import GroupInfo

__all__ = ["ShmPending"]

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

    def poll(self) -> bool:
        return self.ended

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
        return self.op in _native.MESSAGE_OPS

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
            self._copying.settle_before(self)
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
