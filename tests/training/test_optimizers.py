"""Optimizers and averagers that communicate, checkpoints that ranks write together, SyncBatchNorm."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from run_ranks import RunRanks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import phalanx.testing as pt


def _mlp() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(_batch(rank, step)).square().mean().backward()
    optimizer.step()


def _values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _with_zero(rank: int, world: pt.World) -> tuple[list[Tensor], int, int]:
    model = DistributedDataParallel(_mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
    for step in range(4):
        _step(model, optimizer, rank, step)
    optimizer.consolidate_state_dict(to=0)
    num_states = len(optimizer.state_dict()["state"]) if rank == 0 else 0
    return _values(model), num_states, sum(len(group["params"]) for group in optimizer.optim.param_groups)


def _with_adam(rank: int, world: pt.World) -> list[Tensor]:
    model = DistributedDataParallel(_mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(4):
        _step(model, optimizer, rank, step)
    return _values(model)


def test_zero_optimizer(run_ranks: RunRanks) -> None:
    expected = run_ranks(_with_adam, 2)[0]
    results = run_ranks(_with_zero, 2)
    for values, _, _ in results:
        torch.testing.assert_close(values, expected)
    assert results[0][1] == 4
    assert sum(num_own for *_, num_own in results) == 4
    assert all(num_own < 4 for *_, num_own in results)


class _Uneven:
    """A function of a rank that processes can be told of."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(self, rank: int, world: pt.World) -> list[Tensor]:
        group = dist.new_group(backend=self.backend)
        model = DistributedDataParallel(_mlp(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.05)
        with Join([model, optimizer]):
            for step in range(2 + rank):
                _step(model, optimizer, rank, step)
        return _values(model)


def test_zero_optimizer_with_uneven_inputs(run_ranks: RunRanks) -> None:
    expected = pt.run(_Uneven("gloo"), 2, processes=True)
    torch.testing.assert_close(run_ranks(_Uneven("phalanx"), 2), expected)


class _LocalSGD:
    """Ranks step by themselves and average their models; a function of a rank that processes can be told of."""

    def __init__(self, averager: str) -> None:
        self.averager = averager

    def __call__(self, rank: int, world: pt.World) -> tuple[list[Tensor], bool]:
        model = DistributedDataParallel(_mlp())
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        state = post_localSGD_hook.PostLocalSGDState(None, groups[rank // 2], start_localSGD_iter=1)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        periods = OrderedDict([(2, 2), (4, 4)])
        averager = (
            HierarchicalModelAverager(period_group_size_dict=periods, warmup_steps=0)
            if self.averager == "hierarchical"
            else PeriodicModelAverager(period=4, warmup_steps=0)
        )
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        apart = False
        for step in range(5):
            _step(model, optimizer, rank, step)
            first = torch.cat([value.flatten() for value in _values(model)])
            everyone = [torch.empty_like(first) for _ in range(world.size)]
            dist.all_gather(everyone, first)
            apart |= not torch.equal(everyone[0], everyone[2])
        return _values(model), apart


@pytest.mark.parametrize("averager", ["periodic", "hierarchical"])
def test_post_local_sgd(run_ranks: RunRanks, averager: str) -> None:
    results = run_ranks(_LocalSGD(averager), 4)
    assert all(apart for _, apart in results), "halves of the world are to go separate ways in between"
    for values, _ in results:
        torch.testing.assert_close(values, results[0][0])


def _sharded() -> nn.Sequential:
    model = _mlp()
    fully_shard(model)
    return model


class _Save:
    """A function of a rank that processes can be told of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int, world: pt.World) -> dict[str, Tensor]:
        model = _sharded()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(3):
            _step(model, optimizer, rank, step)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=self.folder)
        return _full(model)


class _Load:
    """Likewise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, rank: int, world: pt.World) -> tuple[dict[str, Tensor], float]:
        model = _sharded()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=self.folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        (step,) = {state["step"].item() for state in optimizer.state.values()}
        return _full(model), step


def _full(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_checkpoint_across_world_sizes(run_ranks: RunRanks, before: int, after: int, tmp_path: Path) -> None:
    saved = run_ranks(_Save(tmp_path), before)[0]
    assert len(saved) == 4
    for weights, step in run_ranks(_Load(tmp_path), after):
        assert step == 3
        assert all(torch.equal(weights[name], saved[name]) for name in saved)


def _sync_batch_norm(rank: int, world: pt.World) -> tuple[Tensor, Tensor]:
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    plain(_batch(0, 0))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert isinstance(converted[1], nn.SyncBatchNorm)
    x = _batch(rank, 1)
    return converted.eval()(x), plain.eval()(x)


def test_sync_batch_norm_evaluates(run_ranks: RunRanks) -> None:
    for output, expected in run_ranks(_sync_batch_norm, 2):
        torch.testing.assert_close(output, expected)
