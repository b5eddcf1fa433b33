"""Ranks as threads of one process: results, failures, deadlocks and time."""

from __future__ import annotations

import random
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt


def _sum(rank: int, world: pt.World) -> list[float]:
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    values: list[float] = tensor.tolist()
    return values


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"seed": 0}, {"seed": 1}, {"schedule": "free"}])
def test_results_by_rank(ranks: int, options: dict[str, Any]) -> None:
    assert pt.run(_sum, ranks, **options) == [[sum(range(ranks))] * 3] * ranks


def test_the_world() -> None:
    def look(rank: int, world: pt.World) -> tuple[int, int, Path]:
        (world.tmp_path / str(rank)).touch()
        world.store.set(f"from {rank}", str(rank))
        world.barrier()
        assert sorted(path.name for path in world.tmp_path.iterdir()) == ["0", "1", "2"]
        assert world.store.get(f"from {(rank + 1) % 3}") == str((rank + 1) % 3).encode()
        assert world.group is dist.group.WORLD
        return world.size, dist.get_rank(), world.tmp_path

    results = pt.run(look, 3)
    assert [result[:2] for result in results] == [(3, 0), (3, 1), (3, 2)]
    assert not results[0][2].exists()


def test_groups_that_the_function_makes_itself() -> None:
    def make(rank: int, world: pt.World) -> float:
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="init=False"):
            _ = world.group
        group = phalanx.ProcessGroup(world.store, rank, world.size)
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return tensor.item()

    assert pt.run(make, 3, init=False) == [3.0] * 3


def test_the_first_failure_is_raised() -> None:
    def fail(rank: int, world: pt.World) -> None:
        if rank == 1:
            raise LookupError("no shard")
        with pytest.raises(
            phalanx.PeerLost, match=r"(?s)rank 1 ended.*LookupError: no shard \(.*, in fail\)"
        ) as caught:
            dist.all_reduce(torch.ones(1))
        assert caught.value.peer == 1
        raise caught.value

    with pytest.raises(LookupError, match="no shard") as caught:
        pt.run(fail, 3)
    assert caught.value.__notes__[:2] == [
        "on rank 1",
        "because of it:\n  ranks 0, 2: PeerLost in all_reduce, seq 1",
    ]


@pytest.mark.parametrize("schedule", ["round robin", "random", "free"])
def test_a_rank_that_returns_early_is_lost(schedule: str) -> None:
    def leave(rank: int, world: pt.World) -> None:
        if rank != 1:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(phalanx.PeerLost, match="rank 1 ended while rank"):
        pt.run(leave, 3, schedule=schedule)


def test_ranks_that_run_freely() -> None:
    def work(rank: int, world: pt.World) -> list[float]:
        groups = [dist.new_group() for _ in range(3)]
        tensors = [torch.full((4,), float(rank + i)) for i in range(30)]
        works = [dist.all_reduce(tensor, group=groups[i % 3], async_op=True) for i, tensor in enumerate(tensors)]
        following = works[-1].get_future().then(lambda future: future.value()[0].sum().item())
        for number in range(world.size - 1):
            dist.send(torch.full((1,), float(number)), (rank + 1) % world.size)
            dist.recv(torch.zeros(1))
        for work in works[::-1]:
            work.wait()
        group = dist.new_group()
        if rank == 0:
            group.set_timeout(timedelta(seconds=0.1))
            with pytest.raises(phalanx.CallTimeout):
                dist.barrier(group=group)
        world.barrier()
        assert following.wait() == tensors[-1].sum().item()
        return [tensor[0].item() for tensor in tensors]

    expected = [4.0 * i + 6 for i in range(30)]
    for _ in range(5):
        assert pt.run(work, 4, schedule="free") == [expected] * 4


def test_ranks_that_disagree() -> None:
    def disagree(rank: int, world: pt.World) -> None:
        with pytest.raises(phalanx.Mismatch) as caught:
            dist.all_reduce(torch.ones(3 + rank))
        assert caught.value.code == "MISMATCH:COUNT"
        assert "rank 0: all_reduce(SUM, 3 elements of float32)" in str(caught.value)
        with pytest.raises(phalanx.Mismatch, match="the group is broken"):
            dist.barrier()

    pt.run(disagree, 2)


@pytest.mark.parametrize("schedule", ["round robin", "random", "free"])
def test_messages_in_a_circle_are_a_deadlock(schedule: str) -> None:
    def wait(rank: int, world: pt.World) -> None:
        dist.recv(torch.ones(1), (rank + 1) % 3, tag=5)

    with pytest.raises(phalanx.Deadlock) as caught:
        pt.run(wait, 3, schedule=schedule)
    assert caught.value.code == "DEADLOCK:P2P"
    text = str(caught.value)
    for rank in range(3):
        waits = f"rank {rank} waits for rank {(rank + 1) % 3} in recv, seq 1, tag 5, group 'default_pg'"
        assert f"{waits} ({Path(__file__).name}:" in text


def test_groups_in_another_order_are_a_deadlock() -> None:
    def use(rank: int, world: pt.World) -> None:
        groups = [dist.new_group(group_desc=name) for name in ("first", "second")]
        for group in groups[:: -1 if rank == 2 else 1]:
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(phalanx.Deadlock) as caught:
        pt.run(use, 3)
    assert caught.value.code == "DEADLOCK:ORDER"
    assert "rank 0 waits for rank 2 in all_reduce, seq 1, group 'first'" in str(caught.value)
    assert "rank 2 waits for rank 0 in all_reduce, seq 1, group 'second'" in str(caught.value)
    assert "1 more rank waits for these" in str(caught.value)


def test_a_group_that_one_rank_does_not_make_is_a_deadlock() -> None:
    def make(rank: int, world: pt.World) -> None:
        dist.new_group() if rank == 0 else world.barrier()

    with pytest.raises(phalanx.Deadlock, match=r"DEADLOCK:JOIN") as caught:
        pt.run(make, 2)
    assert "rank 0 waits for rank 1 in new_group" in str(caught.value)


@pytest.mark.parametrize("seconds", [0.001, 1800, 1e8])
def test_timeouts_take_no_time(seconds: float) -> None:
    def wait(rank: int, world: pt.World) -> str:
        group = dist.new_group(timeout=timedelta(seconds=seconds))
        text = ""
        if rank == 0:
            with pytest.raises(phalanx.CallTimeout) as caught:
                dist.all_reduce(torch.ones(1), group=group)
            text = str(caught.value)
        world.barrier()
        return text

    assert "rank 1 did not come" in pt.run(wait, 2)[0]


def test_a_wait_that_ran_out_leaves_the_call_under_way() -> None:
    def wait(rank: int, world: pt.World) -> float:
        tensor = torch.ones(1)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(phalanx.CallTimeout, match="rank 1 did not come; the call is still under way"):
                work.wait(timedelta(hours=1))
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(tensor)
        return tensor.item()

    assert pt.run(wait, 2) == [2.0, 2.0]


def _order(seed: int) -> list[tuple[int, int]]:
    """Who came when to a communication point, as the ranks saw it."""
    seen: list[tuple[int, int]] = []

    def note(rank: int, world: pt.World) -> None:
        for step in range(5):
            dist.send(torch.ones(1), (rank + 1) % world.size)
            seen.append((rank, step))
            dist.recv(torch.ones(1), (rank - 1) % world.size)

    pt.run(note, 3, seed=seed)
    return seen


def test_a_seed_is_a_schedule() -> None:
    assert _order(1) == _order(1)
    assert len({tuple(_order(seed)) for seed in range(10)}) > 5


def test_each_rank_has_random_generators_of_its_own() -> None:
    def draw(rank: int, world: pt.World) -> tuple[Any, ...]:
        torch.manual_seed(rank)
        random.seed(rank)
        numpy.random.seed(rank)
        drawn = []
        for _ in range(3):
            drawn.append((torch.rand(1).item(), random.random(), numpy.random.random()))
            world.barrier()
        return tuple(drawn)

    first = pt.run(draw, 4)
    assert len(set(first)) == 4
    assert pt.run(draw, 4, seed=3) == first
    before = torch.get_rng_state()
    pt.run(draw, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rank_that_is_stuck_gets_an_exception() -> None:
    def spin(rank: int, world: pt.World) -> None:
        while rank == 1:
            pass
        world.barrier()

    with pytest.raises(pt.Stuck, match=r"(?s)rank 1 did not communicate for 2 s; it was here:.*in spin") as caught:
        pt.run(spin, 3, stuck_after=2)
    assert caught.value.__notes__[:2] == [
        "on rank 1",
        "because of it:\n  ranks 0, 2: PeerLost in barrier, seq 1",
    ]


def test_a_rank_that_can_not_be_interrupted_is_abandoned() -> None:
    go_on = threading.Event()

    def hold(rank: int, world: pt.World) -> None:
        if rank == 1:
            go_on.wait(20)

    before = threading.enumerate()
    with pytest.raises(
        pt.Stuck, match=r"(?s)rank 1 .* ignored an exception, and its thread was abandoned; it was here:.*in hold"
    ):
        pt.run(hold, 2, stuck_after=2)
    go_on.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(20)
    assert not dist.is_initialized()


def test_ctrl_c_ends_a_run() -> None:
    def interrupt(rank: int, world: pt.World) -> None:
        if rank == 1:
            signal.raise_signal(signal.SIGINT)
        while True:
            world.barrier()

    before = set(threading.enumerate())
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        pt.run(interrupt, 3)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
    assert pt.run(_sum, 2) == [[1.0] * 3] * 2
    assert not dist.is_initialized()


def test_normal_numbers_that_are_left_over_stay_with_their_rank() -> None:
    def draw(rank: int, world: pt.World) -> float:
        numpy.random.seed(0)
        numpy.random.randn(2 - rank)
        for _ in range(2):
            world.barrier()
        return float(numpy.random.randn(1)[0])

    third, second = numpy.random.RandomState(0).randn(3)[2], numpy.random.RandomState(0).randn(2)[1]
    for seed in range(5):
        assert pt.run(draw, 2, seed=seed) == [third, second]


@pytest.mark.parametrize("schedule", ["round robin", "random"])
def test_ranks_that_poll_in_vain(schedule: str) -> None:
    def poll(rank: int, world: pt.World) -> None:
        if rank == 1:
            dist.recv(torch.ones(1), 0)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass

    with pytest.raises(phalanx.Deadlock):
        pt.run(poll, 2, schedule=schedule)
    with pytest.raises(phalanx.CallTimeout):
        pt.run(poll, 2, schedule=schedule, timeout=timedelta(seconds=30))


def test_ranks_that_poll_until_it_is_there() -> None:
    def poll(rank: int, world: pt.World) -> float:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            pass
        return tensor.item()

    assert pt.run(poll, 3) == [3.0] * 3


def test_a_callback_that_ends_the_rank() -> None:
    def leave(rank: int, world: pt.World) -> None:
        def callback(future: Any) -> None:
            raise SystemExit(3)

        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(callback)
        world.barrier()
        world.barrier()

    with pytest.raises(RuntimeError, match=r"rank \d called sys.exit\(3\)"):
        pt.run(leave, 2)


def test_a_rank_that_exits_well_has_returned() -> None:
    assert pt.run(lambda rank, world: sys.exit(0), 2) == [None, None]


def test_nothing_is_left_behind() -> None:
    before = (sys.excepthook, threading.excepthook, dist.distributed_c10d._world, threading.active_count())
    with pytest.raises(phalanx.Deadlock):
        pt.run(lambda rank, world: dist.recv(torch.ones(1), 1 - rank), 2)
    assert before == (sys.excepthook, threading.excepthook, dist.distributed_c10d._world, threading.active_count())
    assert not dist.is_initialized()


def test_ddp_trains() -> None:
    def train(rank: int, world: pt.World) -> list[float]:
        torch.manual_seed(rank)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(rank + step))).square().sum().backward()
            optimizer.step()
        return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]

    first, second = pt.run(train, 2)
    assert first == second
    assert pt.run(train, 2, seed=1) == [first, first]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"ranks": 0}, ValueError, "expected at least one rank, got 0"),
        ({"function": lambda rank: None}, TypeError, r"expected a function that takes \(rank, world\)"),
        ({"schedule": "fast"}, ValueError, "expected a schedule of 'round robin', 'random', 'free', got 'fast'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    usual: dict[str, Any] = {"function": _sum, "ranks": 2}
    with pytest.raises(error, match=match):
        pt.run(**(usual | arguments))


def test_runs_can_not_be_nested() -> None:
    with pytest.raises(RuntimeError, match="runs can't be nested"):
        pt.run(lambda rank, world: pt.run(_sum, 2), 2)


def test_threads_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start, num_started = threading.Thread.start, 0

    def refuse(self: threading.Thread) -> None:
        nonlocal num_started
        num_started += self.name.startswith("rank ")
        if num_started > 2:
            raise RuntimeError("can't start new thread")
        start(self)

    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pt.run(_sum, 4)
    assert threading.active_count() == before
    assert pt.run(_sum, 2) == [[1.0] * 3] * 2
