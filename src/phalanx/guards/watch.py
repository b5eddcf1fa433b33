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
from typing import Any, NamedTuple

from phalanx import _native
from phalanx.group.torch_compat.replacing import has_plain_groups
from phalanx.guards.calls import GuardedCalls, UnderWay
from phalanx.log import logger
from phalanx.transports import waits
from phalanx.transports.slowness import slow_seconds

__all__ = ["forget", "look_after"]

_NAME = "phalanx-guard"
_BETWEEN_LOOKS = 0.25
# Seconds that the engine gets for a call all of whose ranks had come, one of which is gone now.
_PATIENCE = 0.4
# Seconds that a group that is left waits for a look that is under way.
_LONGEST_LOOK = 5.0
# The names of threads of backends begin so. They carry on the backends' calls.
_HELPERS = ("pt_gloo", "gloo_tcp_loop", "pt_nccl")

_guarded: weakref.WeakSet[GuardedCalls] = weakref.WeakSet()
# Waits that are known to the search for deadlocks, by thread and the identity of the engine's work.
_entered: weakref.WeakKeyDictionary[GuardedCalls, dict[tuple[int, int], tuple[int, UnderWay]]] = (
    weakref.WeakKeyDictionary()
)
# Works of engines whose slowness was logged, by their identity.
_told: weakref.WeakKeyDictionary[GuardedCalls, dict[int, Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Watch(NamedTuple):
    """The thread, and how it is told to end. Another one may begin before this one has ended."""

    thread: threading.Thread
    stopped: threading.Event


_watch: _Watch | None = None


def look_after(calls: GuardedCalls) -> None:
    global _watch
    with _lock:
        _guarded.add(calls)
        if _watch is None or not _watch.thread.is_alive():
            stopped = threading.Event()
            _watch = _Watch(threading.Thread(target=_run, args=(stopped,), name=_NAME, daemon=True), stopped)
            _watch.thread.start()


def forget(calls: GuardedCalls) -> None:
    """The group is left. With the last one, the thread ends."""
    global _watch
    with _lock:
        _guarded.discard(calls)
        ending, _watch = (_watch, None) if not _guarded else (None, _watch)
        if ending is not None:
            ending.stopped.set()
    if ending is not None and ending.thread is not threading.current_thread():
        # It may be asking absent ranks where they are.
        ending.thread.join(_LONGEST_LOOK)
    _drop(calls)


def _drop(calls: GuardedCalls) -> None:
    _told.pop(calls, None)
    for token, _ in _entered.pop(calls, {}).values():
        waits.leave(token)


def _run(stopped: threading.Event) -> None:
    while not stopped.wait(_BETWEEN_LOOKS):
        for calls in list(_guarded):
            try:
                _look(calls)
            except Exception:
                logger.exception("group %r is no longer watched", calls.info.name)
                _guarded.discard(calls)
            if calls not in _guarded:
                # Left during the look.
                _drop(calls)


def _look(calls: GuardedCalls) -> None:
    waited = {thread: UnderWay(*fields) for thread, fields in list(calls.waits.items())}
    known = {id(call.engines) for call in waited.values()}
    in_flight = [call for call in _prune(calls) if id(call.engines) not in known]
    now = time.monotonic()
    _enter_long_waits(calls, [*waited.items(), *((waits.NO_THREAD, call) for call in in_flight)], now)
    slow = slow_seconds()
    for call in (*waited.values(), *in_flight):
        age = now - call.began
        if calls.posted.is_broken:
            return
        if age > _PATIENCE:
            _look_for_deaths(calls, call)
        if age > calls.timeout:
            _look_for_timeout(calls, call)
    # Last: this asks absent ranks where they are.
    told = _told.setdefault(calls, {})
    for call in (*waited.values(), *in_flight):
        is_slow = slow and now - call.began > slow
        if is_slow and id(call.engines) not in told and calls.find_missing(call.call, call.seq):
            told[id(call.engines)] = call.engines
            _tell_slow(calls, call, slow)
    for number in told.keys() - known - {id(call.engines) for call in in_flight}:
        del told[number]


def _enter_long_waits(calls: GuardedCalls, found: list[tuple[int, UnderWay]], now: float) -> None:
    """For the search for deadlocks: waits that last, and calls that nobody waits for by a work of ours."""
    long = {(thread, id(call.engines)): call for thread, call in found if now - call.began > waits.LONG}
    entered = _entered.setdefault(calls, {})
    for key in entered.keys() - long.keys():
        waits.leave(entered.pop(key)[0])
    new = long.keys() - entered.keys()
    if new:
        # Threads of a backend may let others go on, unless every call of theirs is known.
        waits.set_helpers(() if has_plain_groups() else _HELPERS)
    for key in new:
        # With the call: another one may not have its number.
        entered[key] = _enter(calls, long[key], key[0]), long[key]


def _enter(calls: GuardedCalls, found: UnderWay, thread: int) -> int:
    call, seq = found.call, found.seq
    is_message = call.op in _native.MESSAGE_OPS

    def absent() -> list[int]:
        return [] if found.has_ended else calls.find_missing(call, seq)

    return waits.enter(
        calls.posted,
        call.op,
        seq,
        absent,
        is_any=is_message and call.peer < 0,
        peer=call.peer if is_message else -1,
        tag=call.tag if is_message else 0,
        where=calls.posted.place_of(call, seq),
        thread=thread,
    )


def _prune(calls: GuardedCalls) -> list[UnderWay]:
    """The calls that are under way. Those that have ended are forgotten, and noted as ended."""
    left = []
    for _ in range(len(calls.under_way)):
        with contextlib.suppress(IndexError):
            reference = calls.under_way.popleft()
            work = reference()
            if work is None or work.ended:
                continue
            if work.engines.is_completed():
                # Where the host waits, whoever waits notes it.
                if work.seq and not calls.waits_on_host(work.call):
                    calls.note_end(work, well=work.engines.is_success())
                continue
            calls.under_way.append(reference)
            left.append(UnderWay(work.call, work.seq, work.engines, work.began))
    return left


def _look_for_deaths(calls: GuardedCalls, work: UnderWay) -> None:
    lost = calls.find_lost(work.call, work.seq)
    if lost is not None:
        calls.posted.fail_by_end(lost, work.call, work.seq)


def _look_for_timeout(calls: GuardedCalls, work: UnderWay) -> None:
    """Where the host waits, the engine itself gives up, and with the timeout of the call."""
    missing = calls.find_missing(work.call, work.seq)
    if missing and not calls.waits_on_host(work.call):
        calls.posted.fail_by_timeout(missing, work.call, work.seq)


def _tell_slow(calls: GuardedCalls, work: UnderWay, slow: float) -> None:
    info = calls.info
    head = f"{work.call.op}, seq {work.seq}, group {info.name!r}, rank {info.rank}"
    lines = calls.describe_missing(work.call, work.seq)
    logger.warning("%s", "\n".join([f"{head}: has waited for {slow:g} s", *lines]))


def _forget_after_fork() -> None:
    global _guarded, _entered, _told, _lock, _watch
    _guarded, _entered, _told = weakref.WeakSet(), weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
    _lock, _watch = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_after_fork)
