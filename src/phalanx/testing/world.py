"""A world of ranks that are threads: where they meet, what each of them has of its own, and how they end."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from phalanx.collectives import message
from phalanx.group.endings import last_words
from phalanx.group.torch_compat import OwnWorlds
from phalanx.testing import belongings
from phalanx.testing.belongings import Cpus, Generators
from phalanx.testing.faults import Delay, Fail, Fault
from phalanx.testing.free import Free
from phalanx.testing.graph import describe_deadlock
from phalanx.testing.scheduler import Turns
from phalanx.testing.schedules import Policy
from phalanx.transports import threads
from phalanx.transports.meeting import Meeting, Ticket
from phalanx.transports.threads import ThreadsTransport
from phalanx.types import GroupInfo, Store

__all__ = ["ThreadsWorld", "Unwound", "World", "rank_here"]


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

    def __init__(self) -> None:
        self.transports: list[ThreadsTransport] = []
        self.thread = 0
        self.generators: Generators | None = None


class ThreadsWorld:
    """The ranks of one run. `switch` is what a thread does as a rank: `threads.place` leads its groups here."""

    def __init__(self, size: int, policy: Policy | None, faults: Mapping[tuple[int, int], list[Fault]]) -> None:
        """Without a policy the ranks run freely."""
        self.size = size
        self.turns: Turns | Free = (
            Free(size, self._break_deadlock, self._on_point)
            if policy is None
            else Turns(size, policy, self._break_deadlock, self._on_switch, self._on_point)
        )
        self._takes_turns = policy is not None
        self.killed: set[int] = set()
        self.stuck: Exception | None = None
        self._abandoned = False
        self._cpus = Cpus()
        self._faults = faults
        self.store = HashStore()
        self._own = [_Own() for _ in range(size)]
        self._meetings: dict[bytes, Meeting] = {}
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._torch_worlds = OwnWorlds(lambda: self.turns.rank if self.turns.is_rank else None)

    def folder(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="phalanx-")
            return Path(self._folder.name)

    def __enter__(self) -> ThreadsWorld:
        belongings.begin()
        self._before = Generators()
        for own in self._own:
            own.generators = self._before
        self._torch_worlds.install()
        return self

    def abandon(self, error: BaseException) -> None:
        """A thread may go on for ever: what it does is to harm nobody."""
        self._abandoned = True
        self.turns.abandon(error)

    def __exit__(self, *_: object) -> None:
        self._torch_worlds.remove(for_all=not self._abandoned)
        self._before.restore()
        self._cpus.restore()
        if self._folder is not None:
            self._folder.cleanup()

    # For groups.

    def join(self, store: Store, info: GroupInfo, timeout: float) -> ThreadsTransport:
        """Meets the other ranks of a group. Ranks that name the same store and group find each other."""
        number = (store.add(f"{info.name}/arrived", 1) - 1) // info.size
        token = store.compare_set(f"{info.name}/{number}/meeting", "", uuid4().hex)
        with self._lock:
            meeting = self._meetings.get(token)
            if meeting is None:
                meeting = self._meetings[token] = Meeting(info, self.turns, message.meaning)
        transport = ThreadsTransport(meeting, info, self.turns.rank)
        self._own[self.turns.rank].transports.append(transport)
        transport.join(timeout)
        return transport

    # How ranks end.

    def end(self, rank: int, error: BaseException | None) -> None:
        """In the rank's own thread, last of all: peers that still need it are told."""
        for transport in self._own[rank].transports:
            if error is not None and not isinstance(error, SystemExit):
                transport.say_last_words(last_words(error))
            transport.close(exiting=True)

    def _on_point(self, rank: int, number: int) -> None:
        for fault in self._faults.get((rank, number), ()):
            if isinstance(fault, Fail):
                raise fault.error
            if isinstance(fault, Delay):
                self.turns.sleep(fault.seconds)
            else:
                self.killed.add(rank)
                for transport in self._own[rank].transports:
                    transport.die(signal.SIGKILL)
                self.turns.park()

    def _break_deadlock(self) -> None:
        tickets = {rank: self.turns.waiting_for(rank) for rank in range(self.size)}
        waiting = {rank: ticket for rank, ticket in tickets.items() if isinstance(ticket, Ticket)}
        frames = sys._current_frames()
        deadlock = describe_deadlock(waiting, {rank: frames[self._own[rank].thread] for rank in waiting})
        for rank in tickets:
            if rank in waiting or self.turns.polls(rank):
                self.turns.interrupt(rank, deadlock)

    def _on_switch(self, rank: int, enters: bool) -> None:
        own = self._own[rank]
        if not enters:
            own.generators = Generators()
        elif own.generators is not None:
            own.generators.restore()

    def main_of(self, rank: int, body: Callable[[], None]) -> None:
        """The whole life of a rank's thread."""
        threads.place.world = self
        self._own[rank].thread = threading.get_ident()
        if self._takes_turns:
            self._cpus.pin()
        with torch.autograd.set_multithreading_enabled(False), contextlib.suppress(Unwound):
            self.turns.enter(rank)
            try:
                body()
            finally:
                self.turns.leave()
