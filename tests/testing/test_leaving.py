"""Leaving a group completes what all who take part have made, where ranks are threads and where they are processes."""

from __future__ import annotations

import resource
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx.testing as pt
from phalanx import PeerLost

LONG = 1_000_000
BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def meet(rank: int, world: pt.World, processes: bool) -> None:
    """Between processes: all have made the calls before. Between threads that would complete them."""
    if processes:
        world.store.set(f"{rank} has made its calls", "")
        world.store.wait([f"{peer} has made its calls" for peer in range(world.size)])


def return_early(rank: int, world: pt.World, processes: bool, way: str) -> list[torch.Tensor]:
    tensor = torch.full((LONG,), float(rank + 1))
    strided = torch.full((LONG, 2), float(rank + 1))[:, 0]
    works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(strided, async_op=True)]
    meet(rank, world, processes)
    if rank == world.size - 1:
        for work in works:
            work.wait()
    elif way == "destroy":
        dist.destroy_process_group()
        assert tensor.eq(6).all()
        assert strided.eq(6).all()
    elif way == "exit":
        sys.exit(0)
    return [tensor, strided]


@BOTH
@pytest.mark.parametrize("way", ["return", "destroy", "exit"])
def test_ranks_that_do_not_wait_for_their_calls(processes: bool, way: str) -> None:
    values = pt.run(partial(return_early, processes=processes, way=way), 3, processes=processes)
    for value in values[2:] if way == "exit" else values:
        assert all(tensor.eq(6).all() for tensor in value)


@pytest.mark.parametrize("schedule", ["free", "random", None])
def test_ranks_that_return_early_under_any_schedule(schedule: str | None) -> None:
    values = pt.run(partial(return_early, processes=False, way="return"), 3, schedule=schedule)
    assert all(tensor.eq(6).all() for value in values for tensor in value)


def send_and_leave(rank: int, world: pt.World, processes: bool) -> list[torch.Tensor]:
    """Rank 0 sends and leaves, then rank 1 receives from anybody and leaves."""
    first, second = (dist.new_group(group_desc=name) for name in ("first", "second"))
    tensors = [torch.full((LONG, 2), 7.0 if rank == 0 else 0.0)[:, 0] for _ in range(2)]
    works = [dist.isend(tensors[0], 1, group=first) if rank == 0 else dist.irecv(tensors[0], 0, group=first)]
    works += [dist.isend(tensors[1], 1, group=second) if rank == 0 else dist.irecv(tensors[1], group=second)]
    meet(rank, world, processes)
    leaves, stays = (first, second) if rank == 0 else (second, first)
    dist.destroy_process_group(leaves)
    for work in works:
        assert work is not None
        work.wait()
    dist.destroy_process_group(stays)
    return tensors


@BOTH
def test_messages_that_both_sides_have_made(processes: bool) -> None:
    values = pt.run(partial(send_and_leave, processes=processes), 2, processes=processes)
    assert all(tensor.eq(7).all() for tensors in values for tensor in tensors)


def leave_alone(rank: int, world: pt.World) -> str | None:
    """Rank 0 has calls in flight that nobody else makes."""
    group = dist.new_group(group_desc="left", timeout=timedelta(seconds=300))
    works: list[Any] = []
    if rank == 0:
        tensor = torch.ones(LONG)
        works = [
            dist.all_reduce(tensor, group=group, async_op=True),
            dist.irecv(torch.zeros(LONG), 1, group=group),
            dist.isend(torch.zeros(LONG), 1, group=group),
        ]
        dist.destroy_process_group(group)
        for work in works:
            with pytest.raises(RuntimeError, match=r"GROUP:CLOSED"):
                work.wait()
        assert tensor.eq(1).all()
        dist.send(torch.zeros(1), 1)
        return None
    dist.recv(torch.zeros(1), 0)
    with pytest.raises(PeerLost) as lost:
        dist.all_reduce(torch.ones(LONG), group=group)
    return str(lost.value)


@BOTH
def test_what_a_peer_has_not_made_fails_soon(processes: bool) -> None:
    _, text = pt.run(leave_alone, 2, processes=processes)
    assert "rank 0 left the group" in text


def raise_with_calls_in_flight(rank: int, world: pt.World) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(LONG), async_op=True)
        raise ValueError("the cause")
    dist.recv(torch.zeros(1), 0)


@BOTH
def test_a_rank_with_an_exception_does_not_wait_for_its_peers(processes: bool) -> None:
    with pytest.raises(ValueError, match="the cause"):
        pt.run(raise_with_calls_in_flight, 2, processes=processes, timeout=timedelta(seconds=300))


def callbacks_of_a_rank_that_leaves(rank: int, world: pt.World, processes: bool) -> list[float]:
    seen: list[float] = []
    tensor = torch.full((LONG,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future = work.get_future().then(lambda _: seen.append(float(tensor[-1])))
    meet(rank, world, processes)
    if rank == 1:
        future.wait()
    dist.destroy_process_group()
    return seen


@BOTH
def test_callbacks_of_calls_that_leaving_completes(processes: bool) -> None:
    function = partial(callbacks_of_a_rank_that_leaves, processes=processes)
    assert pt.run(function, 2, processes=processes) == [[3.0], [3.0]]


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def test_groups_that_all_ranks_have_left_keep_no_native_memory() -> None:
    def main(rank: int, world: pt.World) -> int:
        sizes = []
        for _ in range(60):
            group = dist.new_group()
            dist.barrier(group)
            dist.destroy_process_group(group)
            del group
            sizes.append(_mapped_bytes())
        world.barrier()
        return sizes[-1] - sizes[19]

    # A group of 8 ranks maps 2.5 MiB.
    assert max(pt.run(main, 8)) < 40 << 20
