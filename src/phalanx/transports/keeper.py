"""Hears of calls that have ended while nobody waits for them.

Python threads, started when they are first needed. They complete futures, which runs whatever was chained to them, and
keep the memory of calls whose Work was dropped until they are done with it. The native progress thread only puts a
number into a queue for them, so that they may be as slow as the callbacks are. While one runs a callback another waits
for the next call to end: a callback may wait for the future of another call.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from phalanx import _native
from phalanx.log import logger
from phalanx.transports import limits

__all__ = ["begin", "expect", "forget", "keep", "keep_dropped", "stop"]

_NAME = "phalanx-keeper"
_START = "starting the thread that completes futures"
_UNTIL_THEN = "memory of dropped calls is kept until a thread can be started"
# Two, so that no thread has to be started for one call after another.
_MOST_IDLE = 2
# With so many calls in flight their ends are gathered for a moment: a thread that takes the GIL for each of them slows
# down the program that makes them.
_MANY = 16
# Seconds that `stop` gives to callbacks that are running.
_PATIENCE = 1.0

_tokens = itertools.count(1)
_kept: dict[int, Callable[[], None]] = {}
# Likewise, for news that may never come.
_expected: dict[int, Callable[[], None]] = {}


class _Crew:
    """How many of the threads have nothing to do. Each counts itself: whoever starts one may be interrupted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle = 0
        self.hurried = False
        # Whether there is a group: without one no thread is started that nobody would end.
        self.is_open = False


_crew = _Crew()


class Notifying(Protocol):
    """A call that the native core carries out."""

    @property
    def ended(self) -> bool: ...
    def notify(self, token: int) -> bool:
        """Asks for the token when the call ends. False: it has ended already, or was asked before."""


def keep(pending: Notifying, on_end: Callable[[], None]) -> None:
    """Calls `on_end` when the call has ended: at once if it has, else in a thread. Keeps all that it refers to.

    Raises RuntimeError where no thread can be started; then it may be called again.
    """
    token = next(_tokens)
    _kept[token] = on_end
    # First: a call takes one token only.
    if not pending.ended:
        try:
            _ensure_idle()
        except RuntimeError as error:
            if not _threads():
                del _kept[token]
                raise
            limits.warn(_START, error, _UNTIL_THEN)
    if not pending.notify(token):
        del _kept[token]
        if pending.ended:
            on_end()


def keep_dropped(pending: Notifying, on_end: Callable[[], None]) -> None:
    """Calls `on_end` in a thread when the call has ended, also if it has. Keeps all that it refers to.

    The garbage collector may come here from anywhere, whatever locks its thread holds. So this takes none, and calls
    nothing that takes one: another thread does. Where none can be started, all is kept until one can. Once all groups
    were left there is nobody to meet here, and it is done at once.
    """
    token = next(_tokens)
    _kept[token] = on_end
    if not pending.notify(token):
        if not pending.ended or not _crew.is_open:
            del _kept[token]
            if pending.ended:
                on_end()
            return
        _native.push_completion(token)
    try:
        _ensure_idle()
    except RuntimeError as error:
        limits.warn(_START, error, _UNTIL_THEN)


def expect(on_news: Callable[[], None]) -> int:
    """A token that the native core gives back once, from a thread of its own; `on_news` is called then, in a thread.

    Raises RuntimeError where no thread can be started.
    """
    _ensure_idle()
    token = next(_tokens)
    _expected[token] = on_news
    return token


def forget(token: int) -> None:
    """It will not come any more."""
    _expected.pop(token, None)


def begin() -> None:
    """This process is in a group. Threads start when they are needed."""
    _crew.is_open = True


def stop(exiting: bool = False) -> None:
    """Ends the threads when they have done what is there to do. They start again when they are needed.

    Where the process ends they have to end before the interpreter does, which would end them half-way, and with them
    the process: then they leave undone what they can't do in time.
    """
    # Where news is expected there still is a group.
    _crew.is_open = bool(_expected) and not exiting
    if not _threads():
        return
    _native.close_completions(True)
    if not _join() and exiting:
        _crew.hurried = True
        _join()
    _native.close_completions(False)
    # Somebody may have wanted to hear of a call while nobody listened.
    if (_kept or _expected) and not exiting:
        try:
            _ensure_idle()
        except RuntimeError as error:
            limits.warn(_START, error, _UNTIL_THEN)


def _join() -> bool:
    deadline = time.monotonic() + _PATIENCE
    while threads := _threads():
        if time.monotonic() > deadline:
            return False
        # One that is about to start can't be joined yet.
        with contextlib.suppress(RuntimeError):
            threads[0].join(max(0.0, deadline - time.monotonic()))
        os.sched_yield()
    return True


def _threads() -> list[threading.Thread]:
    here = threading.current_thread()
    return [thread for thread in threading.enumerate() if thread.name == _NAME and thread is not here]


def _ensure_idle() -> None:
    if _crew.idle == 0:
        threading.Thread(target=_run, name=_NAME, daemon=True).start()


def _run() -> None:
    crew = _crew
    with crew.lock:
        # Those who were busy when this one was started may be idle by now.
        if crew.idle >= _MOST_IDLE:
            return
        crew.idle += 1
    took = False
    while token := _native.next_completion(took, len(_kept) >= _MANY):
        took = True
        on_end = _kept.pop(token, None) or _expected.pop(token, None)
        if on_end is None:
            continue
        with crew.lock:
            crew.idle -= 1
        try:
            if _kept or _expected:
                _ensure_idle()
        except RuntimeError:
            # No more threads to be had: the next call's end is heard of when this one's callbacks are through.
            pass
        try:
            on_end()
        except Exception:
            logger.exception("a completion callback raised an exception")
        # What it refers to is not to wait for the next one.
        del on_end
        with crew.lock:
            leaves = crew.idle >= _MOST_IDLE or crew.hurried
            crew.idle += not leaves
        if leaves:
            _native.leave_completions()
            return
    with crew.lock:
        crew.idle -= 1


def _forget_after_fork() -> None:
    global _crew
    _kept.clear()
    _expected.clear()
    _crew = _Crew()


os.register_at_fork(after_in_child=_forget_after_fork)
