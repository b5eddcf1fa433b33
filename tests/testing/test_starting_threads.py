"""Threads and tasks that a rank has started, and that have not begun to run: the others wait for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_helpers import SCHEDULES

import phalanx
import phalanx.testing as pt
from phalanx.testing.scheduling import Errand, Scheduling


def barrier_and_hurry(is_late: threading.Event) -> None:
    try:
        dist.barrier()
    finally:
        is_late.clear()


def barrier_beside_a_thread(send: Callable[[], None], is_late: threading.Event) -> None:
    is_late.set()
    thread = threading.Thread(target=send)
    thread.start()
    barrier_and_hurry(is_late)
    thread.join()


def barrier_beside_a_task(send: Callable[[], None], is_late: threading.Event) -> None:
    """The thread of the executor is there, and sleeps."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        is_late.set()
        executor.submit(send)
        barrier_and_hurry(is_late)


@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
@pytest.mark.parametrize("barrier", [barrier_beside_a_thread, barrier_beside_a_task])
def test_a_thread_that_is_slow_to_begin_is_waited_for(
    barrier: Callable[..., None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_late, adopt = threading.Event(), Scheduling.adopt

    def adopt_late(turns: Scheduling, rank: int, errand: Errand) -> None:
        """When all ranks wait, or are told that nobody can go on."""
        while is_late.is_set() and not all(turns.waiting_for(rank) for rank in range(turns.size)):
            os.sched_yield()
        adopt(turns, rank, errand)

    def send_and_receive(rank: int, world: pt.World) -> float:
        tensor = torch.zeros(1)
        if rank == 0:
            barrier(lambda: dist.send(torch.ones(1), 1), is_late)
        else:
            dist.recv(tensor, 0)
            dist.barrier()
        return tensor.item()

    monkeypatch.setattr(Scheduling, "adopt", adopt_late)
    assert pt.run(send_and_receive, 2, **options) == [0.0, 1.0]


class _SlowToStart(threading.Thread):
    """The system takes its time. Meanwhile whoever starts the thread sleeps, and nobody knows the thread's number."""

    def _bootstrap_inner(self) -> None:
        time.sleep(0.1)
        super()._bootstrap_inner()  # type: ignore[misc]


@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
def test_a_thread_that_the_system_starts_slowly_is_waited_for(options: dict[str, Any]) -> None:
    def pass_on(rank: int, world: pt.World) -> list[float]:
        tensor = torch.zeros(1)
        if rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
            return []
        got: list[float] = []
        waits = threading.Event()

        def receive() -> None:
            work = dist.irecv(tensor, 1)
            assert work is not None
            waits.set()
            work.wait(timedelta(seconds=60))
            got.append(tensor.item())

        receiver = threading.Thread(target=receive)
        receiver.start()
        waits.wait()
        sender = _SlowToStart(target=dist.send, args=(torch.ones(1), 1))
        sender.start()
        sender.join()
        receiver.join()
        return got

    assert pt.run(pass_on, 2, **options)[0] == [1.0]


def test_a_thread_that_could_not_be_started_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_twice(rank: int, world: pt.World) -> float:
        tensor = torch.ones(1)
        thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
        with monkeypatch.context() as patch:
            # Of Python 3.13, or of those before.
            names = ("_start_joinable_thread", "_start_new_thread")
            patch.setattr(threading, next(name for name in names if hasattr(threading, name)), _no_thread)
            with pytest.raises(RuntimeError, match="no thread left"):
                thread.start()
        thread.start()
        thread.join()
        return tensor.item()

    assert pt.run(start_twice, 2) == [2.0, 2.0]


def _no_thread(*_: object, **__: object) -> None:
    raise RuntimeError("no thread left")


@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
def test_two_threads_of_a_rank_make_groups_at_once(options: dict[str, Any]) -> None:
    def make_both(rank: int, world: pt.World) -> float:
        def make(name: str) -> torch.Tensor:
            tensor = torch.tensor([rank + 1.0])
            with phalanx.new_group(store=world.store, rank=rank, world_size=2, name=name) as group:
                group.all_reduce(tensor).wait()
            return tensor

        # Each rank begins with another group: so both are being made at the same time.
        with ThreadPoolExecutor(2) as executor:
            return sum(tensor.item() for tensor in executor.map(make, ["one", "other"] if rank else ["other", "one"]))

    assert pt.run(make_both, 2, **options) == [6.0, 6.0]
