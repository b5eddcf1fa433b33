"""`await work`, in processes and in threads: results, errors, cancelled tasks, event loops and Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_methods import group_of
from ranks import Gate, Here, World, values

import phalanx
import phalanx.testing as pt

Body = Callable[[phalanx.ProcessGroup], Coroutine[Any, Any, Any]]


async def _sum(group: phalanx.ProcessGroup) -> tuple[bool, float]:
    tensor = torch.full((3,), group.rank() + 1.0)
    (result,) = await group.all_reduce(tensor)
    return result is tensor, tensor[0].item()


async def _many_at_once(group: phalanx.ProcessGroup) -> list[float]:
    """Calls in flight that other tasks make, and messages that need the peer's other task."""
    tensors = [torch.full((1000,), float(index)) for index in range(20)]
    received, peer = torch.empty(2000), 1 - group.rank()

    async def exchange() -> None:
        await asyncio.gather(group.recv(received, peer), group.send(torch.full((2000,), 7.0), peer))

    await asyncio.gather(exchange(), *(group.all_reduce(tensor) for tensor in tensors))
    return [received[-1].item(), *(tensor[-1].item() for tensor in tensors)]


async def _others_run(group: phalanx.ProcessGroup) -> int:
    """Rank 1 comes to the call when a task of rank 0 beside the one that awaits it has run."""
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while rounds < 100:
            await asyncio.sleep(0)
            rounds += 1
        await group.send(torch.ones(1), 1)

    if group.rank() == 0:
        await asyncio.gather(group.barrier(), count())
    else:
        await group.recv(torch.ones(1), 0)
        await group.barrier()
    return rounds


async def _twice(group: phalanx.ProcessGroup) -> list[float]:
    work = group.all_reduce(torch.ones(1))
    results = [*await asyncio.gather(work, work), await work]
    return [result[0].item() for result in results]


async def _cancelled(group: phalanx.ProcessGroup) -> float:
    """The call goes on without the task, and without its Work."""
    tensor = torch.full((2000,), float(group.rank()))
    if group.rank() == 0:
        task = asyncio.ensure_future(group.recv(tensor, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        work = group.recv(torch.ones(1), 1)
        await group.send(torch.ones(1), 1)
        await work
    else:
        await group.recv(torch.ones(1), 0)
        await group.send(tensor, 0)
        await group.send(torch.ones(1), 0)
    return tensor[-1].item()


async def _time_is_up(group: phalanx.ProcessGroup) -> list[str]:
    if group.rank() == 1:
        return []
    work = group.barrier(timeout=timedelta(milliseconds=20))
    texts = []
    for _ in range(2):
        with pytest.raises(phalanx.CallTimeout) as caught:
            await work
        texts.append(str(caught.value).splitlines()[0])
    return texts


async def _coalesced(group: phalanx.ProcessGroup) -> list[float]:
    """Of the coalescing manager."""
    tensors = [torch.ones(1), torch.ones(1)]
    group._start_coalescing(torch.device("cpu"))
    for tensor in tensors:
        group.all_reduce(tensor)
    return [tensor.item() for tensor in await group._end_coalescing(torch.device("cpu"))]


_LATE = "[MISSING] barrier, seq 1, group 'group', rank 0: gave up after a timeout of 0.02 s: rank 1 did not come"
BODIES: dict[str, tuple[Body, list[Any]]] = {
    "a result": (_sum, [(True, 3.0)] * 2),
    "many at once": (_many_at_once, [[7.0, *(2.0 * index for index in range(20))]] * 2),
    "other tasks run": (_others_run, [100, 0]),
    "twice": (_twice, [[2.0] * 3] * 2),
    "a task that is cancelled": (_cancelled, [1.0, 1.0]),
    "a timeout that runs out": (_time_is_up, [[_LATE] * 2, []]),
    "coalesced calls": (_coalesced, [[2.0, 2.0]] * 2),
}


def _run_all(here: Here) -> dict[str, Any]:
    found, gate = {}, Gate(here)
    for name, (body, _) in BODIES.items():
        group = phalanx.ProcessGroup(here.store(name.replace(" ", "-")), here.rank, here.size, name="group")
        found[name] = asyncio.run(body(group))
        # Who is waited for does not leave before.
        gate.open(f"{name} {here.rank}")
        gate.wait(*(f"{name} {rank}" for rank in range(here.size)))
        group.shutdown()
    return found


@pytest.fixture(scope="module")
def by_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(_run_all, 2, tmp_path_factory.mktemp("awaiting"))


@pytest.mark.parametrize("name", BODIES)
def test_in_processes(name: str, by_processes: list[dict[str, Any]]) -> None:
    assert [found[name] for found in by_processes] == BODIES[name][1]


def _in_loop(body: Body) -> Callable[[int, pt.World], Any]:
    def run(rank: int, world: pt.World) -> Any:
        result = asyncio.run(body(group_of(rank, world)))
        world.store.set(f"over {rank}", "")
        world.store.wait([f"over {one}" for one in range(world.size)])
        return result

    return run


@pytest.mark.parametrize(
    "options", [{"check": True}, {"check": True, "seed": 1}, {"schedule": "free"}], ids=["turns", "random", "free"]
)
@pytest.mark.parametrize("name", BODIES)
def test_in_threads(name: str, options: dict[str, Any]) -> None:
    body, expected = BODIES[name]
    assert pt.run(_in_loop(body), 2, init=False, **options) == expected


def test_a_run_of_threads_is_repeatable() -> None:
    """Who sends first, of those that wait in event loops, follows from the seed."""

    async def race(group: phalanx.ProcessGroup) -> list[int]:
        if group.rank():
            await group.barrier()
            await group.send(torch.ones(1), 0)
            return []
        await group.barrier()
        works = [group.recv(torch.ones(1)) for _ in range(3)]
        await asyncio.gather(*works)
        return [work.source_rank() for work in works]

    orders = {seed: pt.run(_in_loop(race), 4, init=False, seed=seed)[0] for seed in range(8)}
    assert len({tuple(order) for order in orders.values()}) > 1
    assert {seed: pt.run(_in_loop(race), 4, init=False, seed=seed)[0] for seed in range(8)} == orders


def test_a_rank_that_nobody_joins_is_found_as_a_deadlock() -> None:
    async def wait(group: phalanx.ProcessGroup) -> None:
        await (group.barrier() if group.rank() else group.recv(torch.ones(1), 1))

    with pytest.raises(phalanx.Deadlock):
        pt.run(_in_loop(wait), 2, init=False)


def test_a_rank_that_dies_while_another_awaits_it() -> None:
    async def die(group: phalanx.ProcessGroup) -> None:
        if group.rank() == 1:
            raise LookupError("no shard")
        await group.barrier()

    with pytest.raises(LookupError, match="no shard") as caught:
        pt.run(_in_loop(die), 2, init=False)
    assert "rank 0: PeerLost in barrier, seq 1" in "\n".join(caught.value.__notes__)


def test_threads_that_ranks_start_may_have_loops() -> None:
    def run(rank: int, world: pt.World) -> list[Any]:
        results: list[Any] = []
        group = group_of(rank, world)
        thread = threading.Thread(target=lambda: results.append(asyncio.run(_sum(group))))
        thread.start()
        thread.join()
        return results

    assert pt.run(run, 2, init=False) == [[(True, 3.0)]] * 2


def test_ctrl_c_ends_threads_that_await() -> None:
    async def interrupt(group: phalanx.ProcessGroup) -> None:
        if group.rank() == 1:
            signal.raise_signal(signal.SIGINT)
        while True:
            await group.barrier()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pt.run(_in_loop(interrupt), 2, init=False)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(here: Here) -> float:
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size)
    tensor = torch.ones(10)
    if here.rank == 1:
        here.hear()
        group.all_reduce(tensor, async_op=False)
        return tensor[0].item()
    work = group.all_reduce(tensor)

    async def wait() -> None:
        # The loop has come to its end of a round once it has called this, and sleeps.
        asyncio.get_running_loop().call_soon(here.tell)
        await work

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(wait())
    here.tell()
    work.wait()
    return tensor[0].item()


def test_ctrl_c_ends_an_await_and_not_the_call(tmp_path: Path) -> None:
    world = World(_interrupted, 2, tmp_path)
    world.told(0)
    world.signal(0, signal.SIGINT)
    world.told(0)
    world.tell(1)
    ends = world.ends()
    assert [end.value for end in ends] == [2.0, 2.0], ends[0].trace


def _await_the_dead(here: Here) -> str:
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size)
    work = group.barrier() if here.rank == 0 else None
    here.tell()
    if work is None:
        here.hear()
        return ""
    with pytest.raises(phalanx.PeerLost) as caught:
        asyncio.run(_await(work))
    return str(caught.value)


def test_a_process_that_is_killed_while_another_awaits_it(tmp_path: Path) -> None:
    world = World(_await_the_dead, 2, tmp_path)
    world.all_told(0, 1)
    world.signal(1, signal.SIGKILL)
    assert "rank 1 died (killed by SIGKILL)" in world.ends()[0].value


# Event loops.

_SECOND_LOOP = "expected the event loop that awaited this Work before, got another one"


@pytest.fixture(scope="module")
def alone() -> phalanx.ProcessGroup:
    return phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="alone")


async def _await(work: Any) -> Any:
    return await work


@pytest.mark.parametrize("async_op", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        lambda g, o: g.all_reduce(torch.ones(3), async_op=o),
        lambda g, o: g.barrier(async_op=o),
        lambda g, o: g.send(torch.ones(3), 0, async_op=o),
        lambda g, o: g.recv(torch.ones(3), 0, async_op=o),
    ],
    ids=["all_reduce", "barrier", "send", "recv"],
)
def test_a_second_event_loop(
    alone: phalanx.ProcessGroup, call: Callable[[phalanx.ProcessGroup, bool], Any], async_op: bool
) -> None:
    work = call(alone, async_op)
    asyncio.run(_await(work))
    for _ in range(2):
        with pytest.raises(
            phalanx.InvalidCall, match="expected the event loop that awaited this Work before"
        ) as caught:
            asyncio.run(_await(work))
        assert caught.value.code == "INVALID:LOOP"
    assert work.wait() is True


def test_two_event_loops_at_once(alone: phalanx.ProcessGroup) -> None:
    async def wait() -> None:
        work = alone.recv(torch.ones(3), 0)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        with pytest.raises(phalanx.InvalidCall, match=_SECOND_LOOP):
            await asyncio.to_thread(asyncio.run, _await(work))
        alone.send(torch.ones(3), 0)
        await task

    asyncio.run(wait())


def test_no_event_loop(alone: phalanx.ProcessGroup) -> None:
    coroutine = _await(alone.all_reduce(torch.ones(1)))
    with pytest.raises(phalanx.InvalidCall, match="expected an asyncio event loop that runs in this thread") as caught:
        coroutine.send(None)
    assert caught.value.code == "INVALID:LOOP"


def test_one_group_in_many_event_loops(alone: phalanx.ProcessGroup) -> None:
    for _ in range(3):
        assert asyncio.run(_sum(alone)) == (True, 1.0)
    with asyncio.Runner() as runner, asyncio.Runner() as other:
        assert runner.run(_sum(alone)) == other.run(_sum(alone)) == (True, 1.0)


def _await_in_child(here: Here) -> str:
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size)
    work = group.recv(torch.ones(3), 1 - here.rank)
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            asyncio.run(_await(work))
        except phalanx.GroupError as error:
            os.write(writer, error.code.encode())
        os._exit(0)
    os.wait()
    group.send(torch.ones(3), 1 - here.rank, async_op=False)
    asyncio.run(_await(work))
    return os.read(reader, 100).decode()


def test_a_forked_child_can_not_await(tmp_path: Path) -> None:
    assert values(_await_in_child, 2, tmp_path) == ["GROUP:FORKED"] * 2
