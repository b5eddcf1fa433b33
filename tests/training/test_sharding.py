"""Models and tensors that ranks share between them: meshes, DTensor, FSDP2, tensor parallel, pipelines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from run_ranks import RunRanks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import phalanx.testing as pt

_STEPS = 3


def _mlp() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def _batch(step: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))


def _full(model: nn.Module) -> dict[str, Tensor]:
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in values.items()
    }


def _train_alone(optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD) -> dict[str, Tensor]:
    model = _mlp()
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(_batch(step)).square().mean().backward()
        optimizer.step()
    return _full(model)


def _meshes(rank: int, world: pt.World) -> tuple[list[int], list[int], float, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = mesh["dp"].get_group(), mesh["tp"].get_group()
    of_row, of_column = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    dist.all_reduce(of_row, group=rows)
    dist.all_reduce(of_column, group=columns)
    flat = mesh._flatten("all").get_group()
    assert dist.get_world_size(flat) == world.size
    return dist.get_process_group_ranks(rows), dist.get_process_group_ranks(columns), of_row.item(), of_column.item()


def test_mesh_with_sub_groups(run_ranks: RunRanks) -> None:
    assert run_ranks(_meshes, 4) == [
        ([0, 2], [0, 1], 2.0, 1.0),
        ([1, 3], [0, 1], 4.0, 1.0),
        ([0, 2], [2, 3], 2.0, 5.0),
        ([1, 3], [2, 3], 4.0, 5.0),
    ]


_PLACEMENTS: list[tuple[list[Placement], list[Placement]]] = [
    ([Shard(0), Replicate()], [Replicate(), Shard(1)]),
    ([Shard(1), Replicate()], [Shard(0), Replicate()]),
    ([Replicate(), Shard(1)], [Replicate(), Shard(0)]),
    ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),
    ([Replicate(), Replicate()], [Shard(1), Shard(1)]),
]


def _matmuls(rank: int, world: pt.World) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(0)
    left, right = torch.randn(8, 12), torch.randn(12, 20)
    differences = []
    for of_left, of_right in _PLACEMENTS:
        a = distribute_tensor(left, mesh, of_left).requires_grad_()
        b = distribute_tensor(right, mesh, of_right).requires_grad_()
        product = a @ b
        assert isinstance(product, DTensor)
        product.square().sum().backward()
        expected_a, expected_b = left.clone().requires_grad_(), right.clone().requires_grad_()
        (expected_a @ expected_b).square().sum().backward()
        for mine, expected in (
            (product, left @ right),
            (a.grad, expected_a.grad),
            (b.grad, expected_b.grad),
        ):
            assert isinstance(mine, DTensor)
            assert expected is not None
            differences.append(mine.full_tensor().detach() - expected)
    return differences


def test_dtensor_matmuls(run_ranks: RunRanks) -> None:
    for differences in run_ranks(_matmuls, 4):
        for difference in differences:
            torch.testing.assert_close(difference, torch.zeros_like(difference), atol=1e-4, rtol=0)


def _redistribute(rank: int, world: pt.World) -> list[list[list[float]]]:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(16.0).view(4, 4)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    seen = []
    for placements in ([Shard(1), Replicate()], [Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(0)]):
        tensor = tensor.redistribute(mesh, placements)
        seen.append(tensor.full_tensor().tolist())
    parts = DTensor.from_local(torch.ones(4, 4), mesh, [Partial(), Partial()])
    seen.append(parts.redistribute(mesh, [Shard(0), Replicate()]).full_tensor().tolist())
    return seen


def test_dtensor_redistributes(run_ranks: RunRanks) -> None:
    whole = torch.arange(16.0).view(4, 4).tolist()
    assert run_ranks(_redistribute, 4) == [[whole] * 4 + [[[4.0] * 4] * 4]] * 4


def _fsdp(rank: int, world: pt.World) -> dict[str, Tensor]:
    model = _mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rows = 8 // world.size
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(_batch(step)[rank * rows : (rank + 1) * rows]).square().mean().backward()
        optimizer.step()
    return _full(model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_steps_as_one_process_does(run_ranks: RunRanks, ranks: int) -> None:
    alone = _train_alone(torch.optim.Adam)
    for weights in run_ranks(_fsdp, ranks):
        torch.testing.assert_close(weights, alone)


def _fsdp_on_mesh(rank: int, world: pt.World) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _mlp()
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(_batch(step)[2 * rank : 2 * rank + 2]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
    return _full(model)


def test_fsdp_that_replicates_and_shards(run_ranks: RunRanks) -> None:
    alone = _train_alone(torch.optim.Adam)
    for weights in run_ranks(_fsdp_on_mesh, 4):
        torch.testing.assert_close(weights, alone)


def _fsdp_in_bfloat16(rank: int, world: pt.World) -> tuple[dict[str, Tensor], float]:
    model = _mlp()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(_batch(rank)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return _full(model), losses[-1] - losses[0]


def test_fsdp_with_mixed_precision(run_ranks: RunRanks) -> None:
    (weights, change), (weights_there, _) = run_ranks(_fsdp_in_bfloat16, 2)
    assert change < 0
    assert all(torch.equal(weights[name], weights_there[name]) for name in weights)


def _tensor_parallel(rank: int, world: pt.World) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    model = _mlp()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    weight = model[0].weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (16 // world.size, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(_batch(step)).square().mean().backward()
        optimizer.step()
    return _full(model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_mlp(run_ranks: RunRanks, ranks: int) -> None:
    alone = _train_alone()
    for weights in run_ranks(_tensor_parallel, ranks):
        torch.testing.assert_close(weights, alone)


def _two_dimensional(rank: int, world: pt.World) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _mlp()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    here = mesh["dp"].get_local_rank()
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(_batch(step)[4 * here : 4 * here + 4]).square().mean().backward()
        optimizer.step()
    return _full(model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_fsdp_over_tensor_parallel(run_ranks: RunRanks) -> None:
    alone = _train_alone()
    for weights in run_ranks(_two_dimensional, 4):
        torch.testing.assert_close(weights, alone)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class _Pipeline:
    """A function of a rank that processes can be told of."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule

    def __call__(self, rank: int, world: pt.World) -> tuple[list[float], list[Tensor]]:
        whole = _mlp()
        mine = whole[:2] if rank == 0 else whole[2:]
        stage = PipelineStage(mine, rank, world.size, torch.device("cpu"))
        kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[self.schedule]
        schedule = kind(stage, n_microbatches=4, loss_fn=_loss)
        x, losses = _batch(1), []
        for _ in range(2):
            mine.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                of_parts: list[Tensor] = []
                schedule.step(target=torch.zeros(8, 8), losses=of_parts)
                losses.append(torch.stack(of_parts).mean().item())
        return losses, [parameter.grad.clone() for parameter in mine.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_pipeline_of_two_stages(run_ranks: RunRanks, schedule: str) -> None:
    model = _mlp()
    loss = _loss(model(_batch(1)), torch.zeros(8, 8))
    loss.backward()
    (_, first), (losses, second) = run_ranks(_Pipeline(schedule), 2)
    assert losses == pytest.approx([loss.item()] * 2, rel=1e-5)
    torch.testing.assert_close([*first, *second], [parameter.grad for parameter in model.parameters()])
