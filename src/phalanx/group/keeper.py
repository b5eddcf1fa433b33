"""Hears of calls that have ended while nobody waits for them.

One Python thread a process, started when it is first needed. It completes futures, which runs whatever was chained to
them, and keeps the memory of calls whose Work was dropped until they are done with it. The native progress thread only
puts a number into a queue for it, so that this one may be as slow as the callbacks are.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable

from phalanx import _native
from phalanx.transports.base import Pending

__all__ = ["keep", "stop"]

_logger = logging.getLogger("phalanx")
# Seconds that `stop` gives to callbacks that are running.
_PATIENCE = 1.0

_tokens = itertools.count(1)
_kept: dict[int, Callable[[], None]] = {}
_lock = threading.Lock()
_thread: threading.Thread | None = None


def keep(pending: Pending, on_end: Callable[[], None]) -> None:
    """Calls `on_end` when the call has ended: at once if it has, else in the thread. Keeps all that it refers to."""
    token = next(_tokens)
    _kept[token] = on_end
    if pending.notify(token):
        _ensure_thread()
    else:
        del _kept[token]
        on_end()


def stop() -> None:
    """Ends the thread when it has done what is there to do. It starts again when it is needed."""
    global _thread
    with _lock:
        thread, _thread = _thread, None
        if thread is None:
            return
        _native.close_completions()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)


def _ensure_thread() -> None:
    global _thread
    if _thread is not None:
        return
    with _lock:
        if _thread is None:
            thread = threading.Thread(target=_run, name="phalanx-keeper", daemon=True)
            thread.start()
            _thread = thread


def _run() -> None:
    while tokens := _native.next_completions():
        for token in tokens:
            try:
                _kept.pop(token)()
            except Exception:
                _logger.exception("what was to follow the end of a call failed")


def _forget_after_fork() -> None:
    global _lock, _thread
    _kept.clear()
    _lock = threading.Lock()
    _thread = None


os.register_at_fork(after_in_child=_forget_after_fork)
