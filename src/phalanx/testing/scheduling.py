"""What schedulers of ranks that are threads have in common.

A rank has one thread of its own, and may start others (helpers.py). Each that communicates is a strand. Strand r is the
thread of rank r. Strands of threads that ranks have started follow in the order in which they first communicate, until
they end.

A rank that is killed is dead with all its threads: each stays where it communicates next. When all other ranks have
ended, the threads of dead ranks end, too, rank after rank.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, Protocol

from phalanx.errors import GroupError, InvalidCall
from phalanx.testing.outside import Limits, Outside
from phalanx.testing.schedules import Trace
from phalanx.transports.threads import Origin

__all__ = ["LONG", "Errand", "Interruption", "Nap", "Scheduling", "Strand", "Timer", "Unwound", "Waitable", "forked"]


# Seconds after which a thread that only polls, or sleeps, is not expected to communicate any more.
LONG = 1.0


class Interruption(BaseException):
    """What a rank that is stuck gets, in the midst of whatever it does. A program does not take it for an error."""


class Unwound(BaseException):
    """Ends the threads of a rank that was killed, or whose run has ended without it."""


def forked() -> GroupError:
    return GroupError(
        "this process is a fork of the one that runs the ranks, and they do not go along with a fork",
        code="GROUP:FORKED",
        hint="communicate in the process that called fork(), or run the test with processes",
    )


class Strand:
    """A thread that takes part in a run."""

    __slots__ = (
        "has_ended",
        "has_turn",
        "ident",
        "inbox",
        "interrupt",
        "native_id",
        "num_arrivals",
        "num_looks",
        "num_points",
        "parked",
        "polled_at",
        "polls_in_vain",
        "polls_since",
        "rank",
        "turn",
        "until",
        "waits_for",
    )

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ident = self.native_id = 0
        # How often it has come to communicate.
        self.num_arrivals = 0
        self.has_ended = False
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
        # Stays where it is until the threads of its rank, which is dead, are to end.
        self.parked = False
        # When it last looked whether something has ended, how often since anything happened, and whether that is so
        # often that nothing will.
        self.polled_at = -1
        self.num_looks = 0
        self.polls_since = 0.0
        self.polls_in_vain = False

    def end_sleep(self) -> None:
        """It looks whether it has the turn, and sleeps on if not."""
        # It may be awake.
        with contextlib.suppress(RuntimeError):
            self.turn.release()

    @property
    def is_waiting(self) -> bool:
        return self.waits_for is not None or self.polls_in_vain


class Waitable(Protocol):
    """What a rank waits for."""

    @property
    def ended(self) -> bool: ...


class Nap:
    """What a rank waits for that only waits."""

    ended = False


class Timer:
    __slots__ = ("expire", "is_over")

    def __init__(self, expire: Callable[[], None], is_over: Callable[[], bool]) -> None:
        self.expire = expire
        self.is_over = is_over


class Errand(abc.ABC):
    """What a rank has another thread do."""

    def __init__(self) -> None:
        self.rank = -1
        self.has_begun = False

    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether no thread will begin with it any more."""

    @abc.abstractmethod
    def threads(self) -> list[int]:
        """Those that may begin with it, as the system numbers them."""


class Scheduling:
    """What schedulers have in common.

    `on_deadlock` is called when nobody can go on, and must make somebody: it interrupts ranks. `on_point(rank, number)`
    is called before each call of a rank, counted from 1: faults happen there.
    """

    def __init__(self, size: int, on_deadlock: Callable[[], None], on_point: Callable[[int, int], None] | None) -> None:
        self._on_deadlock = on_deadlock
        self._on_point = on_point
        self._here = threading.local()
        self._origin = Origin()
        self._abandoned: BaseException | None = None
        self.size = size
        # Replaced, never changed in place: other threads iterate over it.
        self._strands = [Strand(rank) for rank in range(size)]
        # The threads that are or were strands, as the system numbers them. Those of executors may become others.
        self._known: set[int] = set()
        # Held while a strand is added, comes to communicate, or ends and is removed, and while an errand begins.
        self._gate = threading.Lock()
        # Ranks that were killed; those whose threads end; the strands of the last one of these that have not ended.
        self._dead: set[int] = set()
        self._freed: set[int] = set()
        self._unwinding: list[Strand] = []
        self._unwinding_threads = Outside()
        self._awake_at = 0.0
        # Threads of ranks that run without having the turn, by their numbers in the system.
        self._outside = Outside()
        # What ranks have threads do that have not begun with it; the threads outside that may be about to; those that
        # have begun with something, and go on with it.
        self._errands: list[Errand] = []
        # Threads of ranks that start others just now, or hand over tasks: they come back, and the others come.
        self._num_starting = 0
        self._beginners: set[int] = set()
        self._adopted: set[int] = set()
        # Seconds for which a thread is waited for that computes there while no rank can go on.
        self.patience = 30.0
        # Calls of threads of which nobody knows whose they are.
        self.strangers: list[InvalidCall] = []
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
        if self.is_forked:
            raise forked()
        rank: int | None = getattr(self._here, "rank", None)
        if rank is None:
            raise self.stranger()
        return rank

    def stranger(self) -> InvalidCall:
        """The error for a thread that is no rank's, and came to communicate; the run fails with it, too."""
        error = InvalidCall(
            f"expected a call from a thread of a rank, got one from {threading.current_thread().name!r}, which no rank "
            "has started",
            code="INVALID:THREAD",
            hint="let the rank start the thread (threading.Thread, ThreadPoolExecutor), or run the test with processes",
        )
        self.strangers.append(error)
        return error

    @property
    def is_rank(self) -> bool:
        """Whether this is a thread of a rank."""
        return getattr(self._here, "rank", None) is not None and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process in which the ranks run."""
        return self._origin.is_forked

    @contextlib.contextmanager
    def starting(self, errand: Errand) -> Iterator[None]:
        """In a thread of a rank, while it has another one begin with something. That one is expected afterwards."""
        errand.rank = self.rank
        with self._gate:
            self._num_starting += 1
        has_started = False
        try:
            yield
            has_started = True
        finally:
            with self._gate:
                self._num_starting -= 1
                if has_started and not errand.has_begun:
                    self._errands.append(errand)

    def adopt(self, rank: int, errand: Errand) -> None:
        """First of all, in a thread that a rank has started: it is one of the rank's."""
        self._here.rank, self._here.strand = rank, None
        thread = threading.get_native_id()
        with self._gate:
            errand.has_begun = True
            if errand in self._errands:
                self._errands.remove(errand)
            self._beginners.discard(thread)
            self._adopted.add(thread)
            if rank not in self._dead:
                self._outside.add(thread, rank)

    def _look_for_beginners(self) -> None:
        """Before a look at the threads outside: a thread that is about to begin with something is one of them."""
        if not self._errands and not self._beginners:
            return
        with self._gate:
            self._errands = [one for one in self._errands if not one.is_over() and one.rank not in self._dead]
            found = {thread: one.rank for one in self._errands for thread in one.threads()}
            beginners = found.keys() - self._adopted
            for thread in self._beginners - beginners:
                self._outside.discard(thread)
            for thread in beginners:
                if thread not in self._outside:
                    self._outside.add(thread, found[thread])
            self._beginners = beginners

    def release(self) -> None:
        """Last of all, in such a thread."""
        with self._gate:
            self._adopted.discard(threading.get_native_id())
            self._outside.discard(threading.get_native_id())
        me: Strand | None = self._here.strand
        self._here.rank = self._here.strand = None
        if me is not None:
            self._note_end(me)
            self._end_helper(me)

    def _note_end(self, me: Strand) -> None:
        """Last of all, in the thread of a strand."""
        me.waits_for = None
        with self._gate:
            me.has_ended = True
            if me is not self._strands[me.rank]:
                self._strands = [strand for strand in self._strands if strand is not me]
            if me in self._unwinding:
                self.num_steps += 1
                self._unwinding.remove(me)
                if not self._unwinding:
                    self.all_ended.set()

    @property
    def has_communicated(self) -> bool:
        """Whether this thread has; where a rank has started it."""
        return getattr(self._here, "strand", None) is not None

    def _end_helper(self, me: Strand) -> None:
        raise NotImplementedError

    def _rouse(self) -> None:
        """Has all threads that wait look again: there is a helper now, and they may have to look at it."""
        raise NotImplementedError

    def _be(self, rank: int) -> None:
        """First of all, in a rank's own thread."""
        me = self._strands[rank]
        self._here.rank, self._here.strand = rank, me
        me.ident, me.native_id = threading.get_ident(), threading.get_native_id()
        self._known.add(me.native_id)

    def _strand(self) -> Strand:
        """Of this thread. One that a rank has started gets it when it first communicates."""
        rank = self.rank
        me: Strand | None = self._here.strand
        if me is None:
            me = Strand(rank)
            me.ident, me.native_id = threading.get_ident(), threading.get_native_id()
            # The thread that communicates next does for the rank what was left to it.
            me.inbox = self._strands[rank].inbox
            with self._gate:
                self._here.strand = me
                is_first = not self._has_helpers
                self._strands = [*self._strands, me]
                self._known.add(me.native_id)
            if is_first:
                self._rouse()
        return me

    @property
    def _has_helpers(self) -> bool:
        """Whether a thread that a rank has started communicates, and has not ended."""
        return len(self._strands) > self.size

    def _of(self, rank: int) -> Iterable[Strand]:
        """The strands of a rank."""
        if not self._has_helpers:
            return (self._strands[rank],)
        return [strand for strand in self._strands if strand.rank == rank]

    def _limits(self) -> Limits:
        """Of threads that have communicated."""
        return Limits(min(LONG, self.patience), self.patience, self.patience)

    def _limits_of_strangers(self) -> Limits:
        """Of threads that have not."""
        return Limits(min(LONG, self.patience), self.patience, min(LONG, self.patience))

    def num_calls(self) -> list[int]:
        """How many calls each rank has made, or come to."""
        return [strand.num_points for strand in self._strands[: self.size]]

    def waiting_for(self, rank: int) -> Waitable | None:
        return next((strand.waits_for for strand in self._of(rank) if strand.waits_for is not None), None)

    def thread_of(self, rank: int) -> int:
        """The thread that waits, if one does, else the rank's own; as Python numbers threads."""
        return next((strand.ident for strand in self._of(rank) if strand.is_waiting), self._strands[rank].ident)

    def free(self) -> bool:
        """Once all others have ended: the threads of a dead rank are to end. False: there is no such rank left.

        All at once: they may wait for each other.
        """
        with self._gate:
            rank = min(self._dead - self._freed, default=None)
            if rank is None:
                return False
            self._unwinding = [strand for strand in self._of(rank) if not strand.has_ended]
            if self._unwinding:
                self.all_ended.clear()
            self._resumes(rank)
            self._freed.add(rank)
            parked = [strand for strand in self._unwinding if strand.parked]
        self._unwinding_threads = Outside()
        for strand in self._unwinding[:]:
            self._unwinding_threads.add(strand.native_id, rank)
        self._awake_at = time.monotonic()
        for strand in parked:
            strand.parked = False
            self._wake_up(strand)
        return True

    def has_come_to_rest(self) -> int | None:
        """The dead rank whose threads were to end, if they sleep for so long that nothing will wake them up."""
        limits = Limits(polling=LONG, computing=float("inf"), napping=float("inf"))
        unwinding = self._unwinding[:]
        if not unwinding or self._unwinding_threads.may_come(self._awake_at, lambda _: limits):
            self._awake_at = time.monotonic()
            return None
        return unwinding[0].rank if time.monotonic() - self._awake_at > LONG else None

    def _check_alive(self, me: Strand) -> None:
        """In a thread that communicates: one of a dead rank stays here, and ends when it is to."""
        if me.rank not in self._dead:
            return
        with self._gate:
            me.parked = stays = me.rank not in self._freed
        if stays:
            self._outside.discard(me.native_id)
            self._take_turn(me)
        raise Unwound

    def polls(self, rank: int) -> bool:
        """Whether it looks again and again for the end of something, in vain."""
        return any(strand.polls_in_vain for strand in self._of(rank))

    def _come_to_point(self, rank: int, what: tuple[Any, ...]) -> None:
        me = self._strands[rank]
        me.num_points += 1
        self.trace.add(rank, what)
        if self._on_point is not None:
            self._on_point(rank, me.num_points)

    def _interrupt(self, rank: int, error: BaseException) -> list[Strand]:
        """The strands that are to go on with it: those that wait, or else the rank's own thread."""
        told = [strand for strand in self._of(rank) if strand.is_waiting] or [self._strands[rank]]
        for number, strand in enumerate(told):
            # One for each: exceptions gather what happens to them.
            strand.interrupt = copy(error) if number else error
        return told

    def _receive(self, me: Strand) -> None:
        """Raises, or calls, what came for the rank meanwhile."""
        if me.interrupt is not None:
            error, me.interrupt = me.interrupt, None
            raise error
        while me.inbox:
            me.inbox.popleft()()

    def _resumes(self, rank: int) -> None:
        """The threads of a dead rank are about to end."""
        self.num_steps += 1

    def _wake_up(self, strand: Strand) -> None:
        strand.has_turn = True
        strand.end_sleep()

    def _take_turn(self, me: Strand) -> None:
        while not me.has_turn:
            try:
                self._sleep(me)
            except Interruption:
                # It was meant for the rank when it still had the turn.
                continue
            self._check_abandoned()
        me.has_turn = False
        me.turn.acquire(blocking=False)
        self._check_abandoned()
        if me.rank in self._dead:
            raise Unwound

    def _sleep(self, me: Strand) -> None:
        """Until it is this strand's turn, or somewhat shorter."""
        # A run may be abandoned at any moment, also between giving the turn away and waiting for it.
        me.turn.acquire(timeout=0.5)

    def _check_abandoned(self) -> None:
        if self._abandoned is not None:
            raise self._abandoned
