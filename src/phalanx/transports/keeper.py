"""Hears of calls that have ended while nobody waits for them.

Python threads, started when they are first needed. They complete futures, which runs whatever was chained to them, and
keep the memory of calls whose Work was dropped until they are done with it. The native progress thread only puts a
number into a queue for them, so that they may be as slow as the callbacks are. While one runs a callback another waits
for the next call to end: a callback may wait for the future of another call.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from phalanx import _native

__all__ = ["keep", "stop"]

_logger = logging.getLogger("phalanx")
_NAME = "phalanx-keeper"
# Two, so that no thread has to be started for one call after another.
_MOST_IDLE = 2
# Seconds that `stop` gives to callbacks that are running.
_PATIENCE = 1.0

_tokens = itertools.count(1)
_kept: dict[int, Callable[[], None]] = {}


class _Crew:
    """How many of the threads have nothing to do. Each counts itself: whoever starts one may be interrupted."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.idle = 0
        self.hurried = False


_crew = _Crew()


class Notifying(Protocol):
    """A call that the native core carries out."""

    @property
    def ended(self) -> bool: ...
    def notify(self, token: int) -> bool:
        """Asks for the token when the call ends. False: it has ended already, or was asked before."""


def keep(pending: Notifying, on_end: Callable[[], None]) -> None:
    """Calls `on_end` when the call has ended: at once if it has, else in a thread. Keeps all that it refers to."""
    token = next(_tokens)
    _kept[token] = on_end
    if pending.notify(token):
        _ensure_idle()
    else:
        del _kept[token]
        if pending.ended:
            on_end()


def stop(exiting: bool = False) -> None:
    """Ends the threads when they have done what is there to do. They start again when they are needed.

    Where the process ends they have to end before the interpreter does, which would end them half-way, and with them
    the process: then they leave undone what they can't do in time.
    """
    if not _threads():
        return
    _native.close_completions(True)
    if not _join() and exiting:
        _crew.hurried = True
        _join()
    _native.close_completions(False)
    # Somebody may have wanted to hear of a call while nobody listened.
    if _kept and not exiting:
        _ensure_idle()


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
    while token := _native.next_completion():
        on_end = _kept.pop(token)
        with crew.lock:
            crew.idle -= 1
        try:
            if _kept:
                _ensure_idle()
        except RuntimeError:
            # No more threads to be had: the next call's end is heard of when this one's callbacks are through.
            pass
        try:
            on_end()
        except Exception:
            _logger.exception("what was to follow the end of a call failed")
        # What it refers to is not to wait for the next one.
        del on_end
        with crew.lock:
            if crew.idle >= _MOST_IDLE or crew.hurried:
                return
            crew.idle += 1
    with crew.lock:
        crew.idle -= 1


def _forget_after_fork() -> None:
    global _crew
    _kept.clear()
    _crew = _Crew()


os.register_at_fork(after_in_child=_forget_after_fork)
