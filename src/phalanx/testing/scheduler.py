"""Whose turn it is: one rank runs at a time, and hands over only where it communicates.

A run is a function of the program and of the choices made among the ranks that can go on. Time is virtual: it stands
still while anybody can run, and jumps to the next timer when all wait. When there is no timer either, nobody will ever
go on: that is a deadlock, and it is found at once.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from phalanx.errors import InvalidCall
from phalanx.testing.schedules import Policy, Trace

# Who looks so often, while nothing happens, looks in vain. Where it only waits for real time to go by it gets a second.
_MANY_LOOKS = 1000
_LONG = 1.0

__all__ = ["Interruption", "Nap", "RankState", "Scheduling", "Turns", "Waitable"]


class Interruption(BaseException):
    """What a rank that is stuck gets, in the midst of whatever it does. A program does not take it for an error."""


class RankState:
    __slots__ = (
        "has_turn",
        "inbox",
        "interrupt",
        "num_looks",
        "num_points",
        "parked",
        "polled_at",
        "polls_in_vain",
        "polls_since",
        "turn",
        "until",
        "waits_for",
    )

    def __init__(self) -> None:
        self.has_turn = False
        # Held, but for the moment between being given the turn and taking it: wakes the rank up.
        self.turn = threading.Lock()
        self.turn.acquire()
        # When it goes on of itself, where ranks run freely.
        self.until: float | None = None
        self.waits_for: Waitable | None = None
        # Raised where the rank waits or communicates next.
        self.interrupt: BaseException | None = None
        # Called there, too.
        self.inbox: deque[Callable[[], None]] = deque()
        self.num_points = 0
        self.parked = False
        # When it last looked whether something has ended, how often since anything happened, and whether that is so
        # often that nothing will.
        self.polled_at = -1
        self.num_looks = 0
        self.polls_since = 0.0
        self.polls_in_vain = False


class Waitable(Protocol):
    """What a rank waits for."""

    @property
    def ended(self) -> bool: ...


class Nap:
    """What a rank waits for that only waits."""

    ended = False


class _Alarm:
    """Ends a wait. Once it rang, or was set off because the wait is over, it does nothing."""

    rang = False


class Timer:
    __slots__ = ("expire", "is_over")

    def __init__(self, expire: Callable[[], None], is_over: Callable[[], bool]) -> None:
        self.expire = expire
        self.is_over = is_over


class Scheduling:
    """What schedulers have in common.

    `on_deadlock` is called when nobody can go on, and must make somebody: it interrupts ranks. `on_point(rank, number)`
    is called before each call of a rank, counted from 1: faults happen there.
    """

    def __init__(self, size: int, on_deadlock: Callable[[], None], on_point: Callable[[int, int], None] | None) -> None:
        self._on_deadlock = on_deadlock
        self._on_point = on_point
        self._here = threading.local()
        self._abandoned: BaseException | None = None
        self._ranks = [RankState() for _ in range(size)]
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self.all_ended = threading.Event()
        self.choices: list[int] = []
        self.trace = Trace()
        # Grows when a rank makes a call, writes to the store or ends: whoever watches a run sees that it gets on.
        self.num_steps = 0

    @property
    def rank(self) -> int:
        """Whose thread this is."""
        rank: int | None = getattr(self._here, "rank", None)
        if rank is None:
            raise InvalidCall(
                f"expected a call from a rank's own thread, got one from {threading.current_thread().name!r}",
                code="INVALID:THREAD",
                hint="let ranks that are threads communicate from their own only, or run the test with processes",
            )
        return rank

    @property
    def is_rank(self) -> bool:
        """Whether this is a rank's thread."""
        return getattr(self._here, "rank", None) is not None

    def num_calls(self) -> list[int]:
        """How many calls each rank has made, or come to."""
        return [rank.num_points for rank in self._ranks]

    def waiting_for(self, rank: int) -> Waitable | None:
        return self._ranks[rank].waits_for

    def free(self, error: BaseException) -> bool:
        """Once all have ended: lets a parked rank go on with an exception. False: there is none."""
        for number, rank in enumerate(self._ranks):
            if rank.parked:
                rank.parked = False
                rank.interrupt = error
                self.all_ended.clear()
                self._resumes(number)
                self._wake_up(rank)
                return True
        return False

    def polls(self, rank: int) -> bool:
        """Whether it looks again and again for the end of something, in vain."""
        return self._ranks[rank].polls_in_vain

    def _come_to_point(self, rank: int, what: tuple[Any, ...]) -> None:
        me = self._ranks[rank]
        me.num_points += 1
        self.trace.add(rank, what)
        if self._on_point is not None:
            self._on_point(rank, me.num_points)

    def _receive(self, me: RankState) -> None:
        """Raises, or calls, what came for the rank meanwhile."""
        if me.interrupt is not None:
            error, me.interrupt = me.interrupt, None
            raise error
        while me.inbox:
            me.inbox.popleft()()

    def _resumes(self, rank: int) -> None:
        """A rank goes on that was parked."""
        self.num_steps += 1

    def _wake_up(self, rank: RankState) -> None:
        rank.has_turn = True
        try:
            rank.turn.release()
        except RuntimeError:
            # It was awake.
            return

    def _take_turn(self, me: RankState) -> None:
        while not me.has_turn:
            try:
                # A run may be abandoned at any moment, also between giving the turn away and waiting for it.
                me.turn.acquire(timeout=0.5)
            except Interruption:
                # It was meant for the rank when it still had the turn.
                continue
            self._check_abandoned()
        me.has_turn = False
        me.turn.acquire(blocking=False)
        self._check_abandoned()

    def _check_abandoned(self) -> None:
        if self._abandoned is not None:
            raise self._abandoned


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
        # Whose turn it is.
        self.current = 0
        # What may end something that somebody polls for, and how many poll in vain.
        self._num_events = 0
        self._num_in_vain = 0

    # For ranks, in their own threads.

    def enter(self, rank: int) -> None:
        """First of all, in a rank's thread: waits for its turn."""
        self._here.rank = rank
        self._take_turn(self._ranks[rank])
        self._on_switch(rank, True)

    def leave(self) -> None:
        """Last of all: the rank does not run any more."""
        self._check_abandoned()
        self.num_steps += 1
        self._on_switch(self.rank, False)
        self._give_turn(self._choose())

    def now(self) -> float:
        return self._time

    def point(self, *what: Any) -> None:
        """The rank is about to make a call: others may go first."""
        self._num_events += 1
        self.num_steps += 1
        rank = self.rank
        if self._policy.at_calls:
            self.pause()
        else:
            self._check_abandoned()
            self._receive(self._ranks[rank])
        self._come_to_point(rank, what)

    def pause(self) -> None:
        rank = self.rank
        me = self._ranks[rank]
        if me.polled_at != self._num_events:
            me.num_looks, me.polls_since = 0, time.monotonic()
        me.num_looks += 1
        me.polls_in_vain = me.num_looks >= _MANY_LOOKS
        me.polled_at = self._num_events
        self._ready.append(rank)
        self._num_in_vain += me.polls_in_vain
        try:
            self._let_others(rank)
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
        rank = self.rank
        me = self._ranks[rank]
        me.parked = True
        me.waits_for = None
        self._let_others(rank)

    def wait(self, ticket: Waitable, timeout: float | None) -> bool:
        rank = self.rank
        me = self._ranks[rank]
        alarm = None if timeout is None else self._set_alarm(rank, ticket, timeout)
        self._receive(me)
        while not ticket.ended and not (alarm is not None and alarm.rang):
            me.waits_for = ticket
            self._waiting.setdefault(id(ticket), []).append(rank)
            try:
                self._let_others(rank)
            finally:
                me.waits_for = None
                if rank in self._waiting.get(id(ticket), ()):
                    self._waiting[id(ticket)].remove(rank)
        if alarm is not None:
            alarm.rang = True
        return ticket.ended

    def _set_alarm(self, rank: int, ticket: Waitable, timeout: float) -> _Alarm:
        alarm = _Alarm()

        def ring() -> None:
            alarm.rang = True
            self._wake_rank(rank, ticket)

        self.at(timeout, ring, lambda: ticket.ended or alarm.rang)
        return alarm

    # For meetings, in any rank's thread.

    def at(self, seconds: float, expire: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Calls `expire` when so much time has gone by, unless it is over by then."""
        if seconds != float("inf"):
            heapq.heappush(self._timers, (self._time + seconds, next(self._numbers), Timer(expire, is_over)))

    def wake(self, ticket: Waitable) -> None:
        self._num_events += 1
        for rank in self._waiting.pop(id(ticket), ()):
            self._ready.append(rank)

    def happened(self) -> None:
        """Something that a rank may look for."""
        self._num_events += 1
        self.num_steps += 1

    def call_as(self, rank: int, callback: Callable[[], None]) -> None:
        """In the rank's own thread, when it waits or communicates next; one that waits goes on for it."""
        self._num_events += 1
        me = self._ranks[rank]
        me.inbox.append(callback)
        if me.waits_for is not None:
            self._wake_rank(rank, me.waits_for)

    # For the world.

    def begin(self) -> None:
        self._give_turn(self._choose())

    def abandon(self, error: BaseException) -> None:
        """Nobody has a turn any more: whoever comes to communicate, or waits to, goes on with an exception."""
        self._abandoned = error
        for number, rank in enumerate(self._ranks):
            if number != self.current:
                self._wake_up(rank)

    def interrupt(self, rank: int, error: BaseException) -> None:
        """The rank, if it waits, goes on with an exception."""
        self._ranks[rank].interrupt = error
        ticket = self._ranks[rank].waits_for
        if ticket is not None:
            self._wake_rank(rank, ticket)

    def _wake_rank(self, rank: int, ticket: Waitable) -> None:
        ranks = self._waiting.get(id(ticket), [])
        if rank in ranks:
            ranks.remove(rank)
            self._ready.append(rank)

    def _let_others(self, rank: int) -> None:
        me = self._ranks[rank]
        self._check_abandoned()
        chosen = self._choose()
        if chosen != rank:
            self._on_switch(rank, False)
            self._give_turn(chosen)
            self._take_turn(me)
            self._on_switch(rank, True)
        self._receive(me)

    def _resumes(self, rank: int) -> None:
        super()._resumes(rank)
        self.current = rank

    def _give_turn(self, chosen: int | None) -> None:
        if chosen is None:
            self.all_ended.set()
        else:
            self._wake_up(self._ranks[chosen])

    def _choose(self) -> int | None:
        """Who goes on; None where there is nobody left."""
        while not self._ready or (self._num_in_vain and self._num_in_vain == len(self._ready)):
            if self._jump():
                self._num_events += 1
                for rank in self._ready:
                    self._ranks[rank].polls_in_vain = False
                self._num_in_vain = 0
            elif self._ready and not self._polled_for_long():
                break
            elif self._ready or any(rank.waits_for is not None for rank in self._ranks):
                self._on_deadlock()
                break
            else:
                return None
        if not self._ready:
            raise RuntimeError("nobody can go on, and nobody was told")
        index = self._policy.choose(self._ready) if len(self._ready) > 1 else 0
        if len(self._ready) > 1:
            self.choices.append(index)
        self.current = self._ready.pop(index)
        return self.current

    def _polled_for_long(self) -> bool:
        """All that could go on look in vain: whether for so long that no time that goes by will help."""
        return time.monotonic() - max(self._ranks[rank].polls_since for rank in self._ready) > _LONG

    def _jump(self) -> bool:
        """To the next timer that is not over; False: there is none."""
        while self._timers:
            time, _, timer = heapq.heappop(self._timers)
            if not timer.is_over():
                self._time = max(self._time, time)
                timer.expire()
                return True
        return False
