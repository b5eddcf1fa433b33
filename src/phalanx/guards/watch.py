"""The thread that looks after guarded calls: which have ended, which take long, and whether a rank is gone.

One daemon thread per process, from the first guard to the last one. It looks a few times a second and asks the engine
only what costs nothing: a device is never waited for.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref

from phalanx.guards.calls import GuardedCalls
from phalanx.guards.work import GuardedWork
from phalanx.log import logger

__all__ = ["forget", "look_after"]

_NAME = "phalanx-guard"
_BETWEEN_LOOKS = 0.25
# Seconds that the engine gets for a call all of whose ranks had come, one of which is gone now.
_PATIENCE = 0.4

_guarded: weakref.WeakSet[GuardedCalls] = weakref.WeakSet()
_lock = threading.Lock()
_stopped = threading.Event()
_thread: threading.Thread | None = None


def look_after(calls: GuardedCalls) -> None:
    global _thread
    with _lock:
        _guarded.add(calls)
        if _thread is None or not _thread.is_alive():
            _stopped.clear()
            _thread = threading.Thread(target=_run, name=_NAME, daemon=True)
            _thread.start()


def forget(calls: GuardedCalls) -> None:
    """The group is left. With the last one, the thread ends."""
    global _thread
    with _lock:
        _guarded.discard(calls)
        thread, _thread = (_thread, None) if not _guarded else (None, _thread)
        if thread is not None:
            _stopped.set()
    if thread is not None and thread is not threading.current_thread():
        thread.join()


def _run() -> None:
    while not _stopped.wait(_BETWEEN_LOOKS):
        for calls in list(_guarded):
            try:
                _look(calls)
            except Exception:
                logger.exception("group %r is not looked after any more", calls.info.name)
                _guarded.discard(calls)


def _look(calls: GuardedCalls) -> None:
    under_way = _prune(calls)
    waited = [work for work in list(calls.waits.values()) if not work.ended]
    works = {id(work): work for work in (*under_way, *waited)}.values()
    now = time.monotonic()
    for work in works:
        age = now - work.began
        if calls.posted.is_broken:
            return
        if age > _PATIENCE:
            _look_for_deaths(calls, work)
        if age > calls.timeout:
            _look_for_timeout(calls, work)
        slow = _slow_seconds()
        if slow and age > slow and not work.told_slow and calls.find_missing(work.call, work.seq):
            work.told_slow = True
            _tell_slow(calls, work, slow)


def _prune(calls: GuardedCalls) -> list[GuardedWork]:
    """The works that are under way. Those that have ended are forgotten, and noted as ended."""
    left = []
    for _ in range(len(calls.under_way)):
        with contextlib.suppress(IndexError):
            reference = calls.under_way.popleft()
            work = reference()
            if work is None or work.ended:
                continue
            if work.engines.is_completed():
                # Where the host waits, whoever waits notes it.
                if work.seq and not calls.waits_on_host(work):
                    calls.note_end(work, well=work.engines.is_success())
                continue
            calls.under_way.append(reference)
            left.append(work)
    return left


def _look_for_deaths(calls: GuardedCalls, work: GuardedWork) -> None:
    lost = calls.find_lost(work.call, work.seq)
    if lost is None or not work.seq:
        return
    has_come = work.call.op not in ("send", "recv") and calls.posted.posted(lost) >= work.seq
    # It has made the call: what it was to do may have been done.
    if has_come and calls.posted.has_left_well(lost):
        return
    calls.posted.fail_by_end(lost, work.call, work.seq)


def _look_for_timeout(calls: GuardedCalls, work: GuardedWork) -> None:
    """Where the host waits, the engine itself gives up, and with the timeout of the call."""
    missing = calls.find_missing(work.call, work.seq)
    if missing and not calls.waits_on_host(work):
        calls.posted.fail_by_timeout(missing, work.call, work.seq)


def _tell_slow(calls: GuardedCalls, work: GuardedWork, slow: float) -> None:
    info = calls.info
    head = f"{work.call.op}, seq {work.seq}, group {info.name!r}, rank {info.rank}"
    lines = calls.describe_missing(work.call, work.seq)
    logger.warning("%s", "\n".join([f"{head}: has waited for {slow:g} s", *lines]))


def _slow_seconds() -> float:
    # Tests change it.
    try:
        return max(float(os.environ.get("PHALANX_SLOW") or 10.0), 0.0)
    except ValueError:
        return 10.0


def _forget_after_fork() -> None:
    global _guarded, _lock, _thread
    _guarded, _lock, _thread = weakref.WeakSet(), threading.Lock(), None


os.register_at_fork(after_in_child=_forget_after_fork)
