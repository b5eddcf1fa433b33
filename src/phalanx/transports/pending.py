"""Calls under way in the native core."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from phalanx import _native
from phalanx.errors import CallTimeout
from phalanx.transports import failures, keeper, limits
from phalanx.transports.copying import CallCopies, CopiesInFlight
from phalanx.types import GroupInfo

__all__ = ["ShmPending"]

_FOREVER = -1.0
_FINISHED = _native.FINISHED
_PENDING = _native.PENDING


class ShmPending:
    """A call under way in the native core, whose handle keeps what the call reads and writes.

    Any thread may ask at any time, and no lock is taken here: each step may be done twice. The group's owner of copies
    brings back what the call wrote to copies.
    """

    __slots__ = (
        "__weakref__",
        "_copies",
        "_failures",
        "_group",
        "_info",
        "_is_delivered",
        "_is_done_when_finished",
        "_native",
        "_owner",
        "_timeout",
        "op",
    )

    def __init__(
        self,
        owner: CopiesInFlight,
        group: _native.GroupEnd,
        info: GroupInfo,
        native: _native.CallHandle,
        op: str,
        timeout: float,
        copies: CallCopies | None,
    ) -> None:
        self._owner = owner
        self._group: _native.GroupEnd | None = group
        self._info = info
        self._native: _native.CallHandle | _Over = native
        self._timeout = timeout
        self._copies = copies
        self._is_delivered = False
        self._is_done_when_finished = copies is None and op != "barrier"
        # The first one counts: several threads may find out at the same time.
        self._failures: list[Exception] = []
        self.op = op

    @property
    def ended(self) -> bool:
        return self._native.result != _PENDING

    def poll(self) -> bool:
        return self._native.poll() != _PENDING

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
        is_done = self._is_delivered or (self._is_done_when_finished and result == _FINISHED)
        if not (is_done or result == _native.FORKED):
            keeper.keep_dropped(self, self._deliver_dropped)

    def make_future(self, wait: Callable[[], None]) -> Future[Any]:
        return Future()

    def wait(self, timeout: float | None) -> bool:
        result = self._native.wait(_FOREVER if timeout is None else timeout)
        if result == _FINISHED and self._is_done_when_finished:
            return True
        if result == _PENDING:
            return False
        self.deliver_or_raise()
        return True

    def now(self) -> float:
        return time.monotonic()

    def explain_waiting(self, seconds: float) -> CallTimeout:
        group, missing = self._group, self._native.missing()
        return failures.still_under_way(group, self._info, self.op, self._native.seq, seconds, missing)

    def deliver_or_raise(self) -> None:
        self.deliver()
        if self._failures:
            # Without the frames of earlier waits.
            raise self._failures[0].with_traceback(None)

    def deliver(self) -> None:
        if self._is_delivered or (self._is_done_when_finished and self._native.result == _FINISHED):
            return
        self._note_failure()
        if self._copies is not None:
            self._owner.bring_back(self._copies)
        self._let_go()
        if self.op == "barrier" and not self._failures:
            self._owner.bring_back_ended()

    def _deliver_dropped(self) -> None:
        """`deliver`, where nobody waits for it. The garbage collector may come here: it must not wait for a lock."""
        self._note_failure()
        if self._copies is not None:
            self._owner.bring_back_dropped(self._copies)
        self._let_go()

    def _note_failure(self) -> None:
        group, status = self._group, self._native.result
        if status == _FINISHED or group is None or self._failures:
            return
        try:
            error: Exception = failures.explain(group, self._info, self.op, status, self._timeout, self._native.seq)
        except Exception as problem:
            error = problem
        self._failures.append(error)

    def _let_go(self) -> None:
        """A call that is over does not keep the group's memory mapped."""
        copies = self._copies
        if copies is not None and copies.error is not None:
            self._failures.append(copies.error)
        self._is_delivered = True
        self._native = _Over(self._native)
        self._group = None


class _Over:
    """What is left of a native call that has ended."""

    __slots__ = ("result", "seq", "source")

    def __init__(self, native: _native.CallHandle | _Over) -> None:
        self.result: int = native.result
        self.seq: int = native.seq
        self.source: int = native.source

    def wait(self, timeout: float) -> int:
        return self.result

    def poll(self) -> int:
        return self.result

    def notify(self, token: int) -> bool:
        return False

    def missing(self) -> list[int]:
        return []
