"""Observers are told what becomes of groups: they see groups come, fail and go, and the calls if they want to.

Any number of them may be registered. What they do with what they are told is their own business: an observer that
raises is switched off, with one line in the log, and the run goes on. Questions go to an adviser instead (advisers.py).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from phalanx.errors import PhalanxError
from phalanx.log import logger
from phalanx.transports.identities import Identity
from phalanx.transports.listing import Listing
from phalanx.types import GroupInfo

__all__ = ["Observer", "are_calls_observed", "observe", "observing", "tell"]


class Observer:
    """Sees nothing. An observer overrides what it wants to see."""

    # Whether it is told of calls. Groups that are made meanwhile carry out no call natively, which takes longer.
    wants_calls = False

    # The making of groups of processes.

    def coming(self, info: GroupInfo, venue: str, number: int, timeout: float) -> None:
        """This rank comes to a meeting, to make a group; `joined` or `not_made` follows.

        All ranks of the group know the meeting by its venue and its number there.
        """

    def expecting(self, info: GroupInfo, rank: int, identity: Identity) -> None:
        """The process with this identity was, or is, that rank of the group that is being made."""

    def not_made(self, info: GroupInfo, folder: str, error: BaseException) -> None:
        """The making of a group has failed on this rank; the others are about to be told.

        `folder` is what the first rank offers, as far as this rank knows.
        """

    def joined(self, transport: Any, info: GroupInfo, folder: str) -> None:
        """A group of processes was made, and has made no call. `folder` is what its first rank offers."""

    def renamed(self, transport: Any, info: GroupInfo) -> None:
        """The group has got the name that people know."""

    # Calls.

    def call_began(self, info: GroupInfo, op: str) -> None:
        """A thread of this rank enters a call, or begins to wait for one in flight. Only with `wants_calls`."""

    def call_ended(self, info: GroupInfo, op: str) -> None:
        """The thread comes back from it, in whatever way."""

    def started(self, info: GroupInfo, op: str, seq: int, inputs: Sequence[torch.Tensor]) -> None:
        """A call is about to be made, in a group whose calls are looked at closely (level full)."""

    # Ends.

    def failed(self, error: PhalanxError) -> None:
        """A group has failed on this rank; the error is about to be raised."""

    def raised(self, exception: BaseException, words: str) -> None:
        """No code has caught the exception. `words` are what peers will be told of it; empty: nothing."""

    def leaving(self, transport: Any) -> None:
        """The group is about to be left."""

    def left(self) -> None:
        """All groups were left, and the process goes on."""

    def ending(self) -> None:
        """The process ends; its groups are about to be left."""

    def exiting(self) -> None:
        """The process ends; all groups were left."""

    def switched_off(self) -> None:
        """This observer has raised, and is told nothing else from now on."""


_observers: Listing[Observer] = Listing()


def observe(observer: Observer) -> None:
    """Tells the observer what happens from now on."""
    _observers.change(lambda others: (*(one for one in others if one is not observer), observer))


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tells the observer what happens in the context."""
    observe(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def are_calls_observed() -> bool:
    """Whether an observer wants to be told of calls."""
    return any(one.wants_calls for one in _observers)


def _switch_off(observer: Observer, event: str, error: Exception) -> None:
    if observer not in _observers:
        return
    _observers.remove(observer)
    name = type(observer).__qualname__
    logger.warning("the observer %s raised in %s() and is switched off: %r", name, event, error, exc_info=error)
    with contextlib.suppress(Exception):
        observer.switched_off()


def _telling(event: str) -> Callable[..., None]:
    def tell_all(_: Observer, *args: Any) -> None:
        for observer in _observers:
            try:
                getattr(observer, event)(*args)
            except Exception as error:
                _switch_off(observer, event, error)

    return tell_all


_EVENTS = [name for name, _ in inspect.getmembers(Observer, inspect.isfunction) if name != "switched_off"]
# Takes the same events as an observer, and passes them on to all observers: `tell.left()`. Never raises.
tell: Observer = type("_Everybody", (Observer,), {event: _telling(event) for event in _EVENTS})()
