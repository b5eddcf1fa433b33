"""Calls as ranges in torch's profiler."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import phalanx
import phalanx.testing as pt


def _profile(**options: Any) -> profile:
    return profile(activities=[ProfilerActivity.CPU], **options)


def _names(profiler: profile) -> list[str]:
    names = [event.name for event in profiler.events() if event.name.startswith("phalanx:")]
    # Whether there is anything to wait for is a matter of luck.
    return [name for name in names if name != "phalanx:wait"]


def _profiled(rank: int, world: pt.World) -> list[tuple[str, list[Any], bool]]:
    with _profile(record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(2, 3))
        dist.all_reduce(torch.ones(5), async_op=True).wait()
        dist.broadcast(torch.ones(4), 0)
        dist.all_gather([torch.ones(2) for _ in range(world.size)], torch.ones(2))
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.ones(7), 0)
    events = [
        event for event in profiler.events() if event.name.startswith("phalanx:") and event.name != "phalanx:wait"
    ]
    return [(event.name, event.input_shapes, event.cpu_time_total > 0) for event in events]


# Only one profiler may be at work in a process.


def test_calls_are_ranges_in_the_profiler() -> None:
    for rank, events in enumerate(pt.run(_profiled, 2, processes=True)):
        assert events == [
            ("phalanx:all_reduce", [[2, 3]], True),
            ("phalanx:all_reduce", [[5]], True),
            ("phalanx:broadcast", [[4]] if rank == 0 else [], True),
            ("phalanx:all_gather", [[2]], True),
            ("phalanx:barrier", [], True),
            (("phalanx:send", "phalanx:recv")[rank], [[7]], True),
        ]


def _profiled_ddp(rank: int, world: pt.World) -> int:
    model = DistributedDataParallel(nn.Linear(3, 2))
    with _profile() as profiler:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
    return sum(event.name == "phalanx:all_reduce" for event in profiler.events())


def test_calls_of_ddp_are_ranges_in_the_profiler() -> None:
    assert pt.run(_profiled_ddp, 2, processes=True) == [2, 2]


def _fails_in_a_range(rank: int, world: pt.World) -> tuple[str, int]:
    with _profile() as profiler:
        try:
            dist.all_reduce(torch.ones(2 + rank))
        except RuntimeError as error:
            text = str(error)
    return text.splitlines()[0], sum(event.name == "phalanx:all_reduce" for event in profiler.events())


def test_a_call_that_fails_ends_its_range() -> None:
    for text, num_ranges in pt.run(_fails_in_a_range, 2, processes=True):
        assert "MISMATCH" in text
        assert num_ranges == 1


def _profiled_on_one_rank(rank: int, world: pt.World) -> list[str]:
    with _profile() if rank == 0 else nullcontext() as profiler:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    return _names(profiler) if profiler else []


def test_calls_of_threads_are_ranges_in_the_profiler() -> None:
    assert pt.run(_profiled_on_one_rank, 2) == [["phalanx:all_reduce"] * 2, []]


def _on_one_process(rank: int, world: pt.World) -> list[float]:
    with _profile() if rank == 0 else nullcontext():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        sends, receives = dist.P2POp(dist.isend, torch.ones(1), 1 - rank), dist.P2POp(dist.irecv, tensor[:1], 1 - rank)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
    return tensor.tolist()


def test_one_process_is_profiled_and_its_peer_is_not() -> None:
    assert pt.run(_on_one_process, 2, processes=True) == [[1.0, 4.0, 4.0]] * 2


def _async_fails(rank: int, world: pt.World) -> tuple[int, list[str]]:
    with _profile() as profiler:
        work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
        with pytest.raises(phalanx.Mismatch):
            work.wait()
        with pytest.raises(RuntimeError, match="MISMATCH"):
            work.get_future().wait()
    return rank, _names(profiler)


def test_an_async_call_that_fails_ends_its_range() -> None:
    assert pt.run(_async_fails, 2, processes=True) == [(0, ["phalanx:all_reduce"]), (1, ["phalanx:all_reduce"])]


def _waits_are_given_up(rank: int, world: pt.World) -> list[str]:
    with _profile() as profiler:
        if rank == 0:
            work = dist.irecv(torch.ones(1), 1)
            assert work is not None
            with pytest.raises(phalanx.CallTimeout):
                work.wait(timedelta(milliseconds=1))
            world.barrier()
            work.wait()
            # Dropped at once.
            dist.irecv(torch.ones(1), 1)
            dist.send(torch.ones(1), 1)
        else:
            world.barrier()
            dist.send(torch.ones(1), 0)
            dist.send(torch.ones(1), 0)
            dist.recv(torch.ones(1), 0)
        dist.barrier()
    return sorted(set(_names(profiler)))


def test_works_that_time_out_and_works_that_are_dropped() -> None:
    names = ["phalanx:barrier", "phalanx:recv", "phalanx:send"]
    assert pt.run(_waits_are_given_up, 2, processes=True) == [names] * 2


def _still_under_way(rank: int, world: pt.World) -> float:
    received = torch.zeros(1)
    with _profile():
        work = dist.irecv(received, 1) if rank == 0 else None
    world.barrier()
    with _profile():
        if work is None:
            dist.send(torch.ones(1), 0)
        else:
            work.wait()
    dist.barrier()
    return received.item()


def test_a_call_that_is_under_way_when_the_profiler_stops() -> None:
    assert pt.run(_still_under_way, 2, processes=True) == [1.0, 0.0]


def _join(rank: int, world: pt.World) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _profile(), Join([model], divide_by_initial_world_size=False):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(step + rank))).square().sum().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _waits(rank: int, world: pt.World) -> int:
    with _profile() as profiler:
        if rank == 0:
            work = dist.irecv(torch.ones(1), 1)
            world.barrier()
            assert work is not None
            work.wait()
        else:
            world.barrier()
            dist.send(torch.ones(1), 0)
    return sum(event.name == "phalanx:wait" for event in profiler.events())


def test_a_wait_is_a_range() -> None:
    assert pt.run(_waits, 2, processes=True)[0] == 1


def test_join_under_the_profiler() -> None:
    ours, theirs = pt.run(_join, 2, processes=True)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


class _Exchange(torch.autograd.Function):
    """Sends in backward what is waited for after it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, works: list[Any], received: torch.Tensor) -> torch.Tensor:
        ctx.works, ctx.received = works, received
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        peer = 1 - dist.get_rank()
        ctx.works += [dist.irecv(ctx.received, peer), dist.isend(grad.clone(), peer)]
        return grad * 2, None, None


def _messages_in_backward(rank: int, world: pt.World) -> list[float]:
    works: list[Any] = []
    received = torch.zeros(2)
    with _profile():
        x = torch.ones(2, requires_grad=True)
        (_Exchange.apply(x, works, received) * (rank + 1)).sum().backward()  # type: ignore[no-untyped-call]
        for work in works:
            work.wait()
    return received.tolist()


def test_messages_in_backward() -> None:
    assert pt.run(_messages_in_backward, 2, processes=True) == [[2.0, 2.0], [1.0, 1.0]]
