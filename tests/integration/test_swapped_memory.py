"""Programs that give a tensor object other memory (`set_`, `.data = ...`) while a call that uses it is in flight.

The call keeps the memory that the tensor had when the call was made, and writes there. Rank 1 holds back until rank 0
has swapped the memory, so that the call is in flight on rank 0.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, World, values
from torch import Tensor

import phalanx.testing

# Large enough to be mapped alone: the system takes it back when it is freed.
_NUMEL = 4_000_000
_Call = Callable[[Tensor, int], Any]

_CALLS: dict[str, _Call] = {
    "all_reduce": lambda tensor, rank: dist.all_reduce(tensor, async_op=True),
    "broadcast": lambda tensor, rank: dist.broadcast(tensor, 1, async_op=True),
    "all_gather": lambda tensor, rank: dist.all_gather(
        [torch.empty(_NUMEL), tensor] if rank == 0 else [tensor, torch.empty(_NUMEL)],
        torch.ones(_NUMEL),
        async_op=True,
    ),
    "input": lambda tensor, rank: dist.all_gather_single(torch.empty(2 * _NUMEL), tensor, async_op=True),
    "irecv": lambda tensor, rank: dist.irecv(tensor, 1) if rank == 0 else dist.isend(tensor, 0),
    "isend": lambda tensor, rank: dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0),
}


def _swap(tensor: Tensor, by_set: bool) -> None:
    if by_set:
        tensor.set_(torch.zeros(3).untyped_storage())
    else:
        tensor.data = torch.zeros(3)


def _swapped(here: Here, call: str, by_set: bool) -> list[float]:
    here.init()
    gate = Gate(here)
    tensor = torch.full((_NUMEL,), here.rank + 1.0)
    if here.rank == 1:
        gate.wait("swapped")
    work = _CALLS[call](tensor, here.rank)
    if here.rank == 0:
        _swap(tensor, by_set)
        gc.collect()
        gate.open("swapped")
    work.wait()
    found: list[float] = tensor.unique().tolist()
    return found


@pytest.mark.parametrize("by_set", [False, True])
@pytest.mark.parametrize("call", _CALLS)
def test_memory_that_is_swapped_in_flight(call: str, by_set: bool, tmp_path: Path) -> None:
    swapped, _ = values(_swapped, 2, tmp_path, call, by_set)
    assert swapped == [0.0]


def _swapped_strided(here: Here, call: str) -> list[list[float]]:
    """What is copied back goes to the memory that the tensor had."""
    here.init()
    gate = Gate(here)
    base = torch.full((1000, 4), here.rank + 1.0)
    view, other = base[:, 1], torch.zeros(1000)
    if here.rank == 1:
        gate.wait("swapped")
    work = _CALLS[call](view, here.rank)
    if here.rank == 0:
        view.set_(other)  # type: ignore[call-overload]
        gate.open("swapped")
    work.wait()
    return [base[:, 1].unique().tolist(), other.unique().tolist()]


@pytest.mark.parametrize(("call", "expected"), [("all_reduce", 3.0), ("broadcast", 2.0), ("irecv", 2.0)])
def test_a_strided_tensor_whose_memory_is_swapped(call: str, expected: float, tmp_path: Path) -> None:
    assert values(_swapped_strided, 2, tmp_path, call)[0] == [[expected], [0.0]]


def _swapped_by_a_thread(here: Here, plain: bool) -> list[float]:
    """While the main thread is in a synchronous call."""
    here.init()
    gate = Gate(here)
    tensor = torch.full((_NUMEL,), here.rank + 1.0)
    tensors = [tensor, torch.ones(1)]
    if here.rank == 1:
        gate.wait("swapped")

    def swap() -> None:
        # The other rank has not come: the call does not end before.
        here.hear()
        _swap(tensor, by_set=True)
        gate.open("swapped")

    if here.rank == 0:
        swapper = threading.Thread(target=swap)
        swapper.start()
        here.tell("in the call")
    if plain:
        dist.all_reduce(tensor)
    else:
        group = dist.group.WORLD
        assert group is not None
        group.allreduce_coalesced(tensors).wait()
    found: list[float] = tensor.unique().tolist()
    return found


@pytest.mark.parametrize("plain", [True, False])
def test_memory_that_another_thread_swaps(plain: bool, tmp_path: Path) -> None:
    world = World(_swapped_by_a_thread, 2, tmp_path, plain)
    world.told(0)
    world.wait_asleep(0)
    world.tell(0)
    ends = world.ends()
    assert [end.error for end in ends] == [None, None], [end.trace for end in ends]
    assert ends[0].value == [0.0]


def _swapped_in_a_world_of_threads(rank: int, world: phalanx.testing.World) -> list[list[float]]:
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda tensor: dist.all_reduce(tensor, async_op=True),
        lambda tensor: dist.irecv(tensor, 1) if rank == 0 else dist.isend(tensor, 0),
    ]
    found = []
    for call in calls:
        memory, other = torch.full((1000,), rank + 1.0), torch.zeros(3)
        tensor = memory.detach()
        if rank == 1:
            dist.recv(torch.empty(1), 0, tag=1)
        work = call(tensor)
        if rank == 0:
            tensor.set_(other)  # type: ignore[call-overload]
            dist.send(torch.zeros(1), 1, tag=1)
        work.wait()
        found += [memory.unique().tolist(), other.unique().tolist()]
    return found


def test_memory_that_is_swapped_where_ranks_are_threads() -> None:
    found, _ = phalanx.testing.run(_swapped_in_a_world_of_threads, 2)
    assert found == [[3.0], [0.0], [2.0], [0.0]]
