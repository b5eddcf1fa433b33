"""A world of ranks that are threads: where they meet, what each of them has of its own, and how they end."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

# Takes the default group of whoever imports it first: that is not to be a rank.
import torch.distributed.nn.functional

from phalanx import _native
from phalanx.collectives import message
from phalanx.debug.absence import describe_last_calls
from phalanx.debug.answers import describe_frame
from phalanx.debug.own_box import num_calls
from phalanx.debug.records import read_box
from phalanx.group.endings import last_words
from phalanx.group.torch_compat import OwnWorlds
from phalanx.testing.belongings import Cpus, Generators, YoungObjects, seed_generators
from phalanx.testing.faults import Fault, let_happen
from phalanx.testing.folders import folder_of_run
from phalanx.testing.free import Free
from phalanx.testing.graph import describe_deadlock
from phalanx.testing.scheduler import Turns
from phalanx.testing.schedules import Policy
from phalanx.testing.store import KeyWait, SharedStore
from phalanx.transports import threads
from phalanx.transports.meeting import Meeting
from phalanx.transports.threads import ThreadsTransport
from phalanx.transports.tickets import Ticket
from phalanx.types import GroupInfo, Store, describe_ranks

__all__ = ["Stuck", "ThreadsWorld", "Unwound", "World", "exit_error", "rank_here"]


# Of meetings.
_tokens = itertools.count(1)
# Seconds that ranks are given to end when their run is abandoned.
_TO_END = 1.0


class Stuck(RuntimeError):
    """A rank neither ends nor communicates."""


def exit_error(rank: int, end: SystemExit) -> RuntimeError | None:
    """What it means that a rank called sys.exit; None where it ended well."""
    if not end.code:
        return None
    return RuntimeError(f"rank {rank} called sys.exit({end.code!r})").with_traceback(end.__traceback__)


class Unwound(BaseException):
    """Ends the thread of a rank that was killed, or whose run has ended without it."""


def rank_here() -> int | None:
    """The rank whose thread this is, if it is one's."""
    world = threads.place.world
    return world.turns.rank if isinstance(world, ThreadsWorld) and world.turns.is_rank else None


class World:
    """What a function that runs as a rank is given."""

    def __init__(self, size: int, store: Store, folder: Callable[[], Path]) -> None:
        self.size = size
        self.store = store
        self._folder = folder

    @property
    def group(self) -> dist.ProcessGroup:
        """The default group."""
        group = dist.group.WORLD
        if group is None:
            raise ValueError("there is no default group: with init=False the function makes it itself")
        return group

    @property
    def tmp_path(self) -> Path:
        """A folder that all ranks share; it is gone after the run."""
        return self._folder()

    def barrier(self) -> None:
        dist.barrier()


class _Own:
    """What a rank has of its own while it runs, and what is put aside while it does not."""

    def __init__(self, rank: int, size: int, generators: Generators) -> None:
        self.rank = rank
        self.size = size
        self.transports: list[ThreadsTransport] = []
        self.thread = 0
        self.generators = generators
        self._box: _native.BlackBox | None = None

    def box(self) -> _native.BlackBox | None:
        """The black box; None where none is wanted."""
        if self._box is None and num_calls() > 0:
            self._box = _native.BlackBox("", num_calls(), self.rank, self.size, "")
        return self._box


class ThreadsWorld:
    """The ranks of one run. `threads.place` leads the groups of their threads here."""

    def __init__(self, size: int, policy: Policy | None, faults: Mapping[tuple[int, int], list[Fault]]) -> None:
        """Without a policy the ranks run freely."""
        self.size = size
        on_point = self._on_point if faults else None
        self.turns: Turns | Free = (
            Free(size, self._break_deadlock, on_point)
            if policy is None
            else Turns(size, policy, self._break_deadlock, self._on_switch, on_point)
        )
        self._takes_turns = policy is not None
        self.workers: list[threading.Thread] = []
        self.killed: set[int] = set()
        self.stuck: dict[int, Stuck] = {}
        self._abandoned = False
        self._cpus = Cpus()
        self._faults = faults
        self.store = SharedStore(self.turns)
        # How ranks ended that have: whether they were killed, and their last words.
        self._ended: dict[int, tuple[bool, str]] = {}
        self._meetings: dict[bytes, Meeting] = {}
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._left_to_do = contextlib.ExitStack()
        self._torch_worlds = OwnWorlds(self.turns.pause)

    def folder(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = self._left_to_do.enter_context(folder_of_run())
            return self._folder

    def __enter__(self) -> ThreadsWorld:
        self._young = YoungObjects(self.size)
        self._before = Generators()
        self._in_place = seed_generators()
        self._own = [_Own(rank, self.size, self._in_place) for rank in range(self.size)]
        self._torch_worlds.install()
        return self

    def abandon(self, error: BaseException) -> None:
        """Ranks end where they communicate next. One may go on for ever: what it does is to harm nobody."""
        self._abandoned = True
        self.turns.abandon(error)
        until = time.monotonic() + _TO_END
        for worker in self.workers:
            if worker.ident is not None:
                worker.join(max(0.0, until - time.monotonic()))

    def __exit__(self, *_: object) -> None:
        self._torch_worlds.remove(for_all=not self._abandoned)
        self._before.restore()
        self._young.restore()
        self._cpus.restore_num_threads()
        self._left_to_do.close()

    # For groups.

    def join(self, store: Store, info: GroupInfo, timeout: float) -> ThreadsTransport:
        """Meets the other ranks of a group. Ranks that name the same store and group find each other."""
        # How many times this rank has come for such a group: the others count the same.
        comings = f"{info.name}/comings/{info.rank}"
        number = store.add(comings, 1)
        token = store.compare_set(f"{info.name}/{number}/meeting", "", str(next(_tokens)))
        with self._lock:
            meeting = self._meetings.get(token)
            if meeting is None:
                meeting = self._meetings[token] = Meeting(info, self.turns, message.meaning)
        for rank in list(self._ended):
            self._miss(meeting, rank)
        transport = ThreadsTransport(meeting, info, self.turns.rank, self._own[self.turns.rank].box())
        try:
            transport.join(timeout)
        except BaseException:
            # As between processes: a later try of all ranks finds each other.
            store.add(comings, -1)
            raise
        self._own[self.turns.rank].transports.append(transport)
        return transport

    def whereabouts(self, rank: int) -> tuple[str, list[str]]:
        if rank in self.killed:
            return "is dead", []
        if rank in self._ended:
            return "has ended", []
        here = describe_frame(sys._current_frames().get(self._own[rank].thread))
        ticket = self.turns.waiting_for(rank)
        if isinstance(ticket, (Ticket, KeyWait)):
            where = f", at {here.where}" if here.where else ""
            awaited = ticket.waited_for()
            whom = f" for {describe_ranks(awaited)}" if awaited else ""
            return f"waits{whom} in {ticket.describe()}{where}", here.stack
        return f"is in its own code, at {here.where}" if here.where else "has not begun", here.stack

    def own_box(self) -> _native.BlackBox | None:
        return self._own[self.turns.rank].box()

    def last_calls(self, rank: int) -> list[str]:
        box = self._own[rank].box()
        return [] if box is None else describe_last_calls(read_box(box.contents()).records)

    # How ranks end.

    def end(self, rank: int, error: BaseException | None) -> None:
        """In the rank's own thread, last of all: peers that still need it are told."""
        words = "" if error is None else last_words(error)
        for transport in self._own[rank].transports:
            if words:
                transport.say_last_words(words)
            transport.close(exiting=True)
        self._has_ended(rank, False, words)

    def _has_ended(self, rank: int, killed: bool, words: str) -> None:
        if rank not in self._ended:
            self._ended[rank] = killed, words
            with self._lock:
                meetings = list(self._meetings.values())
            for meeting in meetings:
                self._miss(meeting, rank)

    def _miss(self, meeting: Meeting, rank: int) -> None:
        """Whoever waits for a rank that has ended to make a group is told."""
        killed, words = self._ended[rank]
        status = int(signal.SIGKILL) if killed else _native.UNKNOWN_STATUS
        with meeting.lock:
            meeting.miss(rank, self.size, killed, status, words)

    def _on_point(self, rank: int, number: int) -> None:
        let_happen(self._faults.get((rank, number), ()), self.turns.sleep, partial(self._kill, rank))

    def _kill(self, rank: int) -> None:
        self.killed.add(rank)
        for transport in self._own[rank].transports:
            transport.die(signal.SIGKILL)
        self._has_ended(rank, True, "")
        self.turns.park()

    def _break_deadlock(self) -> None:
        tickets = {rank: self.turns.waiting_for(rank) for rank in range(self.size)}
        waiting = {rank: ticket for rank, ticket in tickets.items() if isinstance(ticket, (Ticket, KeyWait))}
        frames = sys._current_frames()
        polling = [rank for rank in range(self.size) if self.turns.polls(rank)]
        places = {rank: frames[self._own[rank].thread] for rank in [*waiting, *polling]}
        deadlock = describe_deadlock(waiting, places, self._ended, polling)
        for rank in tickets:
            if rank in waiting or rank in polling:
                # One for each: exceptions gather what happens to them.
                self.turns.interrupt(rank, copy(deadlock))

    def _on_switch(self, rank: int, enters: bool) -> None:
        own = self._own[rank]
        if not enters:
            # Most ranks draw nothing: they share one, which is quick to compare with, and need not be put back.
            if not own.generators.are_in_place():
                own.generators = Generators()
            self._in_place = own.generators
        elif own.generators is not self._in_place:
            own.generators.restore()
            self._in_place = own.generators

    def start(self, body: Callable[[int], None]) -> None:
        """Starts the threads of the ranks, each of which calls it in its turns."""
        with self._cpus if self._takes_turns else contextlib.nullcontext():
            for rank in range(self.size):
                main = partial(self._main_of, rank, partial(body, rank))
                worker = threading.Thread(target=main, name=f"rank {rank}", daemon=True)
                self.workers.append(worker)
                worker.start()

    def _main_of(self, rank: int, body: Callable[[], None]) -> None:
        """The whole life of a rank's thread."""
        threads.place.world = self
        self._torch_worlds.enter()
        self._own[rank].thread = threading.get_ident()
        if self._takes_turns:
            torch.set_num_threads(1)
        with torch.autograd.set_multithreading_enabled(False), contextlib.suppress(Unwound):
            self.turns.enter(rank)
            try:
                body()
            finally:
                self.turns.leave()
