"""Ranks that run when they like, in real time: the schedule "free"."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.testing.scheduling import LONG, Nap, Scheduling, Strand, Timer, Waitable

__all__ = ["Free"]

# Seconds after which a rank that waits for a time to come shows that it does.
_BETWEEN_STEPS = 0.1


class Free(Scheduling):
    """All ranks at once. Deadlocks are found here as well: all wait, and no timer is pending.

    The lock is held for moments only. With it held only `_gate` is taken, and with that one only the lock of a future.
    """

    def __init__(self, size: int, on_deadlock: Callable[[], None], on_point: Callable[[int, int], None] | None) -> None:
        super().__init__(size, on_deadlock, on_point)
        self._changed = threading.Condition()
        self._begun = threading.Event()
        # Since when all wait but for threads out of reach, and how many steps were made until then.
        self._stalled = -1, 0.0

    @property
    def current(self) -> int:
        """A rank that runs."""
        # A dead rank that was left behind seems to run. It is not the one that the run waits for.
        strands = self._unwinding[:] or self._strands
        running = (strand for strand in strands if not (strand.waits_for or strand.parked or strand.has_ended))
        return next((strand.rank for strand in running), 0)

    @property
    def current_thread(self) -> int:
        """Its own thread, as Python numbers threads."""
        return self._strands[self.current].ident

    def enter(self, rank: int) -> None:
        self._be(rank)
        self._begun.wait()
        self._check_abandoned()

    def leave(self) -> None:
        try:
            self._come()
        finally:
            self._note_end(self._strands[self.rank])
        with self._changed:
            self.num_steps += 1
            self._look_for_the_end()
            self._changed.notify_all()

    def _end_helper(self, me: Strand) -> None:
        self._notify()

    def _rouse(self) -> None:
        self._notify()

    def _come(self) -> Strand:
        """This thread comes to communicate: its strand."""
        me = self._strand()
        self._outside.discard(me.native_id)
        self._check_abandoned()
        self._check_alive(me)
        return me

    def now(self) -> float:
        return time.monotonic()

    def point(self, *what: Any) -> None:
        self.num_steps += 1
        self.pause()
        self._come_to_point(self.rank, what)

    def pause(self) -> None:
        # Whoever looks again and again does not get on by that.
        me = self._come()
        os.sched_yield()
        self._receive(me)
        # All other ranks may wait, and nobody else looks at the timers.
        self._expire()

    def step(self) -> None:
        """No-op: ranks already run concurrently."""

    def yield_turn(self) -> None:
        """No-op: ranks already run concurrently."""

    def sleep(self, seconds: float) -> None:
        self.wait(Nap(), seconds)

    def park(self) -> None:
        me = self._come()
        with self._changed:
            self._dead.add(me.rank)
            self._outside.discard_all_of(me.rank)
            self._look_for_the_end()
            self._changed.notify_all()
        self._check_alive(me)

    def wait(self, awaited: Waitable, timeout: float | None) -> bool:
        until = None if timeout is None else self.now() + timeout
        while True:
            me = self._come()
            self._receive(me)
            self._expire()
            if awaited.ended or (until is not None and self.now() >= until):
                return awaited.ended
            self._wait_for_change(me, awaited, until)

    def _wait_for_change(self, me: Strand, awaited: Waitable, until: float | None) -> None:
        """Until something may have changed."""
        with self._changed:
            if awaited.ended or me.inbox or me.interrupt or self._abandoned or me.rank in self._dead:
                return
            me.waits_for, me.until = awaited, until
            while self._timers and self._timers[0][2].is_over():
                heapq.heappop(self._timers)
            out_of_reach = None if self._timers else self._running_out_of_reach()
            if out_of_reach is not None and not self._somebody_may_come(out_of_reach):
                # With the lock held: whoever is awake already would find the same, and tell all a second time.
                self._on_deadlock()
                me.waits_for = None
                return
            times = ([] if until is None else [until]) + [time for time, _, _ in self._timers[:1]]
            if times:
                # Whoever waits for a time to come gets on.
                self.num_steps += 1
                self._changed.wait(max(0.0, min(min(times) - self.now(), _BETWEEN_STEPS)))
            else:
                # Nobody says so when a thread that has communicated comes to wait out of reach.
                looks_again = out_of_reach is not None or self._has_helpers
                self._changed.wait(_BETWEEN_STEPS if looks_again else None)
            # Whatever it does next, it does not wait.
            me.waits_for = None

    def _running_out_of_reach(self) -> list[Strand] | None:
        """Where all ranks wait: the strands that may wait for others of their rank; None: a rank can go on."""
        running = []
        waiting = set()
        for strand in self._strands:
            if strand.has_ended or strand.rank in self._dead:
                continue
            if strand.waits_for is None:
                running.append(strand)
            elif strand.until is not None or strand.waits_for.ended or strand.inbox or strand.interrupt:
                return None
            else:
                waiting.add(strand.rank)
        return running if all(strand.rank in waiting for strand in running) else None

    def _somebody_may_come(self, running: list[Strand]) -> bool:
        """Whether one of these, or of the threads that have not communicated yet, may do so."""
        known = {strand.native_id for strand in running}
        for strand in running:
            if strand.native_id not in self._outside:
                self._outside.add(strand.native_id, strand.rank)
        self._look_for_beginners()
        if self._num_starting:
            return True
        if not self._outside:
            return False
        if self._stalled[0] != self.num_steps:
            self._stalled = self.num_steps, self.now()
        limits, of_strangers, since = self._limits(), self._limits_of_strangers(), self._stalled[1]
        may_come = self._outside.may_come(since, lambda thread: limits if thread in known else of_strangers)
        return may_come or self.now() - since < LONG

    def _expire(self) -> None:
        due = []
        with self._changed:
            while self._timers and self._timers[0][0] <= time.monotonic():
                due.append(heapq.heappop(self._timers)[2])
        for timer in due:
            if not timer.is_over():
                timer.expire()
        if due:
            self._notify()

    def at(self, seconds: float, expire: Callable[[], None], is_over: Callable[[], bool]) -> None:
        if seconds != float("inf"):
            with self._changed:
                entry = (time.monotonic() + seconds, next(self._numbers), Timer(expire, is_over))
                heapq.heappush(self._timers, entry)

    def wake(self, awaited: Waitable) -> None:
        self._notify()

    def happened(self) -> None:
        self.num_steps += 1
        self._notify()

    def call_as(self, rank: int, callback: Callable[[], None]) -> None:
        self._strands[rank].inbox.append(callback)
        self._notify()

    def begin(self) -> None:
        self._begun.set()

    def abandon(self, error: BaseException) -> None:
        self._abandoned = error
        self._begun.set()
        for strand in self._strands:
            if strand.parked:
                strand.interrupt = error
                self._wake_up(strand)
        self._notify()

    def interrupt(self, rank: int, error: BaseException) -> None:
        self._interrupt(rank, error)
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _look_for_the_end(self) -> None:
        if all(strand.has_ended or strand.rank in self._dead for strand in self._strands[: self.size]):
            self.all_ended.set()
