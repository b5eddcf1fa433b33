"""A transport around another one, which carries out the calls."""

from __future__ import annotations

from typing import Any, cast

from phalanx.transports.base import Pending, Transport

__all__ = ["PendingAround", "TransportAround"]


class TransportAround:
    """Has all that the other transport has, but for the native way of calls: all of them come here."""

    quick = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def as_transport(self) -> Transport:
        """This one, with the type that it has by delegation."""
        return cast(Transport, self)


class PendingAround:
    """The same for a call in flight."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def as_pending(self) -> Pending:
        return cast(Pending, self)
