"""Rank processes that are started once and run one function after another.

A pool is a world: each process joins it when it starts, and makes the world's other groups, which overlap. A process
that dies, raises or does not answer in time fails the run with what it was doing; the pool is then of no more use and
says so (`usable`). Processes leave when their pipe ends, so that none outlives the test run.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx.testing as pt
from forking import context
from phalanx.transports import segments

__all__ = ["GROUPS", "Member", "Pool", "PoolError", "ThreadsPool", "groups_of", "moved_on"]

# name -> (world size, ranks of the group in the world or None for all)
GROUPS: dict[str, tuple[int, list[int] | None]] = {
    "world of 1": (1, None),
    "world of 2": (2, None),
    "world of 3": (3, None),
    "world of 4": (4, None),
    "ranks 3 1 of 4": (4, [3, 1]),
    "ranks 0 2 3 of 4": (4, [0, 2, 3]),
}
# Groups that overlap those, for calls that are in flight on several at once.
BESIDE: dict[str, tuple[int, list[int] | None]] = {
    "ranks 1 0 of 2": (2, [1, 0]),
    "ranks 0 1 of 2": (2, [0, 1]),
    "ranks 2 0 1 of 3": (3, [2, 0, 1]),
    "ranks 1 2 of 3": (3, [1, 2]),
    "ranks 2 0 3 1 of 4": (4, [2, 0, 3, 1]),
    "ranks 1 2 of 4": (4, [1, 2]),
}
ANSWER_SECONDS = 90.0
# Before the pool gives up, so that it can show where the process was.
TRACEBACK_SECONDS = ANSWER_SECONDS - 5


def moved_on(size: int) -> list[int]:
    """The rank of each seat: no rank has the seat of its own number, and no two of three or more have swapped."""
    return [*range(1, size), 0]


class PoolError(AssertionError):
    """A rank died, raised or did not answer."""


def groups_of(world_size: int) -> dict[str, list[int]]:
    """All groups of a world, with their ranks in it."""
    return {
        name: list(range(size)) if ranks is None else ranks
        for name, (size, ranks) in (GROUPS | BESIDE).items()
        if size == world_size
    }


class Member:
    """What a function that runs in the pool sees of its group. `group` is None for the whole world.

    `memberships` has the members of all groups that the process is in, this one among them. `answers` is the folder of
    the oracle.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, notes: Path, answers: Path) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.answers = answers
        self.memberships: dict[str, Member] = {}
        self._notes = notes.open("w")

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group's object, for its own methods."""
        group = self.group or dist.group.WORLD
        assert group is not None
        return group

    def note(self, text: str) -> None:
        """Says what comes next: the first thing to know if this process does not come back."""
        self._notes.seek(0)
        self._notes.write(f"{text}\n")
        self._notes.truncate()
        self._notes.flush()

    def close(self) -> None:
        self._notes.close()


class Pool:
    """The processes of one world. With `backend=None` they join no group. `moves_seats`: seats are not ranks there."""

    def __init__(
        self, world_size: int, backend: str | None, folder: Path, answers: Path, *, moves_seats: bool = False
    ) -> None:
        self.world_size = world_size
        self.usable = True
        self._folder = folder
        self._pipes = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, world_size, backend, folder, answers, moves_seats),
                name=f"rank {rank} of {world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect("to join the world", ANSWER_SECONDS)

    def run(
        self, function: Callable[..., Any], group: str, *args: object, answer_seconds: float = ANSWER_SECONDS
    ) -> list[Any]:
        """Runs function(member, *args) on the ranks of the group, and gives what they return in rank order."""
        assert self.usable, "this pool has failed before"
        world_size, ranks = GROUPS[group]
        assert world_size == self.world_size
        for pipe in self._pipes:
            pipe.send((function, group, args, answer_seconds))
        results = self._collect(f"to run {function.__name__}{args}", answer_seconds)
        return [results[rank] for rank in (range(world_size) if ranks is None else ranks)]

    def close(self) -> None:
        """Ends the processes. Raises if one had to be killed."""
        for pipe in self._pipes:
            pipe.close()
        late = []
        for process in self._processes:
            process.join(timeout=20 if self.usable else 0)
            if process.is_alive():
                late.append(process.name)
                process.kill()
            process.join()
            process.close()
        if late and self.usable:
            raise PoolError(f"did not leave when told to: {', '.join(late)}")

    def _collect(self, what: str, seconds: float) -> list[Any]:
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        problems: list[str] = []
        while len(results) < self.world_size and not problems:
            waited = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in results}
            ready = multiprocessing.connection.wait(list(waited), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                problems = [f"rank {rank} did not answer: {self._last_words(rank)}" for rank in waited.values()]
                problems += [f"rank {rank} had answered: {answer}" for rank, answer in results.items() if answer]
            for pipe in [pipe for pipe in waited if pipe in ready]:
                rank = waited[pipe]
                try:
                    good, results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(timeout=10)
                    code = self._processes[rank].exitcode
                    problems.append(f"rank {rank} died with exit code {code}: {self._last_words(rank)}")
                else:
                    if not good:
                        problems.append(f"rank {rank} raised: {results[rank]}")
        if problems:
            self.usable = False
            for process in self._processes:
                process.kill()
            raise PoolError(f"told {what}, in a world of {self.world_size}:\n" + "\n".join(problems))
        return [results[rank] for rank in range(self.world_size)]

    def _last_words(self, rank: int) -> str:
        parts = []
        for path in sorted(self._folder.glob(f"rank{rank}.*")):
            text = path.read_text().strip()
            if text:
                parts.append(f"{path.suffix[1:]}: {text}")
        return "\n".join(parts) or "it left no notes"


class ThreadsPool:
    """The same for ranks that are threads of this process, each run in a world of its own."""

    def __init__(self, world_size: int, folder: Path, answers: Path) -> None:
        self.world_size = world_size
        self.usable = True
        self._folder = folder
        self._answers = answers
        self._seeds = itertools.count()

    def run(self, function: Callable[..., Any], group: str, *args: object) -> list[Any]:
        world_size, ranks = GROUPS[group]

        def body(rank: int, world: pt.World) -> Any:
            members = memberships(rank, world_size, self._folder / f"rank{rank}.notes", self._answers)
            try:
                return function(members[group], *args) if group in members else None
            finally:
                for member in members.values():
                    member.close()

        # A message of two gibibytes may take a minute where many programs share the machine.
        results = pt.run(body, world_size, seed=next(self._seeds), stuck_after=300)
        return [results[rank] for rank in (range(world_size) if ranks is None else ranks)]

    def close(self) -> None:
        pass


def _serve(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    world_size: int,
    backend: str | None,
    folder: Path,
    answers: Path,
    moves_seats: bool,
) -> None:
    torch.set_num_threads(1)
    if moves_seats:
        segments.ranks_by_seat = moved_on
    stacks = (folder / f"rank{rank}.stacks").open("w")
    faulthandler.enable(stacks)
    try:
        members = _join(rank, world_size, backend, folder, answers)
        pipe.send((True, None))
        while True:
            try:
                function, group, args, answer_seconds = pipe.recv()
            except EOFError:
                break
            member = members.get(group)
            faulthandler.dump_traceback_later(min(TRACEBACK_SECONDS, answer_seconds / 2), file=stacks)
            result = None if member is None else function(member, *args)
            faulthandler.cancel_dump_traceback_later()
            pipe.send((True, result))
        if backend is not None:
            dist.destroy_process_group()
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _join(rank: int, world_size: int, backend: str | None, folder: Path, answers: Path) -> dict[str, Member]:
    notes = folder / f"rank{rank}.notes"
    if backend is None:
        names = [name for name, (size, _) in GROUPS.items() if size == world_size]
        return {name: Member(None, rank, world_size, notes, answers) for name in names}
    dist.init_process_group(
        backend,
        init_method=f"file://{os.fspath(folder / 'store')}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    return memberships(rank, world_size, notes, answers)


def memberships(rank: int, world_size: int, notes: Path, answers: Path) -> dict[str, Member]:
    """Makes the groups of the world; those that this rank is in, by name."""
    members: dict[str, Member] = {}
    for name, (size, ranks) in (GROUPS | BESIDE).items():
        if size != world_size:
            continue
        group = None if ranks is None else dist.new_group(ranks, sort_ranks=False)
        if ranks is None:
            members[name] = Member(None, rank, world_size, notes, answers)
        elif rank in ranks:
            members[name] = Member(group, ranks.index(rank), len(ranks), notes, answers)
    for member in members.values():
        member.memberships = members
    return members
