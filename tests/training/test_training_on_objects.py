"""Training on groups that are plain objects: without a default group, and as the default group.

Results are compared with one process that has the whole batch. What torch refuses without a default group works once
torch has registered the group (`pg_options=group`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint
from limits import WORKS, Limit
from run_ranks import RunRanks
from torch import Tensor, nn
from torch.distributed import PrefixStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import phalanx
import phalanx.testing as pt
from default_group import default_group

_STEPS, _ROWS = 3, 4


def _group(world: pt.World, rank: int, size: int, name: str = "objects") -> phalanx.ProcessGroup:
    return phalanx.ProcessGroup(PrefixStore(name, world.store), rank, size, timedelta(seconds=30), name=name)


def _hand_over(group: phalanx.ProcessGroup) -> None:
    """Makes the group torch's default group."""
    store = group.get_group_store()
    dist.init_process_group("phalanx", store=store, rank=group.rank(), world_size=group.size(), pg_options=group)
    assert dist.group.WORLD is group


@contextmanager
def _alone(world: pt.World, rank: int) -> Iterator[phalanx.ProcessGroup]:
    """A group of all ranks that torch does not know."""
    group = _group(world, rank, world.size)
    yield group
    assert not dist.is_initialized()
    group.shutdown()


@contextmanager
def _as_default(world: pt.World, rank: int) -> Iterator[phalanx.ProcessGroup]:
    """A group of all ranks that is torch's default group."""
    group = _group(world, rank, world.size)
    _hand_over(group)
    yield group
    dist.destroy_process_group()


def _mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


class _Partly(nn.Module):
    """Steps use one half or the other, and leave a trace in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([_mlp(), _mlp()])
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: Tensor, half: int) -> Tensor:
        self.seen += batch[0, 0].detach()
        output: Tensor = self.halves[half](batch)
        return output


def _whole(step: int, size: int = 2) -> Tensor:
    return torch.randn(size * _ROWS, 8, generator=torch.Generator().manual_seed(step))


def _own(group: dist.ProcessGroup, step: int) -> Tensor:
    return _whole(step, group.size()).chunk(group.size())[group.rank()]


def _full(model: nn.Module) -> list[Tensor]:
    values = [value.detach() for value in model.parameters()]
    return [(value.full_tensor() if isinstance(value, DTensor) else value).clone() for value in values]


def _descend(model: nn.Module, loss: Callable[[int], Tensor], optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    return _full(model)


def _train_alone(size: int = 2) -> list[Tensor]:
    model = _mlp()
    return _descend(model, lambda step: model(_whole(step, size)).square().mean())


def _assert_trained(results: list[list[Tensor]], expected: list[Tensor]) -> None:
    for values in results:
        torch.testing.assert_close(values, expected)


# Without a default group.


def _ddp(rank: int, world: pt.World) -> list[Tensor]:
    with _alone(world, rank) as group:
        model = DistributedDataParallel(_mlp(), process_group=group, bucket_cap_mb=1e-4, init_sync=True)
        values = _descend(model, lambda step: model(_own(group, step)).square().mean())
        # Calls of the group itself fit between those of DDP.
        total = torch.ones(1)
        group.allreduce(total).wait()
        assert total.item() == world.size
        return values


def test_ddp_trains_as_one_process_does(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_ddp, 2, init=False), _train_alone())


def _ddp_with_hook(rank: int, world: pt.World) -> list[Tensor]:
    with _alone(world, rank) as group:
        model = DistributedDataParallel(_mlp(), process_group=group, gradient_as_bucket_view=True, static_graph=True)
        model.register_comm_hook(group, allreduce_hook)
        return _descend(model, lambda step: model(_own(group, step)).square().mean())


def test_ddp_with_comm_hook_and_static_graph(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_ddp_with_hook, 2, init=False), _train_alone())


def _ddp_no_sync(rank: int, world: pt.World) -> list[Tensor]:
    with _alone(world, rank) as group:
        model = DistributedDataParallel(_mlp(), process_group=group)

        def loss(step: int) -> Tensor:
            first, second = _own(group, step).chunk(2)
            with model.no_sync():
                (model(first).square().mean() / 2).backward()
            half: Tensor = model(second).square().mean() / 2
            return half

        return _descend(model, loss)


def test_ddp_accumulates_without_sync(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_ddp_no_sync, 2, init=False), _train_alone())


def _ddp_unused(rank: int, world: pt.World) -> tuple[list[Tensor], float]:
    with _alone(world, rank) as group:
        model = DistributedDataParallel(_Partly(), process_group=group, find_unused_parameters=True)
        values = _descend(model, lambda step: model(_own(group, step), step % 2).square().mean())
        model(_own(group, 0), 0)
        return values, float(model.module.seen - _own(group, 0)[0, 0])


def test_ddp_unused_parameters_and_buffers(run_ranks: RunRanks) -> None:
    alone = _Partly()
    expected = _descend(alone, lambda step: alone(_whole(step), step % 2).square().mean())
    results = run_ranks(_ddp_unused, 2, init=False)
    _assert_trained([values for values, _ in results], expected)
    # Before each forward pass all ranks get the buffers of rank 0, which has the first row of each batch.
    assert [seen for _, seen in results] == pytest.approx([float(alone.seen)] * 2, rel=1e-5)


def _collectives(rank: int, world: pt.World) -> list[list[float]]:
    with _alone(world, rank) as group:
        total, copied, received = (torch.full((2,), float(rank + 1)) for _ in range(3))
        gathered = [torch.zeros(2), torch.zeros(2)]
        dist.all_reduce(total, group=group)
        dist.broadcast(copied, group_src=1, group=group)
        dist.gather(copied, gathered if rank == 0 else None, group_dst=0, group=group)
        dist.barrier(group=group)
        dist.send(torch.full((2,), float(rank + 5)), group_dst=1 - rank, group=group)
        group.recv([received], 1 - rank, 0).wait()
        return [tensor.tolist() for tensor in (total, copied, gathered[1], received)]


def test_collectives_with_ranks_of_the_group(run_ranks: RunRanks) -> None:
    assert run_ranks(_collectives, 2, init=False) == [
        [[3.0, 3.0], [2.0, 2.0], [2.0, 2.0], [6.0, 6.0]],
        [[3.0, 3.0], [2.0, 2.0], [0.0, 0.0], [5.0, 5.0]],
    ]


def _objects(rank: int, world: pt.World) -> list[Any]:
    with _alone(world, rank) as group:
        gathered, copied, own = [None] * 2, [rank, "x"], [None]
        dist.all_gather_object(gathered, {"rank": rank}, group=group)
        dist.broadcast_object_list(copied, group_src=1, group=group)
        dist.scatter_object_list(own, ["a", "b"] if rank == 0 else None, group_src=0, group=group)
        collected = [None] * 2 if rank == 0 else None
        dist.gather_object(rank * 10, collected, group_dst=0, group=group)
        return [gathered, copied, own, collected]


def test_objects_with_ranks_of_the_group(run_ranks: RunRanks) -> None:
    both = [{"rank": 0}, {"rank": 1}]
    assert run_ranks(_objects, 2, init=False) == [
        [both, [1, "x"], ["a"], [0, 10]],
        [both, [1, "x"], ["b"], None],
    ]


# As the default group.


def _fsdp(rank: int, world: pt.World) -> list[Tensor]:
    with _as_default(world, rank) as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        model = _mlp()
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return _descend(model, lambda step: model(_own(group, step)).square().mean())


def test_fsdp_trains_as_one_process_does(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_fsdp, 2, init=False), _train_alone())


def _replicated_and_sharded(rank: int, world: pt.World) -> list[Tensor]:
    _hand_over(_group(world, rank, 4, "all"))
    row, column = divmod(rank, 2)
    # Groups with the ranks of a row and of a column of the mesh; only their members make them.
    across = _group(world, row, 2, f"column-{column}")
    along = _group(world, column, 2, f"row-{row}")
    for group, ranks in (across, [column, column + 2]), (along, [2 * row, 2 * row + 1]):
        dist.new_group(ranks, backend="phalanx", pg_options=group, use_local_synchronization=True)
        assert dist.get_process_group_ranks(group) == ranks
    mesh = DeviceMesh.from_group([across, along], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    model = _mlp()
    fully_shard(model, mesh=mesh)
    values = _descend(model, lambda step: model(_own(default_group(), step)).square().mean())
    dist.destroy_process_group()
    return values


def test_fsdp_on_a_mesh_of_two_groups(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_replicated_and_sharded, 4, init=False), _train_alone(4))


def _dtensors(rank: int, world: pt.World) -> tuple[Tensor, Tensor, list[int]]:
    with _as_default(world, rank) as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        left = distribute_tensor(torch.arange(32.0).reshape(4, 8), mesh, [Shard(1)])
        right = distribute_tensor(torch.arange(48.0).reshape(8, 6), mesh, [Shard(0)])
        product = left @ right
        assert isinstance(product, DTensor)
        product = product.redistribute(mesh, [Shard(0)])
        moved = left.redistribute(mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        return product.full_tensor(), moved.to_local().clone(), list(product.to_local().shape)


def test_dtensors_on_a_mesh_of_the_group(run_ranks: RunRanks) -> None:
    left, right = torch.arange(32.0).reshape(4, 8), torch.arange(48.0).reshape(8, 6)
    for product, moved, shape in run_ranks(_dtensors, 2, init=False):
        assert torch.equal(product, left @ right)
        assert torch.equal(moved, left)
        assert shape == [2, 6]


def _zero(rank: int, world: pt.World) -> list[Tensor]:
    with _as_default(world, rank) as group:
        model = DistributedDataParallel(_mlp(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
        return _descend(model, lambda step: model(_own(group, step)).square().mean(), optimizer)


def test_zero_redundancy_optimizer(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_zero, 2, init=False), _train_alone())


def _functional(rank: int, world: pt.World) -> list[list[float]]:
    with _as_default(world, rank) as group:
        own = torch.tensor([rank, rank + 10.0])
        results = [
            functional.all_reduce(own, "sum", group),
            functional.all_gather_single(own, 0, group),
            functional.reduce_scatter_single(own, "max", 0, group),
            functional.all_to_all_single(own, None, None, group),
            functional.broadcast(own, 1, group),
        ]
        return [functional.wait_tensor(result).tolist() for result in results]


def test_functional_collectives(run_ranks: RunRanks) -> None:
    both = [[1.0, 21.0], [0.0, 10.0, 1.0, 11.0]]
    assert run_ranks(_functional, 2, init=False) == [
        [*both, [1.0], [0.0, 1.0], [1.0, 11.0]],
        [*both, [11.0], [10.0, 11.0], [1.0, 11.0]],
    ]


def _beside_another(rank: int, world: pt.World) -> list[str]:
    """The world has a default group already."""
    group = _group(world, rank, world.size)
    told = [LIMITS[name].outcome(group) for name in ("DeviceMesh.from_group", "functional collectives")]
    dist.new_group([0, 1], backend="phalanx", pg_options=group)
    assert dist.group.WORLD is not group
    return told + [LIMITS[name].outcome(group) for name in LIMITS]


def test_group_beside_another_default_group(run_ranks: RunRanks) -> None:
    for mesh, functional_call, *registered in run_ranks(_beside_another, 2):
        assert mesh.startswith("KeyError: ")
        assert re.match(LIMITS["functional collectives"].expected()[0], functional_call)
        assert registered == [WORKS] * len(LIMITS)


def _names(rank: int, world: pt.World) -> list[str]:
    group = _group(world, rank, world.size, "learners")
    _hand_over(group)
    told = []
    with pytest.raises(phalanx.InvalidCall) as refused:
        group.broadcast(torch.ones(1), root=7)
    told.append(str(refused.value.group))
    with pytest.raises(phalanx.GroupError) as error:
        dist.new_group([0, 1], backend="phalanx", pg_options=group)
    told.append(error.value.message)
    dist.destroy_process_group()
    with pytest.raises(phalanx.GroupError) as error:
        group.allreduce(torch.ones(1)).wait()
    told.append(error.value.code)
    other = _group(world, rank, world.size, "others")
    with pytest.raises(phalanx.GroupError) as error:
        dist.init_process_group("phalanx", store=world.store, rank=1 - rank, world_size=2, pg_options=other)
    told.append(error.value.message)
    assert not dist.is_initialized()
    other.allreduce(torch.ones(1)).wait()
    other.shutdown()
    return told


def test_group_keeps_its_name_and_is_registered_once(run_ranks: RunRanks) -> None:
    for rank, told in enumerate(run_ranks(_names, 2, init=False)):
        assert told == [
            "learners",
            "torch.distributed has registered this group already, as '0'",
            "GROUP:CLOSED",
            f"expected rank {1 - rank} of 2, got a group where this process is rank {rank} of 2",
        ]


# What torch refuses without a default group.


def _join(group: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    with model.join():
        for _ in range(1 + group.rank()):
            model(torch.ones(1, 2)).sum().backward()


def _peer(group: dist.ProcessGroup) -> int:
    return 1 - group.rank()


def _receive(group: dist.ProcessGroup) -> None:
    dist.send(torch.ones(2), group=group, group_dst=_peer(group))
    dist.recv(torch.ones(2), group=group, group_src=_peer(group))


def _exchange_objects(group: dist.ProcessGroup) -> None:
    dist.send_object_list([1], group=group, group_dst=_peer(group))
    dist.recv_object_list([None], group=group, group_src=_peer(group))


def _batch(group: dist.ProcessGroup) -> None:
    ops = [dist.P2POp(op, torch.ones(2), group=group, group_peer=_peer(group)) for op in (dist.isend, dist.irecv)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _mesh(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group([group], "cpu", list(range(group.size())), mesh_dim_names=("shard",))


_NO_DEFAULT = r"ValueError: Default process group has not been initialized"
_NOT_REGISTERED = r"ValueError: Group .* is not registered, please create group with torch\.distributed\.new_group API"
# Outcomes are patterns: some name the group.
LIMITS = {
    "DeviceMesh.from_group": Limit(lambda group: DeviceMesh.from_group(group, "cpu"), {(2, 13): r"KeyError: "}),
    "DeviceMesh.from_group of a list": Limit(_mesh, {(2, 13): _NO_DEFAULT}),
    "functional collectives": Limit(
        lambda group: functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", group)),
        {(2, 13): r"RuntimeError: Could not resolve the process group registered under the name objects"},
    ),
    "DDP join": Limit(_join, {(2, 13): _NO_DEFAULT}),
    "ZeroRedundancyOptimizer": Limit(
        lambda group: ZeroRedundancyOptimizer(_mlp().parameters(), torch.optim.SGD, process_group=group, lr=0.1),
        {(2, 13): _NO_DEFAULT},
    ),
    "get_rank": Limit(dist.get_rank, {(2, 13): _NO_DEFAULT}),
    "get_backend": Limit(
        dist.get_backend, {(2, 13): r"ValueError: Process group .* is not initialized in the world group map"}
    ),
    "get_process_group_ranks": Limit(dist.get_process_group_ranks, {(2, 13): r"KeyError: "}),
    "a global rank": Limit(lambda group: dist.broadcast(torch.ones(2), src=0, group=group), {(2, 13): _NOT_REGISTERED}),
    "recv": Limit(_receive, {(2, 13): _NOT_REGISTERED}),
    "recv_object_list": Limit(_exchange_objects, {(2, 13): _NOT_REGISTERED}),
    "batch_isend_irecv": Limit(_batch, {(2, 13): _NOT_REGISTERED}),
}


class _Try:
    """A function of a rank that processes can be told of."""

    def __init__(self, name: str, registers: bool) -> None:
        self.name, self.registers = name, registers

    def __call__(self, rank: int, world: pt.World) -> str:
        with (_as_default if self.registers else _alone)(world, rank) as group:
            return LIMITS[self.name].outcome(group)


@pytest.mark.parametrize("name", LIMITS)
def test_torch_refuses_a_group_that_it_did_not_register(name: str, run_ranks: RunRanks) -> None:
    (expected,) = LIMITS[name].expected()
    for told in run_ranks(_Try(name, registers=False), 2, init=False):
        assert re.match(expected, told)


@pytest.mark.parametrize("name", LIMITS)
def test_torch_takes_the_group_as_default_group(name: str, run_ranks: RunRanks) -> None:
    assert run_ranks(_Try(name, registers=True), 2, init=False) == [WORKS] * 2


def _checkpoint(rank: int, world: pt.World) -> list[str]:
    """What can be read of a checkpoint that two ranks saved together."""
    group = _group(world, rank, world.size)
    # One folder per rank: without a default group all ranks write the same files.
    alone, together = world.tmp_path / f"alone-{rank}", world.tmp_path / "together"
    state = {f"of {rank}": torch.full((2,), float(rank))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.distributed.checkpoint.save(state, checkpoint_id=alone, process_group=group)
    assert any("assuming the intent is to save in a single process" in str(warning.message) for warning in caught)
    _hand_over(group)
    torch.distributed.checkpoint.save(state, checkpoint_id=together, process_group=group)
    read = {f"of {one}": torch.zeros(2) for one in range(2)}
    torch.distributed.checkpoint.load(read, checkpoint_id=together, process_group=group)
    dist.destroy_process_group()
    return [name for name, value in read.items() if value.tolist() == [float(name[-1])] * 2]


def test_checkpoint_ignores_a_group_that_torch_did_not_register() -> None:
    assert pt.run(_checkpoint, 2, init=False, processes=True) == [["of 0", "of 1"]] * 2


def test_a_group_that_was_shut_down_is_not_registered() -> None:
    def program(rank: int, world: pt.World) -> str:
        with phalanx.new_group() as group:
            pass
        with pytest.raises(phalanx.GroupError) as caught:
            dist.init_process_group("phalanx", store=world.store, rank=rank, world_size=1, pg_options=group)
        assert not dist.is_initialized()
        return caught.value.code

    assert pt.run(program, ranks=1, init=False) == ["GROUP:CLOSED"]
