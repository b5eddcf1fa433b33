"""Whose turn it is: one rank runs at a time, and hands over only where it communicates.

A run is a function of the program and of the choices made among the ranks that can go on. Time is virtual: it stands
still while anybody can run, and jumps to the next timer when all wait. When there is no timer either, nobody will ever
go on: that is a deadlock, and it is found at once.

Threads that ranks have started run outside of the turns until they communicate. Such a thread waits for its turn then.
A thread that has the turn may wait for another one of its rank outside of our reach (in `Thread.join`, say), and that
one may be waiting for its turn, or in a call. So threads that wait look at the one that has the turn; if it sleeps,
they take the turn from it, and choose who goes on, as if it had come to wait for a call. A rank that starts a thread
and waits for it is as repeatable as one that makes the calls itself.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.errors import GroupError
from phalanx.testing.outside import Limits, Outside
from phalanx.testing.schedules import Policy
from phalanx.testing.scheduling import LONG, Nap, Scheduling, Strand, Timer, Waitable
from phalanx.transports.threads import WAIT_FOR_THREADS

__all__ = ["Turns"]

# Who looks so often, while nothing happens, looks in vain. Where it only waits for real time to go by it gets a second.
_MANY_LOOKS = 1000
# Seconds between two looks of a thread that waits for its turn at the one that has it, where ranks have several.
_BETWEEN_LOOKS = 0.005
# How long a thread that has the turn, and does not communicate, keeps it from other threads of its rank that are ready,
# or that wait in calls. One that naps does not wait for the latter.
_FOR_READY = Limits(polling=LONG, computing=float("inf"))
_FOR_WAITING = Limits(polling=LONG, computing=float("inf"), napping=float("inf"))
# How long other threads of its rank, which may come to communicate, are waited for before the turn is taken from it.
_FOR_OTHERS = Limits(polling=LONG, computing=LONG)
# How long threads that have never communicated are waited for when all ranks have ended: one that computes may be about
# to make a call, which its rank should have waited for.
_AT_THE_END = Limits(polling=0.0, computing=0.1)


class _Alarm:
    """Ends a wait. Once it rang, or was set off because the wait is over, it does nothing."""

    rang = False


class _Watch:
    """What threads that wait see of the one that has the turn, from its last coming on."""

    def __init__(self, holder: Strand) -> None:
        self.holder = holder
        self.num_arrivals = holder.num_arrivals
        self.since = time.monotonic()
        self._threads = Outside()
        self._threads.add(holder.native_id)

    @property
    def is_over(self) -> bool:
        return self.holder.num_arrivals != self.num_arrivals or self.holder.has_ended

    def goes_on(self, limits: Limits) -> bool:
        """Whether it does something by itself."""
        return self._threads.may_come(self.since, lambda _: limits, lambda: self.is_over)


class Turns(Scheduling):
    """One rank at a time, in virtual time.

    `on_switch(rank, enters)` is called in a rank's thread when its turn ends or begins.
    """

    def __init__(
        self,
        size: int,
        policy: Policy,
        on_deadlock: Callable[[], None],
        on_switch: Callable[[int, bool], None],
        on_point: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(size, on_deadlock, on_point)
        self._policy = policy
        self._on_switch = on_switch
        self._ready = self._strands[:]
        self._time = 0.0
        self._waiting: dict[int, list[Strand]] = {}
        # The strand whose turn it is, unless the last one that had it looks for the next one.
        self._holder = self._strands[0]
        self._is_choosing = True
        # Held by the one thread that looks at it.
        self._looking = threading.Lock()
        self._watch = _Watch(self._holder)
        # What may end something that somebody polls for, and how many poll in vain.
        self._num_events = 0
        self._num_in_vain = 0

    # For ranks, in their own threads.

    @property
    def current(self) -> int:
        """The rank whose turn it is."""
        return self._holder.rank

    @property
    def current_thread(self) -> int:
        """The thread that has the turn, as Python numbers threads."""
        return self._holder.ident

    def enter(self, rank: int) -> None:
        """First of all, in a rank's thread: waits for its turn."""
        self._be(rank)
        self._take_turn(self._strands[rank])
        self._on_switch(rank, True)

    def leave(self) -> None:
        """Last of all: the rank does not run any more."""
        self._check_abandoned()
        me = self._strands[self.rank]
        try:
            self._arrive()
            self.num_steps += 1
            self._on_switch(me.rank, False)
        finally:
            self._note_end(me)
        self._give_turn(self._choose())
        # Of all threads that could look at one which keeps the turn for ever this may be the last.
        while self._has_helpers:
            if self.all_ended.wait(_BETWEEN_LOOKS):
                break
            self._check_abandoned()
            self._look()

    def _arrive(self) -> Strand:
        """This thread comes to communicate: its strand, once that has the turn."""
        me = self._strand()
        while True:
            self._check_alive(me)
            with self._gate:
                # Another thread may have killed the rank since the check.
                if me.rank in self._dead:
                    continue
                me.num_arrivals += 1
                if self._holder is me:
                    return me
                if self.all_ended.is_set():
                    raise GroupError(
                        "expected a call from a thread of a rank before the run has ended, got one afterwards",
                        code="GROUP:CLOSED",
                        rank=me.rank,
                        hint=WAIT_FOR_THREADS,
                    )
                # In this order: a thread that looks sees it in one of the two.
                self._ready.append(me)
                self._outside.discard(me.native_id)
                break
        self._take_turn(me)
        self._on_switch(me.rank, True)
        return me

    def _sleep(self, me: Strand) -> None:
        if not self._has_helpers or me.parked:
            super()._sleep(me)
        elif not me.turn.acquire(timeout=_BETWEEN_LOOKS):
            self._look()

    def _look(self) -> None:
        """At the thread that has the turn, in one that does not: whether it is to go to another one."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            rank = self._take_over()
        finally:
            self._looking.release()
        if rank is not None:
            chosen = next((ready for ready in self._ready if ready.rank == rank), None)
            if chosen is None:
                self._on_switch(rank, False)
            self._give_turn(self._choose(chosen))

    def _take_over(self) -> int | None:
        """Takes the turn from a thread that sleeps, or polls, while others of its rank wait: it waits for them.

        Returns the rank. Then the caller has to choose who goes on.
        """
        holder = self._holder
        if self._watch.holder is not holder or self._watch.is_over:
            self._watch = _Watch(holder)
        watch, limits = self._watch, self._limits_of(holder)
        if self._is_choosing or limits is None or watch.goes_on(limits):
            return None
        self._look_for_beginners()
        if self._num_starting or self._outside.may_come(watch.since, lambda _: _FOR_OTHERS, rank=holder.rank):
            return None
        with self._gate:
            if self._is_choosing or self._holder is not holder or watch.is_over:
                return None
            # This thread has the turn until it has chosen: what happens meanwhile may communicate.
            self._holder = self._strand()
            self._is_choosing = True
            self._outside.add(holder.native_id, holder.rank)
        return holder.rank

    def _limits_of(self, holder: Strand) -> Limits | None:
        """None: it does not wait for another thread of its rank."""
        if any(ready.rank == holder.rank for ready in self._ready[:]):
            return _FOR_READY
        # A thread that a rank has started may also wait for the next thing to do, for ever.
        others_wait = any(strand.waits_for is not None for strand in self._of(holder.rank))
        return _FOR_WAITING if others_wait or holder is not self._strands[holder.rank] else None

    def _rouse(self) -> None:
        for strand in self._strands:
            strand.end_sleep()

    def _end_helper(self, me: Strand) -> None:
        if self._abandoned is not None or me.rank in self._dead:
            return
        own = self._strands[me.rank]
        with self._gate:
            if self._holder is not me:
                self._outside.discard(me.native_id)
                return
            # Most likely it waited for this thread, and goes on. If not, the turn is taken from it.
            goes_back = own.native_id in self._outside
            if goes_back:
                self._outside.discard(own.native_id)
                own.num_arrivals += 1
                self._holder = own
            else:
                self._is_choosing = True
        if not goes_back:
            self._on_switch(me.rank, False)
            self._give_turn(self._choose())

    def now(self) -> float:
        return self._time

    def point(self, *what: Any) -> None:
        """The rank is about to make a call: others may go first."""
        self._check_abandoned()
        me = self._arrive()
        self._num_events += 1
        self.num_steps += 1
        if self._policy.at_calls:
            self.pause()
        else:
            self._receive(me)
        self._come_to_point(me.rank, what)

    def pause(self) -> None:
        me = self._arrive()
        if me.polled_at != self._num_events:
            me.num_looks, me.polls_since = 0, time.monotonic()
        me.num_looks += 1
        me.polls_in_vain = me.num_looks >= _MANY_LOOKS
        me.polled_at = self._num_events
        self._ready.append(me)
        self._num_in_vain += me.polls_in_vain
        try:
            self._let_others(me)
        finally:
            self._num_in_vain -= me.polls_in_vain
            me.polls_in_vain = False

    def step(self) -> None:
        """Others may go first, where the policy has them do so before each call."""
        if self._policy.at_calls:
            self.yield_turn()

    def yield_turn(self) -> None:
        """Others may go first. The rank does not look for anything: it counts as getting on."""
        self._num_events += 1
        self.pause()

    def sleep(self, seconds: float) -> None:
        """Until so much time has gone by."""
        self.wait(Nap(), seconds)

    def park(self) -> None:
        """The rank is dead: none of its threads goes on before all others have ended, and then only to its end."""
        me = self._arrive()
        with self._gate:
            self._dead.add(me.rank)
            self._outside.discard_all_of(me.rank)
            for strand in self._of(me.rank):
                self._bury(strand)
        self._on_switch(me.rank, False)
        self._give_turn(self._choose())
        self._take_turn(me)

    def _bury(self, strand: Strand) -> None:
        """A strand of a dead rank, if it does not run, does not go on of itself."""
        is_ready = strand in self._ready
        if not (strand is self._holder or is_ready or strand.waits_for is not None):
            return
        strand.parked = True
        if is_ready:
            self._ready.remove(strand)
            self._num_in_vain -= strand.polls_in_vain
            strand.polls_in_vain = False
        waiting = self._waiting.get(id(strand.waits_for), [])
        if strand in waiting:
            waiting.remove(strand)
        strand.waits_for = None

    def wait(self, awaited: Waitable, timeout: float | None) -> bool:
        me = self._arrive()
        alarm = None if timeout is None else self._set_alarm(me, awaited, timeout)
        self._receive(me)
        while not awaited.ended and not (alarm is not None and alarm.rang):
            me.waits_for = awaited
            self._waiting.setdefault(id(awaited), []).append(me)
            try:
                self._let_others(me)
            finally:
                me.waits_for = None
                if me in self._waiting.get(id(awaited), ()):
                    self._waiting[id(awaited)].remove(me)
        if alarm is not None:
            alarm.rang = True
        return awaited.ended

    def _set_alarm(self, strand: Strand, awaited: Waitable, timeout: float) -> _Alarm:
        alarm = _Alarm()

        def ring() -> None:
            alarm.rang = True
            self._wake_strand(strand, awaited)

        self.at(timeout, ring, lambda: awaited.ended or alarm.rang)
        return alarm

    # For groups, in any rank's thread.

    def at(self, seconds: float, expire: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Calls `expire` when so much time has gone by, unless it is over by then."""
        if seconds != float("inf"):
            heapq.heappush(self._timers, (self._time + seconds, next(self._numbers), Timer(expire, is_over)))

    def wake(self, awaited: Waitable) -> None:
        self._num_events += 1
        for strand in self._waiting.pop(id(awaited), ()):
            self._ready.append(strand)

    def happened(self) -> None:
        """Something that a rank may look for."""
        self._num_events += 1
        self.num_steps += 1

    def call_as(self, rank: int, callback: Callable[[], None]) -> None:
        """In a thread of the rank, when one waits or communicates next; one that waits goes on for it."""
        self._num_events += 1
        self._strands[rank].inbox.append(callback)
        self._wake_strands(rank)

    # For the world.

    def begin(self) -> None:
        self._give_turn(self._choose())

    def abandon(self, error: BaseException) -> None:
        """Nobody has a turn any more: whoever comes to communicate, or waits to, goes on with an exception."""
        self._abandoned = error
        for strand in self._strands:
            if strand is not self._holder:
                self._wake_up(strand)

    def interrupt(self, rank: int, error: BaseException) -> None:
        """The rank, if it waits, goes on with an exception."""
        self._interrupt(rank, error)
        self._wake_strands(rank)

    def _wake_strands(self, rank: int) -> None:
        for strand in self._of(rank):
            if strand.waits_for is not None:
                self._wake_strand(strand, strand.waits_for)

    def _wake_strand(self, strand: Strand, awaited: Waitable) -> None:
        waiting = self._waiting.get(id(awaited), [])
        if strand in waiting:
            waiting.remove(strand)
            self._ready.append(strand)

    def _let_others(self, me: Strand) -> None:
        self._check_abandoned()
        chosen = self._choose()
        if chosen is not me:
            self._on_switch(me.rank, False)
            self._give_turn(chosen)
            self._take_turn(me)
            self._on_switch(me.rank, True)
        self._receive(me)

    def _resumes(self, rank: int) -> None:
        super()._resumes(rank)
        self._on_switch(self.current, False)
        self._on_switch(rank, True)
        self._holder = self._strands[rank]

    def _give_turn(self, chosen: Strand | None) -> None:
        if chosen is not None:
            self._wake_up(chosen)

    def _choose(self, chosen: Strand | None = None) -> Strand | None:
        """Which strand goes on: one that is ready. None where there is none left: all have ended."""
        self._is_choosing = True
        while not self._ready or (self._num_in_vain and self._num_in_vain == len(self._ready)):
            self._look_for_beginners()
            if not self._ready and self._somebody_comes(0.0):
                break
            if self._jump():
                self._num_events += 1
                for strand in self._ready:
                    strand.polls_in_vain = False
                self._num_in_vain = 0
            elif self._ready and not self._polled_for_long():
                break
            elif self._ready or any(strand.waits_for is not None for strand in self._strands):
                if self._ready or not self._somebody_comes(LONG):
                    self._on_deadlock()
                break
            elif not self._main_is_outside() and self._has_ended():
                return None
        if not self._ready:
            raise RuntimeError("nobody can go on, and nobody was told")
        with self._gate:
            if chosen is not None:
                index = self._ready.index(chosen)
            else:
                index = 0
                if len(self._ready) > 1:
                    index = self._policy.choose(len(self._ready))
                    self.choices.append(index)
            self._holder = self._ready.pop(index)
            self._is_choosing = False
        return self._holder

    def _has_ended(self) -> bool:
        """Whether nobody has come meanwhile. From then on nobody comes."""
        with self._gate:
            if not self._ready:
                self.all_ended.set()
            return not self._ready

    def _somebody_comes(self, seconds: float) -> bool:
        """Whether one of the threads outside comes to communicate: as long as one is worth waiting for, or for some
        seconds."""
        since = time.monotonic()
        limits = self._limits()
        limits_of_strangers = self._limits_of_strangers() if self._is_awaited() else _AT_THE_END

        def limits_of(thread: int) -> Limits:
            return limits if thread in self._known else limits_of_strangers

        while not self._ready and (self._outside or self._num_starting):
            self._check_abandoned()
            self._look_for_beginners()
            may_come = self._outside.may_come(since, limits_of, lambda: bool(self._ready))
            if self._num_starting:
                os.sched_yield()
                continue
            if not may_come and time.monotonic() >= since + seconds:
                break
        return bool(self._ready)

    def _is_awaited(self) -> bool:
        """Whether a rank waits for something that a thread outside may do."""
        if any(strand.waits_for is not None for strand in self._strands):
            return True
        return any(strand.native_id in self._outside for strand in self._strands[: self.size])

    def _main_is_outside(self) -> bool:
        """Whether a rank's own thread sleeps where it is out of reach. If so it is the one to blame."""
        for strand in self._strands[: self.size]:
            if strand.native_id in self._outside:
                self._holder = strand
                return True
        return False

    def _polled_for_long(self) -> bool:
        """All that could go on look in vain: whether for so long that no time that goes by will help."""
        return time.monotonic() - max(strand.polls_since for strand in self._ready) > LONG

    def _jump(self) -> bool:
        """To the next timer that is not over; False: there is none."""
        while self._timers:
            time, _, timer = heapq.heappop(self._timers)
            if not timer.is_over():
                self._time = max(self._time, time)
                timer.expire()
                return True
        return False
