"""The handles that calls return to torch."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from phalanx.errors import GroupError, PhalanxError
from phalanx.group.awaiting import wait_in_loop
from phalanx.group.timeouts import wait_seconds
from phalanx.group.torch_compat.autograd import in_backward
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.transports.base import Pending

__all__ = ["DONE", "NO_TIMEOUT", "Work", "Works"]

# What torch passes where none was given.
NO_TIMEOUT = timedelta(0)
# Seconds for one more look.
_LEAST = 1e-6
_MANY = 256
_Tensors = list[torch.Tensor]
# Held for a few assignments only; the garbage collector may come in between and want it, too.
_lock = threading.RLock()


@not_traced
class Work(TorchWork):
    """A call, under way or ended. `tensors` is what its future gives: the call's outputs.

    Without `pending` the call has finished. If a Work is dropped before its call has ended, the keeper keeps the memory
    of the call alive (`Pending.drop`).
    """

    _promise: Future[Any] | None = None
    _future: Future[Any] | None = None
    _kept: list[Work] | None = None

    def __init__(self, tensors: _Tensors, pending: Pending | None = None, source: int = -1) -> None:
        super().__init__()
        self._tensors = tensors
        self._pending = pending
        self._source = source

    @property
    def pending(self) -> Pending | None:
        """What is under way; None: the call has finished, and was waited for."""
        return self._pending

    def is_of_one_number(self) -> bool:
        """Whether its tensor is a number with memory of its own."""
        if len(self._tensors) != 1:
            return False
        tensor = self._tensors[0]
        return tensor.numel() == 1 and tensor.untyped_storage().nbytes() == tensor.itemsize

    def wait(self, timeout: timedelta | None = NO_TIMEOUT) -> bool:
        return self._wait(None if timeout is NO_TIMEOUT else wait_seconds(timeout))

    def _wait(self, seconds: float | None, limit: float | None = None) -> bool:
        """`limit` is the timeout of which an error speaks, where `seconds` are the rest of it."""
        pending = self._pending
        if pending is None:
            return True
        try:
            if not pending.wait(seconds):
                raise pending.explain_waiting(limit or seconds or 0.0)
        finally:
            if self._promise is not None and pending.ended:
                self._complete_future()
        # A call that has finished needs nothing of the group any more.
        if self._source < 0:
            self._source = pending.source
        self._pending = None
        if self._kept is not None:
            self._kept.clear()
        return True

    def keep(self) -> Callable[[], None]:
        """A function that waits for the call, later. The Work is kept until then, unless the call ends well before."""
        kept = self._kept = [self]

        def wait() -> None:
            while kept:
                kept.pop().wait()

        return wait

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        pending = self._pending
        if pending is None:
            return True
        if not pending.poll():
            return False
        # Whoever asks may look at the tensors next.
        pending.deliver()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        pending = self._pending
        if pending is None or not pending.poll():
            return None
        try:
            pending.deliver_or_raise()
        except Exception as error:
            # Its frames would know the future, which knows the error: a circle that no garbage collector sees.
            return error.with_traceback(None)
        return None

    def result(self) -> _Tensors:
        self.wait()
        return self._tensors

    def __await__(self) -> Generator[Any, None, _Tensors]:
        return wait_in_loop(self)

    def source_rank(self) -> int:
        """The rank whose message was received."""
        pending = self._pending
        return self._source if pending is None else pending.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Completed by whoever learns first that the call has ended: a wait, or the keeper."""
        with _lock:
            if self._future is not None:
                return self._future
            pending = self._pending
            promise: Future[Any] = Future() if pending is None else pending.make_future(self._wait_quietly)
            # An exception set on a future is read as an empty result by C++; one raised in a callback is not.
            self._future = promise if pending is None else promise.then(_outcome)
            self._promise = promise
        if pending is None:
            promise.set_result(self._tensors)
        else:
            self._complete_future_when_ended(pending)
        return self._future

    def _complete_future_when_ended(self, pending: Pending) -> None:
        try:
            pending.call_when_ended(self._complete_future)
        except GroupError:
            # No thread can be started to complete it. In a backward pass, the end of the pass waits for the call.
            if in_backward():
                return
            self._future = self._promise = None
            raise

    def _wait_quietly(self) -> None:
        """For one who waits for the future, which has the failure as well."""
        with contextlib.suppress(PhalanxError):
            self.wait()

    def _complete_future(self) -> None:
        """Once the call has ended: gives its outcome to the future, if there is one that has none."""
        with _lock:
            promise, self._promise = self._promise, None
        error = self.exception()
        if error is None and self._kept is not None:
            self._kept.clear()
        if promise is not None:
            promise.set_result(self._tensors if error is None else _Failed(error))

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # All calls have ended when the interpreter does, and what they are made of may be gone.
        pending = None if ends() else self._pending
        if pending is not None:
            pending.drop()


class _Done(Work):
    """The work of calls that have ended and of which nobody wants the result: shared, also by event loops."""

    def __await__(self) -> Generator[Any, None, _Tensors]:
        return self._tensors
        yield


DONE = _Done([])


@not_traced
class Works(TorchWork):
    """Several calls of one thread as one: what the coalescing manager waits for.

    Of many calls, `result` and `get_future` only have those that were still under way when the last ones came.
    """

    def __init__(self) -> None:
        super().__init__()
        self._works: list[Work] = []
        self._thread = threading.get_ident()

    def add(self, work: Work) -> None:
        if threading.get_ident() != self._thread:
            return
        self._works.append(work)
        # A manager that ended with an exception never asks for them: those that are done are not to pile up.
        if len(self._works) % _MANY == 0:
            self._works = [work for work in self._works if not work.is_success()]

    def wait(self, timeout: timedelta | None = NO_TIMEOUT) -> bool:
        seconds = wait_seconds(timeout)
        if seconds is None:
            return all(work.wait() for work in self._works)
        until: float | None = None
        for work in self._works:
            pending = work.pending
            if pending is not None:
                until = pending.now() + seconds if until is None else until
                work._wait(max(until - pending.now(), _LEAST), limit=seconds)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)

    def result(self) -> _Tensors:
        return [tensor for work in self._works for tensor in work.result()]

    def __await__(self) -> Generator[Any, None, _Tensors]:
        return wait_in_loop(self)

    def get_future(self) -> Future[Any]:
        futures = [work.get_future() for work in self._works]
        return collect_all(futures).then(lambda done: [t for future in done.value() for t in future.value()])


class _Failed:
    """The outcome of a call that did not finish."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _outcome(future: Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, _Failed):
        raise value.error
    return value


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A thread that a forked child does not have may have held it.
os.register_at_fork(after_in_child=_renew_lock)
