"""What a group counts of its calls, between processes and between threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, World, values

import phalanx
import phalanx.testing as pt
from default_group import default_group
from phalanx import OpStatistics

RANKS = 3
LONG = 300_000  # elements; does not fit into the staging memory at once
Totals = dict[str, tuple[int, int]]
Run = Callable[..., list[Any]]


def totals() -> Totals:
    """Calls and bytes by op."""
    return {op: (one.calls, one.bytes) for op, one in default_group().statistics().items()}


def _in_process(here: Here, function: Callable[..., Any], *args: object) -> Any:
    here.init()
    return function(here.rank, *args)


def run_processes(folder: Path) -> Run:
    return lambda function, size, *args: values(_in_process, size, folder, function, *args)


def run_threads(folder: Path) -> Run:
    return lambda function, size, *args: pt.run(lambda rank, world: function(rank, *args), size)


@pytest.fixture(params=[run_processes, run_threads], ids=["processes", "threads"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Runs function(rank, *args) on each rank of a world."""
    made: Run = request.param(tmp_path)
    return made


def _one(size: int = 3) -> torch.Tensor:
    return torch.ones(size)


def _ones(num: int = 1) -> list[torch.Tensor]:
    return [_one() for _ in range(num)]


# Each op with three float32 numbers per rank, and the bytes that it has on the root (rank 0) and on the others.
OPS: dict[str, tuple[str, Callable[[int, bool], Any], int, int]] = {
    "all_reduce": ("all_reduce", lambda rank, later: dist.all_reduce(_one(), async_op=later), 12, 12),
    "all_reduce, strided": (
        "all_reduce",
        lambda rank, later: dist.all_reduce(torch.ones(6)[::2], async_op=later),
        12,
        12,
    ),
    "reduce": ("reduce", lambda rank, later: dist.reduce(_one(), 0, async_op=later), 12, 12),
    "broadcast": ("broadcast", lambda rank, later: dist.broadcast(_one(), 0, async_op=later), 12, 12),
    "all_gather": ("all_gather", lambda rank, later: dist.all_gather(_ones(RANKS), _one(), async_op=later), 36, 36),
    "gather": (
        "gather",
        lambda rank, later: dist.gather(_one(), None if rank else _ones(RANKS), 0, async_op=later),
        36,
        12,
    ),
    "scatter": (
        "scatter",
        lambda rank, later: dist.scatter(_one(), None if rank else _ones(RANKS), 0, async_op=later),
        36,
        12,
    ),
    "reduce_scatter": (
        "reduce_scatter",
        lambda rank, later: dist.reduce_scatter(_one(), _ones(RANKS), async_op=later),
        36,
        36,
    ),
    "all_to_all": (
        "all_to_all",
        lambda rank, later: dist.all_to_all(_ones(RANKS), _ones(RANKS), async_op=later),
        36,
        36,
    ),
    # The first rank gives all and gets one third.
    "all_to_all, uneven": (
        "all_to_all",
        lambda rank, later: dist.all_to_all_single(
            torch.ones(3),
            torch.ones(0 if rank else 9),
            [3, 0, 0],
            [0, 0, 0] if rank else [3, 3, 3],
            async_op=later,
        ),
        36,
        12,
    ),
    "barrier": ("barrier", lambda rank, later: dist.barrier(async_op=later), 0, 0),
    "coalesced": (
        "all_reduce",
        lambda rank, later: default_group().allreduce_coalesced(_ones(4)).wait(),
        48,
        48,
    ),
    "monitored_barrier": ("barrier", lambda rank, later: default_group().monitored_barrier(), 0, 0),
}


def _call_every_op(rank: int, later: bool) -> list[tuple[str, Totals]]:
    """What is counted after each call, beside what was before."""
    seen = []
    for name, (_, call, *_) in OPS.items():
        work = call(rank, later)
        if later and work is not None and work is not True:
            work.wait()
        seen.append((name, totals()))
    return seen


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_every_collective(run: Run, later: bool) -> None:
    for rank, seen in enumerate(run(_call_every_op, RANKS, later)):
        expected: Totals = {}
        for name, counted in seen:
            op, _, on_root, on_others = OPS[name]
            calls, num_bytes = expected.get(op, (0, 0))
            expected[op] = (calls + 1, num_bytes + (on_others if rank else on_root))
            assert counted == expected, f"rank {rank}, after {name}"


def _exchange(rank: int) -> Totals:
    small, large = torch.ones(3), torch.ones(LONG)
    peer = 1 - rank
    if rank == 0:
        dist.send(small, 1)
        dist.send(large, 1)
        dist.send(small, 1, tag=4)
    else:
        dist.recv(small, 0)
        dist.recv(large, 0)
        assert dist.recv(small, tag=4) == 0
    group = default_group()
    works = [group.send([large], peer, 9), group.recv([torch.empty(LONG)], peer, 9)]
    works += [group.send([small], rank, 2), group.recv([torch.empty(3)], rank, 2)]
    for work in works:
        work.wait()
    return totals()


def test_messages(run: Run) -> None:
    few, many = 12, 4 * LONG
    assert run(_exchange, 2) == [
        {"send": (5, 3 * few + 2 * many), "recv": (2, few + many)},
        {"recv": (5, 3 * few + 2 * many), "send": (2, few + many)},
    ]


def _reduce_sparse(rank: int) -> Totals:
    tensor = torch.zeros(5)
    tensor[rank] = 1.0
    dist.all_reduce(tensor.to_sparse())
    return totals()


def test_a_sparse_all_reduce_counts_as_the_calls_that_it_is_made_of(run: Run) -> None:
    assert [set(counted) for counted in run(_reduce_sparse, 2)] == [{"all_gather"}] * 2


def _use_alone(rank: int) -> tuple[Totals, list[OpStatistics]]:
    dist.all_reduce(_one())
    dist.barrier()
    group = default_group()
    work = group.recv([torch.empty(3)], 0, 0)
    group.send(_ones(), 0, 0).wait()
    work.wait()
    return totals(), list(group.statistics().values())


def test_a_group_of_one_rank(run: Run) -> None:
    ((counted, statistics),) = run(_use_alone, 1)
    assert counted == {"all_reduce": (1, 12), "barrier": (1, 0), "recv": (1, 12), "send": (1, 12)}
    assert all(one.waiting >= 0 and one.moving >= 0 for one in statistics)


def _fail(rank: int) -> tuple[Totals, Totals]:
    dist.all_reduce(_one())
    with pytest.raises(phalanx.InvalidCall):
        dist.broadcast(_one(), 7)
    before = totals()
    with pytest.raises(phalanx.Mismatch):
        dist.all_reduce(_one(4 + rank))
    with pytest.raises(phalanx.Mismatch):
        dist.all_reduce(_one())
    return before, totals()


def test_a_call_that_fails_counts_without_its_bytes_and_a_refused_one_does_not_count(run: Run) -> None:
    assert run(_fail, 2) == [({"all_reduce": (1, 12)}, {"all_reduce": (2, 12)})] * 2


def _run_out_of_time(rank: int) -> OpStatistics | None:
    group = default_group()
    if rank == 0:
        with pytest.raises(phalanx.CallTimeout):
            group.allreduce(torch.ones(1), timeout=timedelta(seconds=0.2)).wait()
        group.get_group_store().set("over", "")
    else:
        group.get_group_store().wait(["over"])
    return group.statistics().get("all_reduce")


def test_a_call_whose_peer_never_came_has_only_waited(run: Run) -> None:
    late, absent = run(_run_out_of_time, 2)
    assert absent is None
    assert late == OpStatistics(1, 0, late.waiting, 0.0)
    assert late.waiting >= 0.2


def _leave(rank: int) -> bool:
    group = default_group()
    dist.all_reduce(_one())
    before = group.statistics()
    dist.destroy_process_group()
    with pytest.raises(phalanx.GroupError):
        group.allreduce(torch.ones(1))
    return group.statistics() == before != {}


def test_statistics_stay_when_the_group_was_left(run: Run) -> None:
    assert run(_leave, 2) == [True] * 2


def _fork(rank: int) -> int:
    dist.all_reduce(_one())
    group = default_group()
    pid = os.fork()
    if pid == 0:
        os._exit(3 if group.statistics() == {} else 4)
    _, status = os.waitpid(pid, 0)
    assert totals() == {"all_reduce": (1, 12)}
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_has_made_no_calls(run: Run) -> None:
    assert run(_fork, 2) == [3] * 2


THREADS, TIMES = 4, 40


def _call_from_many_threads(rank: int) -> tuple[Totals, list[str]]:
    group = default_group()
    wrong: list[str] = []
    over = threading.Event()

    def look() -> None:
        before: dict[str, OpStatistics] = {}
        while not over.is_set():
            now = group.statistics()
            for op, one in before.items():
                if any(getattr(now[op], name) < getattr(one, name) for name in OpStatistics.__slots__):
                    wrong.append(f"{one} became {now[op]}")
            wrong.extend(f"{op}: {one}" for op, one in now.items() if one.bytes != 12 * one.calls)
            before = now
            time.sleep(0)

    def call(number: int) -> None:
        for _ in range(TIMES):
            group.allreduce(torch.ones(3)).wait()
            receive = group.recv([torch.empty(3)], 1 - rank, number)
            group.send([torch.ones(3)], 1 - rank, number).wait()
            receive.wait()

    reader = threading.Thread(target=look)
    callers = [threading.Thread(target=call, args=(number,)) for number in range(THREADS)]
    for thread in (reader, *callers):
        thread.start()
    for thread in callers:
        thread.join()
    over.set()
    reader.join()
    return totals(), wrong


def test_many_threads_and_a_reader(run: Run) -> None:
    each = (THREADS * TIMES, 12 * THREADS * TIMES)
    assert run(_call_from_many_threads, 2) == [({"all_reduce": each, "recv": each, "send": each}, [])] * 2


# Time, between processes. The monotonic clock is the same in all of them.

LATE: dict[str, Callable[[int], Any]] = {
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(3)),
    "all_reduce, long": lambda rank: dist.all_reduce(torch.ones(LONG)),
    "barrier": lambda rank: dist.barrier(),
    # The root can't go on when the staging memory is full.
    "broadcast, long": lambda rank: dist.broadcast(torch.ones(LONG), 0),
    "send, long": lambda rank: dist.recv(torch.empty(LONG), 0) if rank else dist.send(torch.ones(LONG), 1),
    "recv": lambda rank: dist.send(torch.ones(3), 0) if rank else dist.recv(torch.empty(3), 1),
    "recv, any source": lambda rank: dist.send(torch.ones(3), 0) if rank else dist.recv(torch.empty(3)),
}


def _come_late(here: Here, name: str) -> tuple[float, OpStatistics]:
    """Rank 1 makes the call when rank 0 has waited for it for a while, which it measures."""
    here.init()
    here.tell()
    if here.rank == 1:
        here.hear()
        began = time.monotonic()
        here.tell()
        here.hear()
    least = time.monotonic() - began if here.rank == 1 else 0.0
    before = time.monotonic()
    LATE[name](here.rank)
    elapsed = time.monotonic() - before
    (one,) = default_group().statistics().values()
    assert one.waiting + one.moving <= elapsed
    return least, one


@pytest.mark.parametrize("name", LATE)
def test_a_late_process_is_waited_for(name: str, tmp_path: Path) -> None:
    world = World(_come_late, 2, tmp_path, name)
    world.all_told(0, 1)
    world.wait_asleep(0)
    world.tell(1)
    world.told(1)
    world.wait_naps(0)
    world.tell(1)
    first, second = world.ends()
    assert (first.error, second.error) == (None, None), first.trace + second.trace
    (_, early), (least, late) = first.value, second.value
    assert early.waiting >= least > 0
    # Rank 0 was there.
    if "recv" not in name and "send" not in name:
        assert late.waiting == 0


def _start_two(here: Here) -> tuple[float, float]:
    """Two calls in flight; the seconds of both, and those from before the first to the end of the last."""
    here.init()
    gate = Gate(here)
    before = time.monotonic()
    if here.rank == 1:
        gate.wait("started")
    works = [dist.all_reduce(torch.ones(3), async_op=True), dist.broadcast(torch.ones(LONG), 1, async_op=True)]
    gate.open("started")
    for work in works:
        assert work is not None
        work.wait()
    elapsed = time.monotonic() - before
    return sum(one.waiting + one.moving for one in default_group().statistics().values()), elapsed


def test_times_of_collectives_in_flight_do_not_overlap(tmp_path: Path) -> None:
    for taken, elapsed in values(_start_two, 2, tmp_path):
        assert 0 < taken <= elapsed


def _start_and_look(here: Here) -> list[Totals]:
    here.init()
    gate = Gate(here)
    seen = []
    if here.rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        seen.append(totals())
        gate.open("looked")
        assert work is not None
        work.wait()
    else:
        gate.wait("looked")
        dist.all_reduce(torch.ones(3))
    return [*seen, totals()]


def test_a_call_counts_when_it_has_ended(tmp_path: Path) -> None:
    done = {"all_reduce": (1, 12)}
    assert values(_start_and_look, 2, tmp_path) == [[{}, done], [done]]


# Time, between threads: it is virtual, and moving takes none.


def _times(rank: int) -> dict[str, tuple[float, float]]:
    return {op: (one.waiting, one.moving) for op, one in default_group().statistics().items()}


def test_threads_wait_by_the_virtual_clock() -> None:
    def work(rank: int, world: pt.World) -> dict[str, tuple[float, float]]:
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            dist.send(torch.ones(LONG), 1)
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.empty(LONG))
            dist.recv(torch.empty(3), 0)
        return _times(rank)

    faults = [pt.delay(1, 1, seconds=5), pt.delay(1, 2, seconds=60), pt.delay(0, 3, seconds=7)]
    assert pt.run(work, 2, faults=faults) == [
        {"all_reduce": (5, 0), "send": (60, 0)},
        {"all_reduce": (0, 0), "recv": (7, 0)},
    ]


def test_time_of_an_async_call_between_threads() -> None:
    """A call's time ends with the call, whenever its Work is waited for, and begins with the end of the call before."""

    def work(rank: int, world: pt.World) -> dict[str, tuple[float, float]]:
        works = [dist.all_reduce(torch.ones(1), async_op=True), dist.broadcast(torch.ones(1), 0, async_op=True)]
        # Rank 0 comes to it late, and so waits late.
        dist.barrier()
        for one in works:
            assert one is not None
            one.wait()
        return _times(rank)

    faults = [pt.delay(1, 1, seconds=5), pt.delay(1, 2, seconds=3), pt.delay(0, 3, seconds=100)]
    assert pt.run(work, 2, faults=faults) == [
        {"all_reduce": (5, 0), "broadcast": (3, 0), "barrier": (0, 0)},
        {"all_reduce": (0, 0), "broadcast": (0, 0), "barrier": (92, 0)},
    ]


def test_a_call_of_threads_counts_when_it_has_ended() -> None:
    def work(rank: int, world: pt.World) -> list[Totals]:
        started = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
        seen = [totals()] if rank == 0 else []
        world.store.set("looked", "") if rank == 0 else world.store.wait(["looked"])
        if started is None:
            dist.all_reduce(torch.ones(3))
        else:
            started.wait()
        return [*seen, totals()]

    done = {"all_reduce": (1, 12)}
    assert pt.run(work, 2) == [[{}, done], [done]]
