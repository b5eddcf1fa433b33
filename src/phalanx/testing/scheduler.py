"""Whose turn it is: one rank runs at a time, and hands over only where it communicates.

A run is a function of the program and of the choices made among the ranks that can go on. Time is virtual: it stands
still while anybody can run, and jumps to the next timer when all wait. When there is no timer either, nobody will ever
go on: that is a deadlock, and it is found at once.

Threads that ranks have started run outside of the turns until they communicate. Such a thread waits for its turn then;
but if the turn is with another thread of its rank that sleeps outside of our reach (in `Thread.join`, say), it takes
the turn over. So a rank that starts a thread and waits for it is as repeatable as one that makes the calls itself.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any

from phalanx.errors import GroupError
from phalanx.testing.outside import Limits, Outside
from phalanx.testing.schedules import Policy
from phalanx.testing.scheduling import LONG, Interruption, Nap, Scheduling, Strand, Timer, Waitable
from phalanx.transports.threads import WAIT_FOR_THREADS

__all__ = ["Turns"]

# Who looks so often, while nothing happens, looks in vain. Where it only waits for real time to go by it gets a second.
_MANY_LOOKS = 1000
# Seconds between two looks of a thread that waits for its turn at the one that has it, where ranks have several.
_BETWEEN_LOOKS = 0.005
# How long a thread that has the turn, and does not communicate, keeps it from other threads of its rank.
_HOLDER = Limits(polling=LONG, computing=float("inf"))
# How long threads that have never communicated are waited for when all ranks have ended: one that computes may be about
# to make a call, which its rank should have waited for.
_AT_THE_END = Limits(polling=0.0, computing=0.1)


class _Alarm:
    """Ends a wait. Once it rang, or was set off because the wait is over, it does nothing."""

    rang = False


class _Watch:
    """One thread's look at another that has the turn."""

    def __init__(self, holder: Strand) -> None:
        self.holder = holder
        self.num_arrivals = holder.num_arrivals
        self._since = time.monotonic()
        self._threads = Outside()
        self._threads.add(holder.native_id)

    def goes_on(self, me: Strand) -> bool:
        """Whether that one does something, or this one need not look any longer."""
        return self._threads.may_come(self._since, lambda _: _HOLDER, lambda: me.has_turn)


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
        self._ready = list(range(size))
        self._time = 0.0
        self._waiting: dict[int, list[int]] = {}
        # The strand whose turn it is, unless whoever had it looks for the next one.
        self._holder = 0
        self._is_choosing = True
        # What may end something that somebody polls for, and how many poll in vain.
        self._num_events = 0
        self._num_in_vain = 0

    # For ranks, in their own threads.

    @property
    def current(self) -> int:
        """The rank whose turn it is."""
        return self._strands[self._holder].rank

    @property
    def current_thread(self) -> int:
        """The thread that has the turn, as Python numbers threads."""
        return self._strands[self._holder].ident

    def enter(self, rank: int) -> None:
        """First of all, in a rank's thread: waits for its turn."""
        self._be(rank)
        self._take_turn(self._strands[rank])
        self._on_switch(rank, True)

    def leave(self) -> None:
        """Last of all: the rank does not run any more."""
        self._check_abandoned()
        self._arrive()
        self.num_steps += 1
        self._on_switch(self.rank, False)
        self._give_turn(self._choose())

    def _arrive(self) -> int:
        """This thread comes to communicate: its strand, once that has the turn."""
        number = self._number()
        me = self._strands[number]
        with self._gate:
            me.num_arrivals += 1
            if self._holder == number:
                return number
            if self.all_ended.is_set():
                raise GroupError(
                    "expected a call from a thread of a rank before the run has ended, got one afterwards",
                    code="GROUP:CLOSED",
                    rank=me.rank,
                    hint=WAIT_FOR_THREADS,
                )
            # In this order: whoever looks sees it in one of the two.
            self._ready.append(number)
            self._outside.discard(me.native_id)
        self._take_turn(me)
        self._on_switch(me.rank, True)
        return number

    def _take_turn(self, me: Strand) -> None:
        watch: _Watch | None = None
        while len(self._strands) > self.size and not me.has_turn:
            self._check_abandoned()
            try:
                if me.turn.acquire(timeout=_BETWEEN_LOOKS):
                    break
                holder = self._strands[self._holder]
                if watch is None or watch.holder is not holder or watch.num_arrivals != holder.num_arrivals:
                    watch = _Watch(holder)
                if self._take_over(me, watch):
                    break
            except Interruption:
                # It was meant for the rank when it still had the turn.
                continue
        super()._take_turn(me)

    def _take_over(self, me: Strand, watch: _Watch) -> bool:
        """From a thread of the same rank that has the turn, but sleeps or polls: most likely it waits for this one."""
        holder = watch.holder
        if self._is_choosing or holder.rank != me.rank or holder is me or watch.goes_on(me):
            return False
        with self._gate:
            mine = next(mine for mine, strand in enumerate(self._strands) if strand is me)
            has_turn = self._strands[self._holder] is holder and holder.num_arrivals == watch.num_arrivals
            if not has_turn or mine not in self._ready:
                return False
            self._ready.remove(mine)
            self._holder = mine
            self._outside.add(holder.native_id)
            me.has_turn = True
        return True

    def _end_helper(self, number: int) -> None:
        me = self._strands[number]
        me.waits_for = None
        if self._abandoned is not None or self._holder != number:
            return
        own = self._strands[me.rank]
        with self._gate:
            # It waited for this thread, and goes on.
            goes_back = own.native_id in self._outside
            if goes_back:
                self._outside.discard(own.native_id)
                self._holder = me.rank
        if not goes_back:
            self._on_switch(me.rank, False)
            self._give_turn(self._choose())

    def now(self) -> float:
        return self._time

    def point(self, *what: Any) -> None:
        """The rank is about to make a call: others may go first."""
        self._check_abandoned()
        me = self._strands[self._arrive()]
        self._num_events += 1
        self.num_steps += 1
        if self._policy.at_calls:
            self.pause()
        else:
            self._receive(me)
        self._come_to_point(me.rank, what)

    def pause(self) -> None:
        number = self._arrive()
        me = self._strands[number]
        if me.polled_at != self._num_events:
            me.num_looks, me.polls_since = 0, time.monotonic()
        me.num_looks += 1
        me.polls_in_vain = me.num_looks >= _MANY_LOOKS
        me.polled_at = self._num_events
        self._ready.append(number)
        self._num_in_vain += me.polls_in_vain
        try:
            self._let_others(number)
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
        """The rank does not go on before all others have ended; then it is interrupted."""
        number = self._arrive()
        me = self._strands[number]
        me.parked = True
        me.waits_for = None
        self._let_others(number)

    def wait(self, ticket: Waitable, timeout: float | None) -> bool:
        number = self._arrive()
        me = self._strands[number]
        alarm = None if timeout is None else self._set_alarm(number, ticket, timeout)
        self._receive(me)
        while not ticket.ended and not (alarm is not None and alarm.rang):
            me.waits_for = ticket
            self._waiting.setdefault(id(ticket), []).append(number)
            try:
                self._let_others(number)
            finally:
                me.waits_for = None
                if number in self._waiting.get(id(ticket), ()):
                    self._waiting[id(ticket)].remove(number)
        if alarm is not None:
            alarm.rang = True
        return ticket.ended

    def _set_alarm(self, number: int, ticket: Waitable, timeout: float) -> _Alarm:
        alarm = _Alarm()

        def ring() -> None:
            alarm.rang = True
            self._wake_strand(number, ticket)

        self.at(timeout, ring, lambda: ticket.ended or alarm.rang)
        return alarm

    # For meetings, in any rank's thread.

    def at(self, seconds: float, expire: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Calls `expire` when so much time has gone by, unless it is over by then."""
        if seconds != float("inf"):
            heapq.heappush(self._timers, (self._time + seconds, next(self._numbers), Timer(expire, is_over)))

    def wake(self, ticket: Waitable) -> None:
        self._num_events += 1
        for number in self._waiting.pop(id(ticket), ()):
            self._ready.append(number)

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
        for number, strand in enumerate(self._strands):
            if number != self._holder:
                self._wake_up(strand)

    def interrupt(self, rank: int, error: BaseException) -> None:
        """The rank, if it waits, goes on with an exception."""
        self._interrupt(rank, error)
        self._wake_strands(rank)

    def _wake_strands(self, rank: int) -> None:
        for number in [rank, *range(self.size, len(self._strands))]:
            strand = self._strands[number]
            if strand.rank == rank and strand.waits_for is not None:
                self._wake_strand(number, strand.waits_for)

    def _wake_strand(self, number: int, ticket: Waitable) -> None:
        numbers = self._waiting.get(id(ticket), [])
        if number in numbers:
            numbers.remove(number)
            self._ready.append(number)

    def _let_others(self, number: int) -> None:
        me = self._strands[number]
        self._check_abandoned()
        chosen = self._choose()
        if chosen != number:
            self._on_switch(me.rank, False)
            self._give_turn(chosen)
            self._take_turn(me)
            self._on_switch(me.rank, True)
        self._receive(me)

    def _resumes(self, number: int) -> None:
        super()._resumes(number)
        self._holder = number

    def _give_turn(self, chosen: int | None) -> None:
        if chosen is None:
            self.all_ended.set()
        else:
            self._wake_up(self._strands[chosen])

    def _choose(self) -> int | None:
        """Which strand goes on; None where there is none left."""
        self._is_choosing = True
        while not self._ready or (self._num_in_vain and self._num_in_vain == len(self._ready)):
            if self._outside and not self._ready and self._somebody_comes(0.0):
                break
            if self._jump():
                self._num_events += 1
                for number in self._ready:
                    self._strands[number].polls_in_vain = False
                self._num_in_vain = 0
            elif self._ready and not self._polled_for_long():
                break
            elif self._ready or any(strand.waits_for is not None for strand in self._strands):
                if self._ready or not self._outside or not self._somebody_comes(LONG):
                    self._on_deadlock()
                break
            elif not self._main_is_outside():
                return None
        if not self._ready:
            raise RuntimeError("nobody can go on, and nobody was told")
        with self._gate:
            index = self._policy.choose(self._ready) if len(self._ready) > 1 else 0
            if len(self._ready) > 1:
                self.choices.append(index)
            self._holder = self._ready.pop(index)
            self._is_choosing = False
        return self._holder

    def _somebody_comes(self, seconds: float) -> bool:
        """Whether one of the threads outside comes to communicate: as long as one is worth waiting for, or for some
        seconds."""
        since = time.monotonic()
        limits = self._limits()
        limits_of_strangers = limits if self._is_awaited() else _AT_THE_END
        known = {strand.native_id for strand in self._strands}

        def limits_of(thread: int) -> Limits:
            return limits if thread in known else limits_of_strangers

        while not self._ready and self._outside:
            self._check_abandoned()
            may_come = self._outside.may_come(since, limits_of, lambda: bool(self._ready))
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
        for number, strand in enumerate(self._strands[: self.size]):
            # One that was killed while its thread made a call goes on when that is freed.
            if strand.native_id in self._outside and not any(other.parked for other in self._of(number)):
                self._holder = number
                return True
        return False

    def _polled_for_long(self) -> bool:
        """All that could go on look in vain: whether for so long that no time that goes by will help."""
        return time.monotonic() - max(self._strands[number].polls_since for number in self._ready) > LONG

    def _jump(self) -> bool:
        """To the next timer that is not over; False: there is none."""
        while self._timers:
            time, _, timer = heapq.heappop(self._timers)
            if not timer.is_over():
                self._time = max(self._time, time)
                timer.expire()
                return True
        return False
