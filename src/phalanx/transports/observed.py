"""Calls whose beginnings and ends observers are told of.

Only groups that are made while an observer wants calls have this around their transport: others pay nothing for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from phalanx.transports.base import Pending, Transport
from phalanx.transports.observers import tell
from phalanx.transports.wrapping import PendingAround, TransportAround
from phalanx.types import Call, GroupInfo

__all__ = ["ObservedTransport"]


@contextlib.contextmanager
def _told(info: GroupInfo, op: str) -> Iterator[None]:
    tell.call_began(info, op)
    try:
        yield
    finally:
        tell.call_ended(info, op)


class ObservedTransport(TransportAround):
    """Tells of the calls of a transport, and of waits for calls in flight."""

    def __init__(self, transport: Transport, info: GroupInfo) -> None:
        super().__init__(transport)
        self._info = info

    def run(self, call: Call, timeout: float) -> None:
        with _told(self._info, call.op):
            self._transport.run(call, timeout)

    def start(self, call: Call, timeout: float) -> Pending | None:
        with _told(self._info, call.op):
            pending = self._transport.start(call, timeout)
        return self._watched(pending, call.op)

    def start_message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float) -> Pending | None:
        op = "send" if sends else "recv"
        with _told(self._info, op):
            pending = self._transport.start_message(sends, tensor, peer, tag, timeout)
        return self._watched(pending, op)

    def _watched(self, pending: Pending | None, op: str) -> Pending | None:
        return None if pending is None else _ObservedPending(pending, self._info, op).as_pending()


class _ObservedPending(PendingAround):
    def __init__(self, pending: Pending, info: GroupInfo, op: str) -> None:
        super().__init__(pending)
        self._info = info
        self._op = op

    def wait(self, timeout: float | None) -> bool:
        with _told(self._info, self._op):
            return self._pending.wait(timeout)
