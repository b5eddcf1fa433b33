"""Functional collectives, and torch.compile of a step with collectives inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_ranks import RunRanks
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import phalanx.testing as pt


def _functional(rank: int, world: pt.World) -> dict[str, list[Any]]:
    group: Any = dist.group.WORLD
    size = world.size
    mine = torch.arange(4.0) + 10 * rank
    splits = [1] * size
    return {
        "all_reduce": functional.all_reduce(mine, "sum", group).tolist(),
        "all_reduce of many": [t.tolist() for t in functional.all_reduce_coalesced([mine, mine + 1], "max", group)],
        "all_gather_single": functional.all_gather_single(mine, 0, group).tolist(),
        "all_gather of many": [
            t.tolist() for t in functional.all_gather_single_coalesced([mine[:1], mine[1:2]], group)
        ],
        "reduce_scatter_single": functional.reduce_scatter_single(mine, "sum", 0, group).tolist(),
        "reduce_scatter of many": [
            t.tolist() for t in functional.reduce_scatter_single_coalesced([mine, mine], "sum", [0, 0], group)
        ],
        "all_to_all_single": functional.all_to_all_single(mine[:size], splits, splits, group).tolist(),
        "broadcast": functional.broadcast(mine, 1, group).tolist(),
        "permute": functional.permute_tensor(mine[:1], [1, 0], group).tolist(),
    }


def test_functional_collectives(run_ranks: RunRanks) -> None:
    for rank, results in enumerate(run_ranks(_functional, 2)):
        assert results == {
            "all_reduce": [10.0, 12.0, 14.0, 16.0],
            "all_reduce of many": [[10.0, 11.0, 12.0, 13.0], [11.0, 12.0, 13.0, 14.0]],
            "all_gather_single": [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0],
            "all_gather of many": [[0.0, 10.0], [1.0, 11.0]],
            "reduce_scatter_single": [[10.0, 12.0], [14.0, 16.0]][rank],
            "reduce_scatter of many": [[[10.0, 12.0], [14.0, 16.0]][rank]] * 2,
            "all_to_all_single": [float(rank), 10.0 + rank],
            "broadcast": [10.0, 11.0, 12.0, 13.0],
            "permute": [10.0 - 10 * rank],
        }


def _gradient(rank: int, world: pt.World) -> list[float]:
    x = (torch.arange(2.0) + rank).requires_grad_()
    group: Any = dist.group.WORLD
    gathered = functional.all_gather_single_autograd(x, 0, group)
    (gathered * torch.arange(4.0) * (rank + 1)).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def test_gradient_of_a_functional_collective(run_ranks: RunRanks) -> None:
    assert run_ranks(_gradient, 2) == [[0.0, 3.0], [6.0, 9.0]]


class _Compiled:
    """A step whose gradients are averaged by a collective inside of it; processes can be told of this."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(self, rank: int, world: pt.World) -> tuple[list[Tensor], list[Tensor]]:
        def step(weight: Tensor, x: Tensor) -> Tensor:
            partial = (x @ weight).tanh().mean(0)
            group: Any = dist.group.WORLD
            mean = functional.all_reduce(partial, "sum", group) / dist.get_world_size()
            everything = functional.all_gather_single(mean * 2, 0, group)
            return everything + 1

        torch.manual_seed(0)
        weight = torch.randn(4, 3)
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=self.backend, fullgraph=True)
        return [compiled(weight, x), compiled(weight, x)], [step(weight, x)] * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_step_with_collectives(backend: str) -> None:
    for compiled, expected in pt.run(_Compiled(backend), 2, processes=True, stuck_after=100):
        torch.testing.assert_close(compiled, expected)


def _compiled_ddp(rank: int, world: pt.World) -> list[list[Tensor]]:
    def train(compiles: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
        forward = torch.compile(model, backend="aot_eager") if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * rank + step)
            forward(torch.randn(3, 4, generator=generator)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    torch._dynamo.reset()
    return [train(compiles=True), train(compiles=False)]


def test_compiled_ddp() -> None:
    for compiled, eager in pt.run(_compiled_ddp, 2, processes=True, stuck_after=100):
        torch.testing.assert_close(compiled, eager)
