"""Programs that look as if ranks disagreed, and are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from phalanx.testing import World

__all__ = ["PROGRAMS"]

Program = Callable[[int, World], Any]

# All run with three ranks.
PROGRAMS: list[Program] = []


def _right(program: Program) -> Program:
    PROGRAMS.append(program)
    return program


@_right
def gather_what_differs_in_size(rank: int, world: World) -> None:
    outputs = [torch.empty(size) for size in (3, 0, 2)]
    dist.all_gather(outputs, torch.full((len(outputs[rank]),), float(rank)))
    assert [output.tolist() for output in outputs] == [[0.0] * 3, [], [2.0] * 2]


@_right
def reduce_and_scatter_what_differs_in_size(rank: int, world: World) -> None:
    output = torch.empty(rank)
    dist.reduce_scatter(output, [torch.ones(size) for size in range(3)])
    assert output.tolist() == [3.0] * rank


@_right
def exchange_what_differs_in_size(rank: int, world: World) -> None:
    # Rank p sends p + q elements to rank q.
    splits = [rank + peer for peer in range(3)]
    output = torch.empty(sum(splits))
    dist.all_to_all_single(output, torch.full((sum(splits),), float(rank)), splits, splits)
    assert output.tolist() == [float(peer) for peer in range(3) for _ in range(rank + peer)]


@_right
def exchange_lists_of_another_shape(rank: int, world: World) -> None:
    inputs = [torch.full((rank + 1, peer + 1), float(rank)) for peer in range(3)]
    outputs = [torch.empty((peer + 1) * (rank + 1)) for peer in range(3)]
    dist.all_to_all(outputs, inputs)
    assert [sorted(set(output.tolist())) for output in outputs] == [[0.0], [1.0], [2.0]]


@_right
def factors_of_their_own(rank: int, world: World) -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(float(rank)))
    assert tensor.tolist() == [3.0, 3.0]


@_right
def lists_on_the_root_only(rank: int, world: World) -> None:
    gathered = [torch.empty(2) for _ in range(3)]
    dist.gather(torch.full((2,), float(rank)), gathered if rank == 2 else None, dst=2)
    scattered = torch.empty(2)
    dist.scatter(scattered, gathered if rank == 2 else None, src=2)
    assert scattered.tolist() == [float(rank)] * 2


@_right
def calls_from_other_lines(rank: int, world: World) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.all_reduce(torch.ones(2), async_op=True).wait()


@_right
def waits_in_another_order(rank: int, world: World) -> None:
    works = [dist.all_reduce(torch.ones(2 + each), async_op=True) for each in range(3)]
    for work in works[rank:] + works[:rank]:
        work.wait()


@_right
def groups_in_another_order_asynchronously(rank: int, world: World) -> None:
    groups = [dist.new_group(group_desc=f"group {each}") for each in range(3)]
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups[rank:] + groups[:rank]]
    for work in works:
        work.wait()


@_right
def messages_in_another_order(rank: int, world: World) -> None:
    if rank == 0:
        works = [dist.isend(torch.full((1000 * tag,), float(tag)), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank == 1:
        for tag in (2, 1):
            received = torch.empty(1000 * tag)
            dist.recv(received, 0, tag=tag)
            assert received[-1] == tag


@_right
def a_message_that_nobody_receives(rank: int, world: World) -> None:
    if rank == 0:
        dist.send(torch.ones(3), 1)
    dist.barrier()


@_right
def a_rank_that_is_not_needed_any_more(rank: int, world: World) -> None:
    if rank == 0:
        dist.send(torch.ones(3), 2)
    elif rank == 1:
        dist.send(torch.ones(1000), 2)
    else:
        dist.recv(torch.ones(1000), 1)
        dist.recv(torch.ones(3), 0)


@_right
def a_group_within_the_group(rank: int, world: World) -> None:
    group = dist.new_group([2, 0], sort_ranks=False)
    if rank != 1:
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


@_right
def memory_of_another_order(rank: int, world: World) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    if rank == 1:
        tensor = torch.arange(6.0).view(2, 3).t().contiguous().t()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [[0.0, 3.0, 6.0], [9.0, 12.0, 15.0]]


@_right
def one_block_and_one_list(rank: int, world: World) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    if rank == 0:
        with _coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
    else:
        dist.all_reduce_coalesced(tensors)
    assert [tensor[0].item() for tensor in tensors] == [3.0, 3.0]


@_right
def objects_of_any_size(rank: int, world: World) -> None:
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, "x" * rank * 100)
    assert [len(each) for each in objects] == [0, 100, 200]
    shared = [objects if rank == 1 else None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == [objects]
