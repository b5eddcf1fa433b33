"""Threads that ranks start: each belongs to the rank that has started it, and takes part in the turns."""

from __future__ import annotations

import asyncio
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx.testing as pt
from phalanx import CallTimeout, Deadlock, GroupError, InvalidCall, PeerLost

Function = Callable[[int, pt.World], Any]


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def reduce_in_thread(rank: int, world: pt.World) -> float:
    tensor = torch.tensor([rank + 1.0])
    in_thread(lambda: dist.all_reduce(tensor))
    dist.barrier()
    return tensor.item()


def reduce_in_thread_of_thread(rank: int, world: pt.World) -> float:
    tensor = torch.tensor([rank + 1.0])
    in_thread(lambda: in_thread(lambda: dist.all_reduce(tensor)))
    return tensor.item()


def reduce_in_executor(rank: int, world: pt.World) -> float:
    tensor = torch.tensor([rank + 1.0])
    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            executor.submit(dist.all_reduce, tensor).result()
    return tensor.item() / world.size


def reduce_in_asyncio(rank: int, world: pt.World) -> float:
    tensor = torch.tensor([rank + 1.0])

    async def reduce() -> None:
        await asyncio.to_thread(dist.all_reduce, tensor)
        await asyncio.sleep(0)

    asyncio.run(reduce())
    return tensor.item()


def reduce_for_a_queue(rank: int, world: pt.World) -> float:
    """A thread that makes all calls of the rank, which waits for it through queues."""
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    done: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        while (tensor := todo.get()) is not None:
            dist.all_reduce(tensor)
            done.put(tensor)

    thread = threading.Thread(target=serve)
    thread.start()
    tensor = torch.tensor([rank + 1.0])
    for _ in range(2):
        todo.put(tensor)
        tensor = done.get()
    todo.put(None)
    thread.join()
    return tensor.item() / world.size


def poll_for_a_thread(rank: int, world: pt.World) -> float:
    tensor = torch.tensor([rank + 1.0])
    thread = threading.Thread(target=lambda: dist.all_reduce(tensor))
    thread.start()
    while thread.is_alive():
        thread.join(0.0005)
    return tensor.item()


def make_a_group_in_a_thread(rank: int, world: pt.World) -> float:
    tensor = torch.tensor([rank + 1.0])

    def reduce() -> None:
        group = dist.new_group(group_desc="of a thread")
        assert dist.get_rank() == rank
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.get_future().wait()

    in_thread(reduce)
    return tensor.item()


FUNCTIONS: list[Function] = [
    reduce_in_thread,
    reduce_in_thread_of_thread,
    reduce_in_executor,
    reduce_in_asyncio,
    reduce_for_a_queue,
    poll_for_a_thread,
    make_a_group_in_a_thread,
]
SCHEDULES: list[dict[str, Any]] = [{}, {"seed": 3}, {"schedule": "free"}]


@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_calls_of_threads_that_ranks_have_started(function: Function, options: dict[str, Any]) -> None:
    assert pt.run(function, 3, **options) == [6.0] * 3


@pytest.mark.parametrize("function", FUNCTIONS)
def test_such_programs_can_be_repeated(function: Function) -> None:
    pt.run(function, 3, seed=5, check=True)


def receive_in_threads(rank: int, world: pt.World) -> None:
    got: list[int] = []

    def receive() -> None:
        tensor = torch.zeros(1)
        dist.recv(tensor)
        got.append(int(tensor.item()))

    for _ in range(3):
        if rank == 0:
            in_thread(receive)
        elif not got:
            in_thread(lambda: dist.send(torch.tensor([float(rank)]), 0))
            got.append(rank)
    dist.barrier()
    if rank == 0:
        raise ValueError(f"came as {got}")


def test_a_replay_string_repeats_the_schedule_of_threads() -> None:
    texts = set()
    for seed in range(4):
        with pytest.raises(ValueError, match="came as") as failed:
            pt.run(receive_in_threads, 4, seed=seed)
        texts.add(str(failed.value))
        (line,) = (note for note in failed.value.__notes__ if note.startswith("again:"))
        replay = line.partition("replay=")[2].strip("')")
        with pytest.raises(ValueError, match="came as") as again:
            pt.run(receive_in_threads, 4, replay=replay)
        assert str(again.value) == str(failed.value)
    assert len(texts) > 1


def test_threads_that_do_not_communicate_are_left_alone() -> None:
    def compute(rank: int, world: pt.World) -> float:
        idle = threading.Event()
        thread = threading.Thread(target=idle.wait)
        thread.start()
        try:
            tensor = torch.tensor([rank + 1.0])
            dist.all_reduce(tensor)
            return tensor.item()
        finally:
            idle.set()
            thread.join()

    assert pt.run(compute, 3) == [6.0] * 3


@pytest.mark.parametrize("options", SCHEDULES[:2], ids=["in order", "random"])
def test_a_deadlock_of_threads_is_found(options: dict[str, Any]) -> None:
    def wait_for_each_other(rank: int, world: pt.World) -> None:
        in_thread(lambda: dist.recv(torch.zeros(1), 1 - rank))

    with pytest.raises(Deadlock, match=r"rank 0 waits for rank 1 in recv.*test_helpers.py"):
        pt.run(wait_for_each_other, 2, **options)


@contextmanager
def threads_that_never_communicate(computes: bool) -> Iterator[Callable[[], None]]:
    """Gives a function that starts such a thread, which polls or computes until the end."""
    stopped = threading.Event()
    threads: list[threading.Thread] = []

    def stay_awake() -> None:
        while not stopped.is_set() if computes else not stopped.wait(0.001):
            pass

    def start() -> None:
        threads.append(threading.Thread(target=stay_awake))
        threads[-1].start()

    try:
        yield start
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("computes", [False, True], ids=["polling", "computing"])
@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
def test_threads_that_stay_awake_are_not_waited_for_in_the_end(options: dict[str, Any], computes: bool) -> None:
    with threads_that_never_communicate(computes) as start:

        def reduce(rank: int, world: pt.World) -> float:
            start()
            tensor = torch.tensor([rank + 1.0])
            dist.all_reduce(tensor)
            return tensor.item()

        assert pt.run(reduce, 2, stuck_after=5, **options) == [3.0] * 2


@pytest.mark.parametrize("computes", [False, True], ids=["polling", "computing"])
@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
def test_threads_that_stay_awake_hide_no_deadlock(options: dict[str, Any], computes: bool) -> None:
    with threads_that_never_communicate(computes) as start:

        def wait_for_each_other(rank: int, world: pt.World) -> None:
            start()
            dist.recv(torch.zeros(1), 1 - rank)

        with pytest.raises(Deadlock, match="rank 0 waits for rank 1 in recv"):
            pt.run(wait_for_each_other, 2, stuck_after=6, **options)


def test_threads_that_poll_hold_up_no_timeout() -> None:
    with threads_that_never_communicate(computes=False) as start:

        def wait_in_vain(rank: int, world: pt.World) -> None:
            start()
            if rank == 0:
                with pytest.raises(CallTimeout):
                    dist.recv(torch.zeros(1), 1)
            else:
                world.store.get("done")

            world.store.set("done", "")

        pt.run(wait_in_vain, 2, stuck_after=8, timeout=timedelta(hours=1))


@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
def test_a_thread_that_computes_first_is_waited_for(options: dict[str, Any]) -> None:
    def send_what_was_computed(rank: int, world: pt.World) -> float:
        tensor = torch.zeros(1)

        def compute_and_send() -> None:
            total = sum(number % 7 for number in range(5_000_000))
            dist.send(torch.tensor([float(total)]), 1)

        if rank == 0:
            threading.Thread(target=compute_and_send).start()
        else:
            dist.recv(tensor, 0)
        dist.barrier()
        return tensor.item()

    assert pt.run(send_what_was_computed, 2, **options)[1] > 1_000_000


def test_a_task_that_was_cancelled_hides_no_deadlock() -> None:
    """Nor does one that no thread of the executor can begin with."""
    goes_on = threading.Event()

    def wait_for_each_other(rank: int, world: pt.World) -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(goes_on.wait)
            executor.submit(dist.send, torch.ones(1), 1 - rank).cancel()
            executor.submit(dist.send, torch.ones(1), 1 - rank)
            try:
                dist.recv(torch.zeros(1), 1 - rank)
            finally:
                goes_on.set()
                executor.shutdown(cancel_futures=True)

    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 in recv"):
        pt.run(wait_for_each_other, 2)


def test_an_end_of_a_thread_lets_a_deadlock_be_found_where_ranks_run_freely() -> None:
    goes_on = threading.Event()

    def wait_for_each_other(rank: int, world: pt.World) -> None:
        threading.Thread(target=goes_on.wait).start()
        try:
            dist.recv(torch.zeros(1), 1 - rank)
        finally:
            goes_on.set()

    with pytest.raises(Deadlock, match="rank 0 waits for rank 1 in recv"):
        pt.run(wait_for_each_other, 2, schedule="free", stuck_after=10)


def test_ranks_that_share_an_executor_are_told_which_calls_are_pending() -> None:
    executor = ThreadPoolExecutor(1)

    def reduce(rank: int, world: pt.World) -> None:
        executor.submit(dist.all_reduce, torch.ones(1)).result()

    with executor, pytest.raises(pt.Stuck, match="did not communicate") as failed:
        pt.run(reduce, 2, stuck_after=1)
    assert re.search(r"\nmeanwhile:\n  rank [01] waits for rank [01] in all_reduce, seq 1", str(failed.value))


WAIT_FOR_THREADS = "let the rank wait for the threads that it has started"


def test_a_rank_that_does_not_wait_for_its_thread_is_told_so() -> None:
    def forget(rank: int, world: pt.World) -> None:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(1))).start()

    with pytest.raises(GroupError, match=WAIT_FOR_THREADS) as failed:
        pt.run(forget, 2)
    assert failed.value.code == "GROUP:CLOSED"


def test_a_rank_that_does_not_wait_for_the_call_of_its_thread_is_told_so() -> None:
    def forget(rank: int, world: pt.World) -> None:
        has_begun = threading.Event()

        def receive() -> None:
            work = dist.irecv(torch.zeros(1), 1)
            has_begun.set()
            assert work is not None
            work.wait()

        if rank == 0:
            threading.Thread(target=receive).start()
            has_begun.wait()
        dist.barrier()
        if rank == 1:
            world.store.get("never")

    with pytest.raises(GroupError, match=WAIT_FOR_THREADS) as failed:
        pt.run(forget, 2)
    assert failed.value.op == "recv"


def test_an_exception_in_a_thread_that_has_communicated_fails_the_run() -> None:
    def raise_in_thread(rank: int, world: pt.World) -> None:
        def reduce() -> None:
            dist.all_reduce(torch.ones(1))
            raise ValueError(f"after the call of rank {rank}")

        in_thread(reduce)

    with pytest.raises(ValueError, match="after the call of rank 0") as failed:
        pt.run(raise_in_thread, 2)
    assert "which the rank has started" in "\n".join(failed.value.__notes__)


def test_a_rank_that_is_killed_in_a_call_of_its_thread() -> None:
    with pytest.raises(PeerLost, match="rank 1"):
        pt.run(reduce_in_thread, 2, faults=pt.kill(1, at_call=1))


@pytest.mark.parametrize("options", SCHEDULES, ids=["in order", "random", "free"])
def test_a_thread_that_no_rank_has_started_fails_the_run(options: dict[str, Any]) -> None:
    """The rank does not look at what becomes of the call."""
    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    errors: list[BaseException] = []

    def serve() -> None:
        for done in iter(todo.get, None):
            try:
                dist.all_reduce(torch.ones(1))
            except BaseException as error:
                errors.append(error)
            done.set()

    thread = threading.Thread(target=serve, name="from before")
    thread.start()

    def ask_the_thread(rank: int, world: pt.World) -> None:
        done = threading.Event()
        todo.put(done)
        done.wait()

    try:
        with pytest.raises(InvalidCall, match="'from before', which no rank has started") as failed:
            pt.run(ask_the_thread, 2, **options)
    finally:
        todo.put(None)
        thread.join()
    assert failed.value.code == "INVALID:THREAD"
    assert "let the rank start the thread" in str(failed.value)
    assert [type(error) for error in errors] == [InvalidCall] * 2


def test_a_thread_that_outlives_the_run_is_told_so() -> None:
    goes_on = threading.Event()
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    threads: list[threading.Thread] = []

    def leave_a_thread_behind(rank: int, world: pt.World) -> None:
        group = world.group

        def call_later() -> None:
            goes_on.wait()
            try:
                group.barrier()
            except BaseException as error:
                errors.put(error)

        threads.append(threading.Thread(target=call_later))
        threads[-1].start()

    pt.run(leave_a_thread_behind, 1)
    goes_on.set()
    threads[0].join()
    assert "before the run has ended" in str(errors.get(timeout=30))
