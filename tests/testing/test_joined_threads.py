"""Ranks that wait for threads of their own while these wait in calls, out of the scheduler's reach."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx.testing as pt
from phalanx import CallTimeout, Deadlock, GroupError, PeerLost
from phalanx.testing.free import Free
from phalanx.testing.scheduler import Turns
from phalanx.testing.world import ThreadsRun

Function = Callable[[int, pt.World], Any]


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def reduce(rank: int, times: int = 1, group: dist.ProcessGroup | None = None) -> float:
    """The sum of the ranks' numbers from 1 on."""
    for _ in range(times):
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
    return tensor.item()


def join_while_the_thread_waits(rank: int, world: pt.World) -> list[float]:
    group, sums = dist.new_group(), []
    thread = start(lambda: sums.append(reduce(rank, 3, group)))
    sums.append(reduce(rank))
    thread.join()
    return sums


def join_with_a_call_in_flight(rank: int, world: pt.World) -> list[float]:
    """Only the thread makes calls until it has ended."""
    group, own, sums = dist.new_group(), torch.tensor([rank + 1.0]), []
    work = dist.all_reduce(own, async_op=True)
    start(lambda: sums.append(reduce(rank, 3, group))).join()
    assert work is not None
    work.wait()
    return [*sums, own.item()]


def join_one_of_two_threads(rank: int, world: pt.World) -> list[float]:
    """The one that is not joined ends first."""
    sums: list[float] = []
    long, short = [dist.new_group(group_desc=name) for name in ("long", "short")]
    threads = [
        start(lambda: sums.append(reduce(rank, 4, long))),
        start(lambda: sums.append(reduce(rank, 1, short))),
    ]
    for thread in threads:
        thread.join()
    return sums


def take_results_of_an_executor(rank: int, world: pt.World) -> list[float]:
    groups = [dist.new_group(group_desc=name) for name in ("a", "b")]
    with ThreadPoolExecutor(2) as executor:
        tasks = [executor.submit(reduce, rank, 2, group) for group in groups]
        reduce(rank)
        return [task.result() for task in as_completed(tasks)]


def wait_in_a_call_while_the_thread_waits_for_more(rank: int, world: pt.World) -> list[float]:
    """The thread has the turn when it comes to wait for the rank, which waits in a call."""
    todo: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    done: queue.Queue[float] = queue.Queue()
    group = dist.new_group()

    def serve() -> None:
        for times in iter(todo.get, None):
            done.put(reduce(rank, times, group))

    thread = start(serve)
    todo.put(1)
    own = reduce(rank, 2)
    todo.put(2)
    sums = [own, done.get(), done.get()]
    todo.put(None)
    thread.join()
    return sums[1:]


def wait_for_an_event(rank: int, world: pt.World) -> list[float]:
    """Which a second thread sets, that waits for the first one."""
    group, sums, is_done = dist.new_group(), [], threading.Event()
    first = start(lambda: sums.append(reduce(rank, 2, group)))

    def tell() -> None:
        first.join()
        is_done.set()

    second = start(tell)
    sums.append(reduce(rank))
    is_done.wait()
    second.join()
    return sums


def join_before_peers_come(rank: int, world: pt.World) -> list[float]:
    """One rank joins at once; the others first make calls of their own."""
    group, pair = dist.new_group(), dist.new_group(range(1, world.size))
    if rank == 0:
        sums: list[float] = []
        start(lambda: sums.extend(reduce(rank, 1, group) for _ in range(2))).join()
        return sums
    reduce(rank, 3, pair)
    return [reduce(rank, 1, group) for _ in range(2)]


FUNCTIONS: list[Function] = [
    join_while_the_thread_waits,
    join_with_a_call_in_flight,
    join_one_of_two_threads,
    take_results_of_an_executor,
    wait_in_a_call_while_the_thread_waits_for_more,
    wait_for_an_event,
    join_before_peers_come,
]
SCHEDULES: list[dict[str, Any]] = [{}, {"seed": 1}, {"seed": 2}, {"seed": 3}, {"schedule": "free"}]
IDS = ["in order", "seed 1", "seed 2", "seed 3", "free"]


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_ranks_that_wait_for_threads_that_wait(function: Function, options: dict[str, Any]) -> None:
    assert pt.run(function, 3, stuck_after=60, **options) == [[6.0] * 2] * 3


@pytest.mark.parametrize("function", [join_with_a_call_in_flight, join_before_peers_come])
def test_such_programs_can_be_repeated(function: Function) -> None:
    """Where a rank calls while its thread runs, the order of their calls is the system's."""
    for seed in range(5):
        pt.run(function, 3, seed=seed, check=True, stuck_after=60)


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_a_deadlock_of_a_thread_that_the_rank_joins_is_found(options: dict[str, Any]) -> None:
    def join_in_vain(rank: int, world: pt.World) -> None:
        group = dist.new_group()
        thread = start(lambda: dist.recv(torch.zeros(1), 1 - rank, group=group))
        dist.barrier()
        thread.join()

    with pytest.raises(Deadlock, match=r"rank 0 waits for rank 1 in recv.*test_joined_threads.py"):
        pt.run(join_in_vain, 2, stuck_after=60, **options)


@pytest.mark.parametrize("options", SCHEDULES[:4], ids=IDS[:4])
def test_a_timeout_ends_the_call_of_a_thread_that_the_rank_joins(options: dict[str, Any]) -> None:
    def join_until_the_timeout(rank: int, world: pt.World) -> list[str]:
        group, errors = dist.new_group(timeout=timedelta(hours=1)), []

        def receive() -> None:
            with pytest.raises(CallTimeout) as failed:
                dist.recv(torch.zeros(1), 1, group=group)
            errors.append(failed.value.code)

        thread = start(receive) if rank == 0 else None
        dist.barrier()
        if thread is None:
            world.store.get("done")
        else:
            thread.join()
            world.store.set("done", "")
        return errors

    assert pt.run(join_until_the_timeout, 2, stuck_after=60, **options) == [["MISSING"], []]


@pytest.mark.parametrize("options", SCHEDULES[:4], ids=IDS[:4])
def test_a_rank_that_waits_for_a_child_is_not_taken_for_one_that_waits_for_its_thread(options: dict[str, Any]) -> None:
    """Time does not jump to the timeout of the thread's call meanwhile."""

    def wait_for_a_child(rank: int, world: pt.World) -> float:
        group, tensor = dist.new_group(timeout=timedelta(hours=1)), torch.zeros(1)
        if rank == 1:
            dist.barrier()
            world.store.get("go")
            dist.send(torch.ones(1), 0, group=group)
            return 1.0
        thread = start(lambda: dist.recv(tensor, 1, group=group))
        dist.barrier()
        subprocess.run([sys.executable, "-c", "import asyncio"], check=True)
        world.store.set("go", "")
        thread.join()
        return tensor.item()

    assert pt.run(wait_for_a_child, 2, stuck_after=60, **options) == [1.0, 1.0]


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_threads_that_have_ended_are_forgotten(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The work per call does not grow with the number of threads and tasks that came before."""
    schedulers: list[Turns | Free] = []
    enter = ThreadsRun.__enter__

    def enter_and_note(world: ThreadsRun) -> ThreadsRun:
        schedulers.append(world.turns)
        return enter(world)

    def have_many_threads(rank: int, world: pt.World) -> int:
        with ThreadPoolExecutor(1) as executor:
            for _ in range(5):
                assert executor.submit(reduce, rank).result() == 6.0
                start(lambda: reduce(rank)).join()
        dist.barrier()
        return len(schedulers[0]._strands)

    monkeypatch.setattr(ThreadsRun, "__enter__", enter_and_note)
    assert pt.run(have_many_threads, 3, stuck_after=60, **options) == [3] * 3


def test_ranks_look_at_each_other_only_while_they_have_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    is_alone = threading.Event()
    take_over = Turns._take_over

    def take_over_and_note(turns: Turns) -> int | None:
        looks.append(is_alone.is_set())
        return take_over(turns)

    def have_a_thread(rank: int, world: pt.World) -> None:
        start(lambda: reduce(rank)).join()
        dist.barrier()
        dist.barrier()
        if rank == 1:
            is_alone.set()
            # Many times what ranks with threads sleep between two looks.
            time.sleep(0.1)
        dist.barrier()

    monkeypatch.setattr(Turns, "_take_over", take_over_and_note)
    pt.run(have_a_thread, 3, stuck_after=60)
    assert looks
    assert not any(looks)


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_a_thread_that_waits_for_more_hides_no_failure(options: dict[str, Any]) -> None:
    """It has the turn when all ranks have ended, and never gets more."""
    todo: queue.SimpleQueue[None] = queue.SimpleQueue()
    threads = []

    def leave_a_thread_behind(rank: int, world: pt.World) -> None:
        has_begun = threading.Event()

        def serve() -> None:
            work = dist.irecv(torch.zeros(1), 1)
            has_begun.set()
            assert work is not None
            with pytest.raises((GroupError, PeerLost)):
                work.wait()
            todo.get()

        if rank == 0:
            threads.append(start(serve))
            has_begun.wait()
        dist.barrier()
        if rank == 0:
            raise ValueError("of rank 0")

    try:
        with pytest.raises(ValueError, match="of rank 0"):
            pt.run(leave_a_thread_behind, 2, stuck_after=60, **options)
    finally:
        todo.put(None)
        threads[0].join()
