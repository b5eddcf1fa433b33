"""Random programs that are right, and in which ranks wait a lot: in overlapping groups, messages, threads and futures.

A program is a list of steps in one order for all. Each rank has two threads, of which the second one has a group of its
own; each thread makes its sides of the steps in that order, and sometimes waits until the other one has got as far. A
step never needs one that comes after it, so no schedule makes a program hang.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Step", "draw_groups", "draw_steps", "play"]

_NUM_GROUPS = 3
_NUM_STEPS = 30
_NUM_THREADS = 2
_LONG = 20_000
# Seconds of a delay.
_MOST_DELAY = 0.06


class Step(NamedTuple):
    number: int
    kind: str  # collective, message, delay, meeting of threads
    group: int  # the last one belongs to the second thread
    ranks: tuple[int, ...]  # those that have a side; of a message the sender first
    seed: str

    def chance(self, rank: int) -> random.Random:
        return random.Random(f"{self.seed} {self.number} {rank}")

    @property
    def is_long(self) -> bool:
        return self.chance(-1).random() < 0.5


def draw_groups(seed: int, size: int) -> list[list[int]]:
    """The members of each group. All ranks are in the last one."""
    chance = random.Random(seed)
    groups = [sorted(chance.sample(range(size), chance.randint(2, size))) for _ in range(_NUM_GROUPS)]
    return [*groups, list(range(size))]


def draw_steps(seed: str, groups: Sequence[Sequence[int]]) -> list[Step]:
    chance = random.Random(seed)
    steps = []
    for number in range(_NUM_STEPS):
        kind = chance.choices(["collective", "message", "delay", "meeting"], [4, 4, 1, 1])[0]
        group = chance.randrange(len(groups))
        members = list(groups[group])
        ranks = {"collective": members, "message": chance.sample(members, 2)}.get(kind, [chance.choice(members)])
        steps.append(Step(number, kind, group, tuple(ranks), seed))
    return steps


class _Progress:
    """How far the threads of a rank have got. Who waits sleeps on a lock, without a timeout."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reached = [-1] * _NUM_THREADS

    def reach(self, thread: int, number: int) -> None:
        with self._changed:
            self._reached[thread] = number
            self._changed.notify_all()

    def wait(self, thread: int, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._reached[thread] >= number)


def play(rank: int, steps: Sequence[Step], groups: Sequence[dist.ProcessGroup]) -> None:
    """A rank's sides of all steps. Raises what went wrong in any of its threads."""
    progress, errors = _Progress(), list[BaseException]()
    second = threading.Thread(target=_play_one, args=(rank, 1, steps, groups, progress, errors))
    second.start()
    _play_one(rank, 0, steps, groups, progress, errors)
    second.join()
    if errors:
        raise errors[0]


def _play_one(
    rank: int,
    thread: int,
    steps: Sequence[Step],
    groups: Sequence[dist.ProcessGroup],
    progress: _Progress,
    errors: list[BaseException],
) -> None:
    later: list[tuple[int, Callable[[], None]]] = []
    try:
        for step in steps:
            progress.reach(thread, step.number - 1)
            for due in [each for each in later if each[0] <= step.number]:
                later.remove(due)
                due[1]()
            is_own = (step.group == len(groups) - 1) == (thread == 1)
            if rank not in step.ranks or not is_own:
                continue
            chance = step.chance(rank)
            finish = _make(
                step, rank, groups[step.group], chance, functools.partial(progress.wait, 1 - thread, step.number - 1)
            )
            if finish is not None:
                later.append((step.number + chance.randint(1, 6), finish))
        for _, finish in later:
            finish()
    except BaseException as error:
        errors.append(error)
    finally:
        progress.reach(thread, len(steps))


def _make(
    step: Step, rank: int, group: dist.ProcessGroup, chance: random.Random, meet: Callable[[], None]
) -> Callable[[], None] | None:
    """Carries out a side of a step; returns what is left to be done later."""
    if step.kind == "delay":
        time.sleep(chance.random() * _MOST_DELAY)
        return None
    if step.kind == "meeting":
        meet()
        return None
    tensor = torch.full((_LONG if step.is_long else 4,), float(step.number))
    expected = step.number * len(step.ranks) if step.kind == "collective" else step.number
    is_async = chance.random() < 0.5
    work: Any
    if step.kind == "collective":
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
    elif rank == step.ranks[0]:
        work = dist.isend(tensor, step.ranks[1], group=group, tag=step.number)
    else:
        tensor.zero_()
        source = None if chance.random() < 0.3 else step.ranks[0]
        work = dist.irecv(tensor, source, group=group, tag=step.number)
    by_future = chance.random() < 0.3

    def finish() -> None:
        if work is not None:
            work.get_future().wait() if by_future else work.wait()
        assert tensor[-1] == expected

    if is_async:
        return finish
    finish()
    return None
