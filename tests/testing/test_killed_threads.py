"""Ranks that are killed at a call of a thread that they have started: they are gone with all their threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx.testing as pt
from phalanx import PeerLost
from phalanx.testing.scheduler import Turns

Function = Callable[[int, pt.World], Any]


def start(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def reduce(group: dist.ProcessGroup | None = None) -> None:
    dist.all_reduce(torch.ones(1), group=group)


def reduce_twice(group: dist.ProcessGroup | None) -> None:
    reduce(group)
    reduce(group)


def reduce_and_tell(done: queue.Queue[None]) -> None:
    reduce()
    done.put(None)


def start_one_thread_after_another(rank: int, world: pt.World) -> None:
    for _ in range(3):
        start(reduce).join()


def give_an_executor_one_task_after_another(rank: int, world: pt.World) -> None:
    with ThreadPoolExecutor(1) as executor:
        for _ in range(3):
            executor.submit(reduce).result()


def start_a_thread_after_a_failure(rank: int, world: pt.World) -> None:
    try:
        start(reduce).join()
        reduce()
    finally:
        start(reduce).join()


def join_one_of_two_threads(rank: int, world: pt.World) -> None:
    groups = [dist.new_group(group_desc=name) for name in ("a", "b")]
    threads = [start(lambda group=group: reduce(group)) for group in groups]  # type: ignore[misc]
    for thread in reversed(threads):
        thread.join()
    reduce()


def wait_in_a_call_meanwhile(rank: int, world: pt.World) -> None:
    group = dist.new_group()
    thread = start(lambda: reduce_twice(group))
    try:
        reduce()
    finally:
        # A thread that comes after its rank has returned fails with an error of its own.
        thread.join()


def poll_meanwhile(rank: int, world: pt.World) -> None:
    group = dist.new_group()
    thread = start(lambda: reduce(group))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    while not work.is_completed():
        pass
    thread.join()


def wait_for_ever(rank: int, world: pt.World) -> None:
    """The thread is gone, and nothing ever comes."""
    done: queue.Queue[None] = queue.Queue()
    if rank == 1:
        start(lambda: reduce_and_tell(done))
        done.get()
    reduce()


FUNCTIONS: list[Function] = [
    start_one_thread_after_another,
    give_an_executor_one_task_after_another,
    start_a_thread_after_a_failure,
    join_one_of_two_threads,
    wait_in_a_call_meanwhile,
    poll_meanwhile,
    wait_for_ever,
]
SCHEDULES: list[dict[str, Any]] = [{}, {"seed": 1}, {"seed": 2}, {"schedule": "free"}]
IDS = ["in order", "seed 1", "seed 2", "free"]


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_is_killed_in_a_call_of_a_thread(function: Function, options: dict[str, Any]) -> None:
    with pytest.raises(PeerLost, match=r"rank 1 died \(killed by SIGKILL\)"):
        pt.run(function, 2, faults=pt.kill(1, at_call=1), stuck_after=10, **options)


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_the_threads_of_a_killed_rank_end_after_all_others(options: dict[str, Any]) -> None:
    events: list[str] = []

    def end_in_order(rank: int, world: pt.World) -> str:
        def communicate() -> None:
            try:
                world.store.set(f"came {rank}", "")
                dist.send(torch.ones(1), 1 - rank)
            finally:
                events.append(f"thread of {rank}")

        if rank == 0:
            world.store.get("came 1")
            events.append("rank 0")
            return "returned"
        try:
            start(communicate).join()
            reduce()
            return "returned"
        finally:
            events.append("rank 1")

    assert pt.run(end_in_order, 2, faults=pt.kill(1), stuck_after=10, **options) == ["returned", None]
    assert events == ["rank 0", "thread of 1", "rank 1"]


def test_a_rank_whose_thread_was_killed_has_no_failure() -> None:
    def fail_at_the_end(rank: int, world: pt.World) -> None:
        def communicate() -> None:
            try:
                dist.send(torch.ones(1), 0)
            finally:
                raise ValueError("of a dead rank")

        if rank == 1:
            start(communicate).join()
            raise ValueError("of a dead rank")

    assert pt.run(fail_at_the_end, 2, faults=pt.kill(1), stuck_after=10) == [None, None]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("options", SCHEDULES[:3], ids=IDS[:3])
def test_a_thread_that_comes_while_its_rank_is_being_killed(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not get the turn: it would keep it."""
    worlds: list[Turns] = []
    is_coming, has_come = threading.Event(), threading.Event()

    class Gate:
        """Lets the thread "late" in only once its rank is dead."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread().name == "late" and turns().has_communicated:
                is_coming.set()
                wait_until(lambda: 1 in turns()._dead)
            self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()
            if is_coming.is_set() and threading.current_thread().name == "late":
                has_come.set()

    class LateTurns(Turns):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._gate = Gate()  # type: ignore[assignment]
            worlds.append(self)

    def turns() -> Turns:
        return worlds[-1]

    def come_late(rank: int, world: pt.World) -> None:
        if rank == 1:
            threading.Thread(target=reduce, name="late").start()
            wait_until(is_coming.is_set)
            reduce()
        with pytest.raises(PeerLost):
            reduce()
        wait_until(has_come.is_set)

    monkeypatch.setattr("phalanx.testing.world.Turns", LateTurns)
    pt.run(come_late, 2, faults=pt.kill(1), stuck_after=30, **options)


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_two_killed_ranks_whose_threads_wait_for_ever(options: dict[str, Any]) -> None:
    def wait_for_a_dead_thread(rank: int, world: pt.World) -> None:
        done: queue.Queue[None] = queue.Queue()
        if rank:
            start(lambda: reduce_and_tell(done))
            done.get()
        reduce()

    with pytest.raises(PeerLost):
        pt.run(wait_for_a_dead_thread, 3, faults=[pt.kill(1), pt.kill(2)], stuck_after=10, **options)


@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_the_second_of_two_killed_ranks_is_interrupted(options: dict[str, Any]) -> None:
    """Not the first one, whose thread waits for ever."""

    def compute_for_ever(rank: int, world: pt.World) -> None:
        done: queue.Queue[None] = queue.Queue()
        if rank == 1:
            start(lambda: reduce_and_tell(done))
            done.get()
        try:
            reduce()
        finally:
            while rank == 2:
                pass

    with pytest.raises(PeerLost):
        pt.run(compute_for_ever, 3, faults=[pt.kill(1), pt.kill(2)], stuck_after=2, **options)
