"""Ranks that run when they like: nobody is told of a deadlock that is none."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt


def test_ranks_that_are_late() -> None:
    def work(rank: int, world: pt.World) -> None:
        dist.barrier()
        dist.barrier()

    for _ in range(30):
        pt.run(work, 2, schedule="free", faults=[pt.delay(1, at_call=2, seconds=0.02)])


def test_waits_that_run_out() -> None:
    def work(rank: int, world: pt.World) -> None:
        if rank == 1:
            dist.recv(torch.ones(1), 0)
            dist.send(torch.ones(1), 0)
            return
        receiving = dist.irecv(torch.ones(1), 1)
        assert receiving is not None
        with pytest.raises(phalanx.CallTimeout):
            receiving.wait(timedelta(seconds=0.02))
        dist.send(torch.ones(1), 1)
        receiving.wait()

    for _ in range(30):
        pt.run(work, 2, schedule="free")


def _until_it_waits(threads: dict[int, int], rank: int) -> None:
    """Until the rank's thread is known, and sleeps until others change something."""
    deadline = time.monotonic() + 10
    while rank not in threads or not _sleeps(sys._current_frames()[threads[rank]]):
        assert time.monotonic() < deadline
        os.sched_yield()


def _sleeps(frame: FrameType) -> bool:
    return frame.f_code is threading.Condition.wait.__code__ and "_wait_for_change" in str(frame.f_back)


def test_a_callback_that_others_wait_for() -> None:
    threads: dict[int, int] = {}
    called = threading.Event()

    def work(rank: int, world: pt.World) -> None:
        first, second = dist.new_group(), dist.new_group()
        if rank == 0:
            future = dist.all_reduce(torch.ones(1), group=first, async_op=True).get_future()

            def go_on(_: object) -> None:
                called.set()
                _until_it_waits(threads, 1)
                world.store.set("k", "1")

            future.then(go_on)
            threads[rank] = threading.get_ident()
        else:
            # The other one is called back in the barrier.
            _until_it_waits(threads, 0)
            dist.all_reduce(torch.ones(1), group=first)
            assert called.wait(10)
            threads[rank] = threading.get_ident()
            world.store.get("k")
        dist.barrier(group=second)

    pt.run(work, 2, schedule="free")


def test_ranks_that_wait_for_a_time_are_not_stuck() -> None:
    faults = [pt.delay(1, at_call=1, seconds=4.0)]
    pt.run(lambda rank, world: dist.barrier(), 2, schedule="free", faults=faults, stuck_after=3.0)


def test_a_deadlock_is_told_once() -> None:
    def work(rank: int, world: pt.World) -> None:
        if rank == 2:
            return
        with pytest.raises(phalanx.Deadlock):
            dist.recv(torch.ones(1), 1 - rank)
        for number in range(20):
            world.store.set(f"{rank}/{number}", "")
            world.store.get(f"{1 - rank}/{number}")

    for _ in range(5):
        pt.run(work, 3, schedule="free")
