"""Calls under way in the native core, and the copies through which they write to tensors of any form."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import torch

from phalanx import _native
from phalanx.errors import CallTimeout
from phalanx.transports import failures
from phalanx.transports.spans import Copies, copy_back, extent, same_view
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
        if copies:
            copying.calls.append(self)

    @property
    def ended(self) -> bool:
        return self._native.result != _PENDING

    @property
    def source(self) -> int:
        return self._native.source

    def notify(self, token: int) -> bool:
        return self._native.notify(token)

    def wait(self, timeout: float | None) -> bool:
        result = self._native.wait(_FOREVER if timeout is None else timeout)
        if result == _FINISHED and self._plain:
            return True
        if result == _PENDING:
            return False
        self.settle()
        return True

    def explain_waiting(self, seconds: float) -> CallTimeout:
        return failures.still_under_way(self._info, self.op, self._native.seq, seconds, self._native.missing())

    def settle(self) -> None:
        self.finish()
        if self._error is not None:
            # Not with the frames of those who were told before.
            raise self._error.with_traceback(None)

    def finish(self) -> None:
        if self._settled or (self._plain and self._native.result == _FINISHED):
            return
        with _settling:
            if self._settled:
                return
            self._copying.settle(before=self)
            status = self._native.result
            try:
                if status != _FINISHED:
                    assert self._group is not None
                    self._error = failures.explain(
                        self._group, self._info, self.op, status, self._timeout, self._native.seq
                    )
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


class Copying:
    """The calls of a group that write to copies of tensors, until what they wrote is where it belongs.

    That happens when somebody looks, at a barrier at the latest, and in the order of the calls.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[ShmPending] = []

    def settle(self, before: ShmPending | None = None) -> None:
        """Copies back what calls have written that have ended: all of them, or those before one."""
        for call in self.calls.copy():
            if call is before:
                return
            if call.ended:
                call.finish()
                self.forget(call)

    def forget(self, call: ShmPending) -> None:
        if call in self.calls:
            self.calls.remove(call)

    def make_way(self, tensors: Iterable[torch.Tensor]) -> Copies:
        """Before a call with these tensors: what they hold, or will hold when the calls before have ended.

        Calls of a group are carried out in order, so that one that takes the very same tensor can use the copy. One
        that takes another view of the same memory has to wait until the copy is back in it.
        """
        stand_ins: Copies = []
        self.settle()
        for tensor in tensors:
            for call in self.calls.copy():
                if call.op in ("send", "recv"):
                    continue
                for written, copy in call.copies:
                    if same_view(tensor, written):
                        stand_ins.append((tensor, copy))
                    elif _touch(tensor, written):
                        call.wait(None)
                        return self.make_way(tensors)
        return stand_ins


def _touch(one: torch.Tensor, other: torch.Tensor) -> bool:
    (start, end), (other_start, other_end) = extent(one), extent(other)
    return start < other_end and other_start < end


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
