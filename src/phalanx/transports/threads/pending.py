"""A call under way, for the rank that made it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.futures import Future

from phalanx import _native
from phalanx.errors import CallTimeout, PhalanxError
from phalanx.transports.base import Scheduler
from phalanx.transports.threads.futures import SharedTurnFuture
from phalanx.transports.threads.hub import Hub
from phalanx.transports.threads.in_flight import InFlight, MessageInFlight

__all__ = ["ThreadsPending"]

_FINISHED, _PENDING = _native.FINISHED, _native.PENDING


class _Transport(Protocol):
    """The rank's end of the group (transport.py)."""

    hub: Hub
    scheduler: Scheduler

    @property
    def is_forked(self) -> bool: ...
    def forked(self, op: str) -> PhalanxError: ...
    def explain(self, in_flight: InFlight, timeout: float) -> PhalanxError: ...
    def explain_waiting(self, in_flight: InFlight, seconds: float) -> CallTimeout: ...


class ThreadsPending:
    """A call under way."""

    def __init__(self, transport: _Transport, in_flight: InFlight, timeout: float) -> None:
        self._transport = transport
        self._in_flight = in_flight
        self._timeout = timeout
        self._error: PhalanxError | None = None

    @property
    def ended(self) -> bool:
        return self._in_flight.ended or self._transport.is_forked

    def poll(self) -> bool:
        if not self.ended:
            self._transport.scheduler.pause()
        return self.ended

    @property
    def source(self) -> int:
        return self._in_flight.source if isinstance(self._in_flight, MessageInFlight) else _native.NO_RANK

    def wait(self, timeout: float | None) -> bool:
        if not self.ended and not self._transport.scheduler.wait(self._in_flight, timeout):
            return False
        self.deliver_or_raise()
        return True

    def now(self) -> float:
        return self._transport.scheduler.now()

    def explain_waiting(self, seconds: float) -> CallTimeout:
        return self._transport.explain_waiting(self._in_flight, seconds)

    def deliver(self) -> None:
        if self._error is not None or self._in_flight.result == _FINISHED:
            return
        if self._transport.is_forked:
            self._error = self._transport.forked(self._in_flight.op)
        elif self._in_flight.result != _PENDING:
            self._error = self._transport.explain(self._in_flight, self._timeout)

    def deliver_or_raise(self) -> None:
        self.deliver()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """In the rank's own thread."""
        with self._transport.hub.lock:
            ended = self._in_flight.ended
            if not ended:
                self._in_flight.callbacks = [*(self._in_flight.callbacks or ()), callback]
        if ended:
            callback()

    def drop(self) -> None:
        """No-op: the hub keeps what is under way."""

    def make_future(self, wait: Callable[[], None]) -> Future[Any]:
        scheduler, owner = self._transport.scheduler, self._in_flight.owner
        return SharedTurnFuture(wait, scheduler.pause, partial(scheduler.interrupt, owner))
