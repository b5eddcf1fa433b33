"""Makes the transport of a group. Groups know no kind of transport: another kind joins here.

Each kind has a function that makes a transport, or returns None where the kind is not meant. They are asked in this
order: threads, if the calling thread is a rank of a run of threads; the kinds that were registered, the last one first;
shared memory, which is meant in all other cases.

A transport between processes may be put into wrappers: one that tells observers of calls, and those that tests bring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.transports import shm
from phalanx.transports.base import Exchange, Transport
from phalanx.transports.listing import Listing
from phalanx.transports.lookout import Known
from phalanx.transports.observed import ObservedTransport
from phalanx.transports.observers import are_calls_observed
from phalanx.transports.threads.here import this_thread
from phalanx.types import GroupInfo, Store

__all__ = ["Make", "Request", "Wrap", "join", "register", "registered", "split", "wrapped_with"]


@dataclass(frozen=True)
class Request:
    """A group that is to be made: its ranks meet through the store."""

    store: Store
    info: GroupInfo
    timeout: float
    # Groups of one scope meet by their members, others by their name as well.
    scope: str = ""
    # What the caller knows of the other ranks.
    known: Known | None = None


Make = Callable[[Request], Transport | None]
Wrap = Callable[[Transport, GroupInfo], Transport]


def _make_of_threads(request: Request) -> Transport | None:
    run = this_thread.run
    return None if run is None else run.join(request.store, request.info, request.timeout, request.scope)


def _make_of_processes(request: Request) -> Transport:
    return shm.join(request.store, request.info, request.timeout, request.scope, request.known)


_registered: Listing[Make] = Listing()
_wrappers: Listing[Wrap] = Listing()


def register(make: Make) -> None:
    """Asks `make` for the transports of groups that are made from now on."""
    _registered.change(lambda others: (make, *others))


@contextlib.contextmanager
def registered(make: Make) -> Iterator[None]:
    """Asks `make` for the transports of groups that are made in the context."""
    register(make)
    try:
        yield
    finally:
        _registered.remove(make)


@contextlib.contextmanager
def wrapped_with(wrap: Wrap) -> Iterator[None]:
    """Has `wrap` replace the transports between processes that are made in the context."""
    _wrappers.change(lambda others: (*others, wrap))
    try:
        yield
    finally:
        _wrappers.remove(wrap)


def join(request: Request) -> Transport:
    """Meets the other ranks of the group and makes this rank's transport."""
    for make in (_make_of_threads, *_registered):
        made = make(request)
        if made is not None:
            return _wrapped(made, request.info)
    return _wrapped(_make_of_processes(request), request.info)


def split(
    transport: Transport, info: GroupInfo | None, members: Sequence[int], propose: Exchange, exchange: Exchange
) -> Transport | None:
    """Makes smaller groups of the ranks of a transport, as `Transport.split` does."""
    made = transport.split(info, members, propose, exchange)
    return None if made is None or info is None else _wrapped(made, info)


def _wrapped(transport: Transport, info: GroupInfo) -> Transport:
    if not transport.spans_processes:
        return transport
    if are_calls_observed():
        transport = ObservedTransport(transport, info).as_transport()
    for wrap in _wrappers:
        transport = wrap(transport, info)
    return transport
