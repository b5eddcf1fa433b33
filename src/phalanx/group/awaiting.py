"""`await work`: an asyncio task waits for a call while the other tasks of its event loop run.

The keeper thread, which completes the future of the call, wakes the loop. Where ranks are threads, a loop that sleeps
would keep the turn: there the task checks in each round of the loop whether the call has ended, and each check lets
other ranks run.

A Work belongs to the first event loop that awaits it. A cancelled task does not end the call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import Any, Protocol, TypeVar

from torch.futures import Future

from phalanx.errors import InvalidCall
from phalanx.transports import threads

__all__ = ["Awaitable", "wait_in_loop"]

_Result = TypeVar("_Result", covariant=True)


class Awaitable(Protocol[_Result]):
    """What a task needs of a call, or of several, to await it."""

    def is_completed(self) -> bool: ...
    def result(self) -> _Result: ...
    def get_future(self) -> Future[Any]: ...


def wait_in_loop(work: Awaitable[_Result]) -> Generator[Any, None, _Result]:
    """The steps of a task that awaits the work. Returns its result, or raises what made it fail."""
    loop = _running_loop()
    # Atomic: another thread may do the same.
    if vars(work).setdefault("_loop", loop) is not loop:
        raise _refused(
            "expected the event loop that awaited this Work before, got another one",
            "await a Work in one event loop; other loops and threads may call its wait()",
        )
    if threads.this_thread.run is not None:
        while not work.is_completed():
            yield
    elif not work.is_completed():
        waiter = loop.create_future()
        work.get_future().add_done_callback(lambda _: _wake(loop, waiter))
        yield from waiter
    return work.result()


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise _refused(
            "expected an asyncio event loop that runs in this thread, got none",
            "await in a coroutine that asyncio.run runs, or call wait()",
        ) from None


def _refused(message: str, hint: str) -> InvalidCall:
    return InvalidCall(message, code="INVALID:LOOP", op="await", hint=hint)


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    """In any thread."""
    # A closed loop has no task to wake.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_end, waiter)


def _end(waiter: asyncio.Future[None]) -> None:
    # It may have been cancelled.
    if not waiter.done():
        waiter.set_result(None)
