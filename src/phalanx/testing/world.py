"""A world of ranks that are threads: where they meet, what each of them has of its own, and how they end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Takes the default group of whoever imports it first: that is not to be a rank.
import torch.distributed.nn.functional

from phalanx import _native
from phalanx.collectives import message
from phalanx.debug.absence import describe_last_calls
from phalanx.debug.answers import describe_frame
from phalanx.debug.box_reader import read_box
from phalanx.debug.own_box import num_calls
from phalanx.group.endings import last_words, patience
from phalanx.group.torch_compat.worlds import OwnWorlds
from phalanx.testing.belongings import Cpus, Generators, YoungObjects, seed_generators
from phalanx.testing.faults import Fault, let_happen
from phalanx.testing.free import Free
from phalanx.testing.graph import describe_deadlock, describe_wait
from phalanx.testing.helpers import Helpers, RunAs, Task
from phalanx.testing.run_folders import folder_of_run
from phalanx.testing.scheduler import Turns
from phalanx.testing.schedules import Policy
from phalanx.testing.scheduling import Errand, Unwound
from phalanx.testing.store import KeyWait, SharedStore
from phalanx.transports import threads
from phalanx.transports.circles import find_circle
from phalanx.transports.exchange import Exchange, Key
from phalanx.transports.lookout import Venue
from phalanx.transports.threads import ThreadsTransport
from phalanx.transports.threads.hub import Hub
from phalanx.transports.threads.in_flight import Awaited
from phalanx.types import GroupInfo, Store, describe_ranks

__all__ = ["Stuck", "ThreadsRun", "World", "exit_error", "rank_here"]


# Of hubs.
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


def rank_here() -> int | None:
    """The rank whose thread this is, if it is one's."""
    run = threads.this_thread.run
    return run.turns.rank if isinstance(run, ThreadsRun) and run.turns.is_rank else None


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
        self.generators = generators
        self._box: _native.BlackBox | None = None

    def box(self) -> _native.BlackBox | None:
        """The black box; None where none is wanted."""
        if self._box is None and num_calls() > 0:
            self._box = _native.BlackBox(-1, num_calls(), self.rank, self.size, "")
        return self._box


class _Making(NamedTuple):
    """A group that a rank is making: as it means it, and where it waits for the other ranks."""

    info: GroupInfo
    hub: Hub


def _has_come(making: Mapping[int, _Making], rank: int, to: _Making) -> bool:
    one = making.get(rank)
    return to.info.members.index(rank) in to.hub.meeting.owners or (one is not None and one.hub is to.hub)


class ThreadsRun:
    """The ranks of one run. `threads.this_thread` leads the groups of their threads here."""

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
        self.left_behind: set[int] = set()
        self.stuck: dict[int, Stuck] = {}
        self._abandoned = False
        self._cpus = Cpus()
        self._faults = faults
        self.store = SharedStore(self.turns)
        # How ranks ended that have: whether they were killed, and their last words.
        self._ended: dict[int, tuple[bool, str]] = {}
        self._hubs: dict[bytes, Hub] = {}
        # Of groups that were split from others, until all of their ranks have come: how many have not.
        self._splits: dict[str, tuple[Hub, int]] = {}
        # What ranks came to make that wait for others, or are about to.
        self._making: dict[int, _Making] = {}
        # How many of them make which group: a rank of a large world does not look at all others.
        self._num_making: Counter[Hub] = Counter()
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._left_to_do = contextlib.ExitStack()
        self._torch_worlds = OwnWorlds(self.turns.pause, self.turns.stranger)
        self._helpers = Helpers(self._heir, self.turns.starting)
        # What threads that ranks have started raise, with the rank.
        self.failures_of_helpers: list[tuple[int, BaseException]] = []

    def folder(self) -> Path:
        with self._lock:
            if self._folder is None:
                self._folder = self._left_to_do.enter_context(folder_of_run())
            return self._folder

    def __enter__(self) -> ThreadsRun:
        self._young = YoungObjects(self.size)
        self._before = Generators()
        self._in_place = seed_generators()
        self._own = [_Own(rank, self.size, self._in_place) for rank in range(self.size)]
        self._torch_worlds.install()
        self._helpers.install()
        return self

    def abandon(self, error: BaseException) -> None:
        """Ranks end where they communicate next. One may go on for ever: what it does is to harm nobody."""
        self._abandoned = True
        self.turns.abandon(error)
        until = time.monotonic() + _TO_END
        for worker in self.workers:
            if worker.ident is not None:
                worker.join(max(0.0, until - time.monotonic()))

    def leave_behind(self, rank: int) -> None:
        """A rank was killed, and its thread waits for ever for something that the rank would have done."""
        self._abandoned = True
        self.left_behind.add(rank)

    def __exit__(self, *_: object) -> None:
        self._helpers.remove()
        self._torch_worlds.remove(for_all=not self._abandoned)
        self._before.restore()
        self._young.restore()
        self._cpus.restore_num_threads()
        self._left_to_do.close()

    # For groups.

    def join(self, store: Store, info: GroupInfo, timeout: float, scope: str) -> ThreadsTransport:
        """Meets the other ranks of a group, as processes do (`rendezvous`)."""
        venue = Venue(scope, info.name)
        # How many times this rank has come for such a group: the others count the same.
        comings = venue.count(info.members, info.rank)
        try:
            number = store.add(comings, 1)
        except (RuntimeError, ValueError):
            # Says what is wrong where the key holds anything but a number.
            Exchange(store, info, timeout, on_failure=lambda: None).count(Key(comings, info.rank))
            raise
        token = store.compare_set(f"{venue.meeting(info.members, number)}token", "", str(next(_tokens)))
        with self._lock:
            hub = self._hubs.get(token)
            if hub is None:
                hub = self._hubs[token] = Hub(info, self.turns, message.meaning)
        for rank in list(self._ended):
            self._tell_end(hub, rank)
        transport = ThreadsTransport(hub, info, self.turns.rank, self._own[self.turns.rank].box())
        making = _Making(info, hub)
        try:
            self._begin_making(self.turns.rank, making)
            self._look_for_circle(self.turns.rank)
            transport.join(timeout)
        except BaseException:
            # A later try of all ranks finds each other.
            store.add(comings, -1)
            raise
        finally:
            self._end_making(self.turns.rank, making)
        self._own[self.turns.rank].transports.append(transport)
        return transport

    def _begin_making(self, rank: int, making: _Making) -> None:
        with self._lock:
            self._making[rank] = making
            self._num_making[making.hub] += 1

    def _end_making(self, rank: int, making: _Making) -> None:
        with self._lock:
            if self._making.get(rank) is making:
                del self._making[rank]
            self._num_making[making.hub] -= 1
            if not self._num_making[making.hub]:
                del self._num_making[making.hub]

    def join_split(self, key: str, info: GroupInfo, owners: dict[int, int]) -> ThreadsTransport:
        with self._lock:
            if key in self._splits:
                hub, num_missing = self._splits.pop(key)
            else:
                hub, num_missing = Hub(info, self.turns, message.meaning, owners), info.size
            if num_missing > 1:
                self._splits[key] = hub, num_missing - 1
        own = self._own[self.turns.rank]
        transport = ThreadsTransport(hub, info, self.turns.rank, own.box())
        own.transports.append(transport)
        return transport

    def environment(self) -> tuple[Store, int, int]:
        return self.store, self.turns.rank, self.size

    def _look_for_circle(self, start: int) -> None:
        """Ranks that mean different groups, and wait for each other, are told so."""
        with self._lock:
            if len(self._num_making) == 1:
                # All ranks that make a group make this one.
                return
            making = dict(self._making)
        name = making[start].info.name

        def waits_for(rank: int) -> list[int]:
            one = making.get(rank)
            # Ranks of groups that were made without torch may be any of the world.
            if one is None or one.info.name != name or not one.info.global_ranks:
                return []
            return [member for member in one.info.members if member != rank and not _has_come(making, member, one)]

        circle = find_circle(start, waits_for)
        for rank in circle:
            with making[rank].hub.lock:
                making[rank].hub.meeting.fail_with_circle([making[member].info for member in circle])

    def has_ended(self, rank: int) -> bool:
        return rank in self._ended

    def whereabouts(self, rank: int) -> tuple[str, list[str]]:
        if rank in self.killed:
            return "is dead", []
        if rank in self._ended:
            return "has ended", []
        here = describe_frame(sys._current_frames().get(self.turns.thread_of(rank)))
        awaited = self.turns.waiting_for(rank)
        if isinstance(awaited, (Awaited, KeyWait)):
            where = f", at {here.where}" if here.where else ""
            peers = awaited.waited_for()
            whom = f" for {describe_ranks(peers)}" if peers else ""
            return f"waits{whom} in {awaited.describe()}{where}", here.stack
        return f"is in its own code, at {here.where}" if here.where else "has not begun", here.stack

    def describe_waits(self) -> str:
        """A line for each rank one of whose threads waits in a call, for errors."""
        frames = sys._current_frames()
        lines = []
        for rank in range(self.size):
            awaited = self.turns.waiting_for(rank)
            if isinstance(awaited, (Awaited, KeyWait)):
                lines.append(describe_wait(rank, awaited, frames.get(self.turns.thread_of(rank))))
        return "\n".join(["meanwhile:", *lines, ""]) if lines else ""

    def own_box(self) -> _native.BlackBox | None:
        return self._own[self.turns.rank].box()

    def last_calls(self, rank: int) -> list[str]:
        box = self._own[rank].box()
        return [] if box is None else describe_last_calls(read_box(box.contents()).records)

    # How ranks end.

    def end_if_forked(self, error: BaseException | None) -> None:
        """A rank's function has come back in a child that it has forked: the child ends here, as a program does.

        The thread that called fork() is all that there is of this process.
        """
        if not self.turns.is_forked:
            return
        code = 0
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1 if error.code else 0
            if error.code and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def complete(self, rank: int) -> None:
        """In the rank's own thread, when its function is through: waits for the calls that it has in flight."""
        for transport in self._own[rank].transports:
            transport.complete(patience())

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
                hubs = list(self._hubs.values())
            for hub in hubs:
                self._tell_end(hub, rank)

    def _tell_end(self, hub: Hub, rank: int) -> None:
        """Tells ranks that wait for a rank that has ended to make a group."""
        killed, words = self._ended[rank]
        status = int(signal.SIGKILL) if killed else _native.UNKNOWN_STATUS
        with hub.lock:
            hub.meeting.fail_without(rank, self.size, dead=killed, status=status, words=words)

    def _on_point(self, rank: int, number: int) -> None:
        let_happen(self._faults.get((rank, number), ()), self.turns.sleep, partial(self._kill, rank))

    def _kill(self, rank: int) -> None:
        self.killed.add(rank)
        for transport in self._own[rank].transports:
            transport.die(signal.SIGKILL)
        self._has_ended(rank, True, "")
        self.turns.park()

    def _break_deadlock(self) -> None:
        found = {rank: self.turns.waiting_for(rank) for rank in range(self.size)}
        waiting = {rank: awaited for rank, awaited in found.items() if isinstance(awaited, (Awaited, KeyWait))}
        frames = sys._current_frames()
        polling = [rank for rank in range(self.size) if self.turns.polls(rank)]
        places = {rank: frames[self.turns.thread_of(rank)] for rank in [*waiting, *polling]}
        deadlock = describe_deadlock(waiting, places, self._ended, polling)
        for rank in found:
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
        threads.this_thread.run = self
        self._torch_worlds.enter()
        if self._takes_turns:
            torch.set_num_threads(1)
        with torch.autograd.set_multithreading_enabled(False), contextlib.suppress(Unwound):
            self.turns.enter(rank)
            try:
                body()
            finally:
                self.turns.leave()

    # Threads that ranks start.

    def _heir(self) -> RunAs | None:
        if not self.turns.is_rank:
            return None
        return partial(self._run_as, self.turns.rank, self._torch_worlds.belongings())

    def _run_as(self, rank: int, belongings: Any, call: Callable[[], Any], errand: Errand) -> Any:
        """In a thread that the rank has started."""
        if self.turns.is_rank:
            return call()
        threads.this_thread.run = self
        self._torch_worlds.enter_as(belongings)
        self.turns.adopt(rank, errand)
        if self._takes_turns:
            torch.set_num_threads(1)
        try:
            return call()
        except Unwound:
            return None
        except Exception as error:
            # Python would print it, and the rank would not know.
            if isinstance(errand, Task) or not self.turns.has_communicated:
                raise
            if rank in self.killed:
                return None
            error.add_note(f"in the thread {threading.current_thread().name!r}, which the rank has started")
            self.failures_of_helpers.append((rank, error))
            return None
        finally:
            with contextlib.suppress(Unwound):
                self.turns.release()
            self._torch_worlds.leave()
            threads.this_thread.run = None
