"""What ranks that are threads have for themselves, and what torch's layers above make of it."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import phalanx
import phalanx.testing as pt
from default_group import default_group


def test_meshes_of_two_ranks_are_not_equal() -> None:
    meshes: list[DeviceMesh] = []

    def make(rank: int, world: pt.World) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        meshes.extend([mesh, mesh["rows"]])
        assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))

    for _ in range(2):
        pt.run(make, 4)
    assert len(set(meshes)) == len(meshes) == 16
    init = DeviceMesh.__init__
    assert init.__module__ == "torch.distributed.device_mesh"


def _matmul(rank: int, world: pt.World) -> tuple[torch.Tensor, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(0)
    left, right = torch.randn(8, 4), torch.randn(4, 6)
    product = distribute_tensor(left, mesh, [Shard(0), Replicate()]) @ distribute_tensor(
        right, mesh, [Replicate(), Shard(1)]
    )
    assert isinstance(product, DTensor)
    return product.full_tensor() - left @ right, mesh.get_coordinate()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_dtensor_matmul(seed: int | None) -> None:
    results = pt.run(_matmul, 4, seed=seed)
    assert [coordinate for _, coordinate in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for difference, _ in results:
        torch.testing.assert_close(difference, torch.zeros(8, 6))


def _train(sharded: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    if sharded:
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(step + 1))).square().sum().backward()
        optimizer.step()
    values = [parameter.detach() for parameter in model.parameters()]
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def test_fsdp_trains_as_one_rank_does() -> None:
    alone = _train(False)
    for values in pt.run(lambda rank, world: _train(True), 2):
        for value, expected in zip(values, alone, strict=True):
            torch.testing.assert_close(value, expected)


def test_waits_for_several_futures() -> None:
    def wait(rank: int, world: pt.World) -> tuple[list[Any], Any]:
        works = [dist.all_reduce(torch.full((1,), float(number)), async_op=True) for number in range(3)]
        values = torch.futures.wait_all([work.get_future() for work in works])
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(2))
        (work,) = manager.works
        return [value[0].item() for value in values], [tensor.tolist() for tensor in work.get_future().wait()]

    for seed in (None, 1):
        assert pt.run(wait, 2, seed=seed) == [([0.0, 2.0, 4.0], [[2.0], [2.0, 2.0]])] * 2
    assert torch.futures.wait_all([]) == []


def test_one_of_several_futures_fails() -> None:
    def wait(rank: int, world: pt.World) -> None:
        if rank == 0:
            works = [dist.irecv(torch.ones(1), 1) for _ in range(2)]
            torch.futures.wait_all([work.get_future() for work in works if work is not None])
        else:
            dist.send(torch.ones(1), 0)

    with pytest.raises(Exception, match="rank 1 ended"):
        pt.run(wait, 2)


def test_a_wait_for_several_works_has_one_timeout() -> None:
    def wait(rank: int, world: pt.World) -> None:
        group = world.group
        if rank == 1:
            # Sent after 40 s; the other is to be done when 60 s have gone by, not after 100.
            group.send([torch.ones(1)], 0, 1).wait()
            world.store.wait(["done"], timedelta(seconds=30))
            return
        group._start_coalescing(torch.device("cpu"))
        group.recv([torch.ones(1)], 1, 1)
        group.recv([torch.ones(1)], 1, 2)
        works = group._end_coalescing(torch.device("cpu"))
        with pytest.raises(phalanx.CallTimeout, match="gave up waiting after 60 s"):
            works.wait(timedelta(seconds=60))
        world.store.set("done", "")

    pt.run(wait, 2, faults=[pt.delay(1, at_call=1, seconds=40)])


def test_monitored_barrier_names_all_that_are_missing_on_every_rank() -> None:
    def come(rank: int, world: pt.World) -> str | None:
        if rank in (1, 3):
            world.store.get("go")
            return None
        with pytest.raises(phalanx.CallTimeout) as caught:
            default_group().monitored_barrier(timedelta(minutes=30), wait_all_ranks=True)
        world.store.set("go", "")
        return str(caught.value)

    for rank, text in enumerate(pt.run(come, 5)):
        assert rank in (1, 3) or "ranks 1, 3 did not come" in text
    pt.run(lambda rank, world: default_group().monitored_barrier(), 3)


def _draw(rank: int, world: pt.World) -> tuple[float, ...]:
    world.barrier()
    return torch.rand(1).item(), random.random(), numpy.random.random(), random.gauss(0, 1), torch.randn(1).item()


def _numpys_state() -> object:
    return numpy.random.get_state(legacy=False)["state"]["key"].tolist()


def test_every_run_begins_with_the_same_random_numbers() -> None:
    first = pt.run(_draw, 2)
    assert first[0] == first[1]
    torch.rand(3), random.random(), numpy.random.random(), random.gauss(0, 1)
    before = torch.get_rng_state(), random.getstate(), _numpys_state()
    assert pt.run(_draw, 2, seed=5) == first
    assert pt.run(_draw, 2, processes=True) == first
    after = torch.get_rng_state(), random.getstate(), _numpys_state()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_gaussians_of_python_stay_with_their_rank() -> None:
    def draw(rank: int, world: pt.World) -> float:
        random.seed(1)
        if rank == 0:
            random.gauss(0, 1)
        world.barrier()
        return random.gauss(0, 1)

    generator = random.Random(1)
    first, second = generator.gauss(0, 1), generator.gauss(0, 1)
    for seed in range(5):
        assert pt.run(draw, 2, seed=seed) == [second, first]


def test_one_run_at_a_time() -> None:
    begun, go_on, outcome = threading.Event(), threading.Event(), []

    def hold(rank: int, world: pt.World) -> None:
        begun.set()
        go_on.wait(20)

    other = threading.Thread(target=lambda: outcome.append(pt.run(hold, 1)))
    other.start()
    begun.wait(20)
    try:
        with pytest.raises(RuntimeError, match="expected one run at a time in a process"):
            pt.run(_draw, 2)
    finally:
        go_on.set()
        other.join(20)
    assert outcome == [[None]]
    pt.run(_draw, 2)


def _join(rank: int, world: pt.World) -> float:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    with Join([model]):
        for _ in range(3 + rank):
            model(torch.ones(1, 1)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return float(gradient)


def test_join_with_uneven_inputs() -> None:
    expected = pt.run(_join, 2, processes=True)
    assert pt.run(_join, 2) == expected
    assert pt.run(_join, 2, schedule="free") == expected
    for seed in range(8):
        assert pt.run(_join, 2, seed=seed) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is deprecated:FutureWarning")
def test_modules_that_ranks_import_first() -> None:
    def reduce(rank: int, world: pt.World) -> float:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        from torch.distributed.nn import functional

        total = functional.all_reduce(torch.ones(1))
        return float(total.item())

    for _ in range(2):
        assert pt.run(reduce, 2) == [2.0, 2.0]


def test_torch_knows_nothing_of_a_run_that_is_over() -> None:
    def work(rank: int, world: pt.World) -> None:
        group = dist.new_group([0, 1])
        for name in (world.group.group_name, group.group_name):
            assert _distributed_c10d._resolve_process_group(name) is not None
        reduced = functional_collectives.all_reduce(torch.ones(1), "sum", group)
        assert reduced.item() == 2.0

    pt.run(work, 2)
    for name in (GroupName("0"), GroupName("1")):
        with pytest.raises(RuntimeError, match="Could not resolve the process group"):
            _distributed_c10d._resolve_process_group(name)
    assert _distributed_c10d._get_work_registry_size() == 0
    assert torch._C._is_multithreading_enabled()
    # Groups that the process has of its own work as before.
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pt.run(work, 2)
        assert dist.group.WORLD is not None
        assert functional_collectives.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == 1.0
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
