"""What torch shows to dispatch modes and to tensor subclasses: every call, as on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from run_ranks import RunRanks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import phalanx.testing as pt
from default_group import default_group

Make = Callable[[float, int], Tensor]
Program = Callable[[dist.ProcessGroup, Make], list[Tensor]]


class Watch(TorchDispatchMode):
    """Notes which ops of c10d it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def _plain(value: float, size: int) -> Tensor:
    return torch.full((size,), float(value))


def _two(value: float, size: int) -> Tensor:
    return TwoTensor(_plain(value, size), _plain(value * 10, size))


def _all_reduce(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    one, other = make(group.rank() + 1, 3), make(group.rank() + 1, 3)
    dist.all_reduce(one, group=group)
    dist.all_reduce(other, dist.ReduceOp.MAX, group=group)
    return [one, other]


def _all_reduce_coalesced(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    tensors = [make(group.rank() + 1, 3), make(group.rank() + 5, 2)]
    group.allreduce_coalesced(tensors).wait()
    return tensors


def _rooted(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    reduced, cast, part = make(group.rank() + 1, 3), make(group.rank() + 1, 3), make(0, 2)
    gathered = [make(0, 2) for _ in range(group.size())] if group.rank() == 1 else None
    parts = [make(rank + 3, 2) for rank in range(group.size())] if group.rank() == 0 else None
    dist.reduce(reduced, 1, group=group)
    dist.broadcast(cast, 1, group=group)
    dist.gather(make(group.rank() + 2, 2), gathered, 1, group=group)
    dist.scatter(part, parts, 0, group=group)
    return [cast, part, *(gathered or []), *([reduced] if group.rank() == 1 else [])]


def _all_gather(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    outputs, output = [make(0, 2) for _ in range(group.size())], make(0, 2 * group.size())
    dist.all_gather(outputs, make(group.rank() + 1, 2), group=group)
    dist.all_gather_single(output, make(group.rank() + 1, 2), group=group)
    return [*outputs, output]


def _reduce_scatter(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    one, other = make(0, 2), make(0, 2)
    dist.reduce_scatter(one, [make(group.rank() + rank, 2) for rank in range(group.size())], group=group)
    dist.reduce_scatter_single(other, make(group.rank() + 1, 2 * group.size()), group=group)
    return [one, other]


def _all_to_all(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    outputs, output = [make(0, 2) for _ in range(group.size())], make(0, 2 * group.size())
    dist.all_to_all(outputs, [make(group.rank() * 10 + rank, 2) for rank in range(group.size())], group=group)
    dist.all_to_all_single(output, make(group.rank() + 1, 2 * group.size()), group=group)
    return [*outputs, output]


def _messages(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    one, other = make(3, 2), make(4, 2)
    if group.rank() == 0:
        dist.send(one, 1, group=group)
        dist.send(other, 1, group=group, tag=5)
        return []
    dist.recv(one, 0, group=group)
    dist.recv(other, 0, group=group, tag=5)
    return [one, other]


def _async(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    tensor, output = make(group.rank() + 1, 3), make(0, 3 * group.size())
    works = [
        dist.all_reduce(tensor, group=group, async_op=True),
        dist.all_gather_single(output, make(group.rank() + 1, 3), group=group, async_op=True),
    ]
    for work in works:
        work.wait()
    return [tensor, output]


def _barrier(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    dist.barrier(group=group)
    return []


def _objects(group: dist.ProcessGroup, make: Make) -> list[Tensor]:
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, "a" * (group.rank() + 1), group=group)
    return [torch.tensor([float(len(text)) for text in gathered])]


PROGRAMS: dict[str, Program] = {
    function.__name__.strip("_"): function
    for function in (
        _all_reduce,
        _all_reduce_coalesced,
        _rooted,
        _all_gather,
        _reduce_scatter,
        _all_to_all,
        _messages,
        _async,
        _barrier,
        _objects,
    )
}
# torch's classes for tests have no strategy for pickled bytes; Gloo has no all_to_all of lists.
OF_TENSORS = [name for name in PROGRAMS if name != "objects"]
ON_GLOO = [name for name in PROGRAMS if name not in ("all_to_all", "reduce_scatter")]


def _watched(program: Program, group: dist.ProcessGroup, make: Make = _plain) -> tuple[list[str], list[Tensor]]:
    with Watch() as outer, Watch() as inner:
        results = program(group, make)
    assert outer.seen == inner.seen
    return inner.seen, results


class _OnGlooToo:
    """A program under two modes, on Phalanx and on Gloo."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rank: int, world: pt.World) -> tuple[list[str], list[str], bool]:
        program = PROGRAMS[self.name]
        group = dist.group.WORLD
        assert group is not None
        seen, results = _watched(program, group)
        on_gloo, gloo_results = _watched(program, dist.new_group(backend="gloo"))
        return seen, on_gloo, all(map(torch.equal, results, gloo_results))


@pytest.mark.parametrize("name", ON_GLOO)
def test_modes_see_what_they_see_on_gloo(name: str) -> None:
    for seen, on_gloo, same in pt.run(_OnGlooToo(name), 2, processes=True):
        assert seen == on_gloo
        assert seen
        assert same


class _Subclass:
    """A program on tensors of two, and on plain ones."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rank: int, world: pt.World) -> None:
        program = PROGRAMS[self.name]
        group = dist.group.WORLD
        assert group is not None
        expected, twos = program(group, _plain), program(group, _two)
        for one, two in zip(expected, twos, strict=True):
            assert isinstance(two, TwoTensor)
            assert torch.equal(two.a, one)
            assert torch.equal(two.b, one * 10)
        # Modes see the call of the tensor of two, and not the calls that it becomes.
        assert _watched(program, group, _two)[0] == _watched(program, group)[0]


@pytest.mark.parametrize("name", OF_TENSORS)
def test_wrapper_subclass_makes_its_own_calls(name: str, run_ranks: RunRanks) -> None:
    run_ranks(_Subclass(name), 2)


class _Fake:
    """A program on fake tensors: only rank 0 runs it, since nothing is communicated."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rank: int, world: pt.World) -> None:
        group = dist.group.WORLD
        assert group is not None
        if rank == 0:
            with FakeTensorMode():
                results = PROGRAMS[self.name](group, _plain)
                seen = _watched(PROGRAMS[self.name], group)[0]
            assert all(isinstance(tensor, FakeTensor) for tensor in results)
            assert seen
        dist.all_reduce(torch.ones(1))


# torch has no fake kernel for allreduce_coalesced_.
@pytest.mark.parametrize("name", [name for name in OF_TENSORS if name != "all_reduce_coalesced"])
def test_fake_tensors_communicate_nothing(name: str, run_ranks: RunRanks) -> None:
    run_ranks(_Fake(name), 2)


def _fake_without_its_mode(rank: int, world: pt.World) -> None:
    with FakeTensorMode():
        tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert isinstance(tensor, FakeTensor)


def test_fake_tensor_outside_its_mode(run_ranks: RunRanks) -> None:
    run_ranks(_fake_without_its_mode, 2)


def _fsdp(group_name: str) -> dict[str, int]:
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(group_name,))
    if group_name == "gloo":
        mesh = dist.DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with CommDebugMode() as mode:
        model(torch.ones(4, 8)).sum().backward()
    return {str(op): count for op, count in mode.get_comm_counts().items()}


def _count_fsdp(rank: int, world: pt.World) -> tuple[dict[str, int], dict[str, int]]:
    return _fsdp("phalanx"), _fsdp("gloo")


def test_comm_debug_mode_counts_what_fsdp_does() -> None:
    for counts, on_gloo in pt.run(_count_fsdp, 2, processes=True):
        assert counts == on_gloo
        assert sum(counts.values()) >= 4


def _count_by_hand(rank: int, world: pt.World) -> dict[str, int]:
    tensor = torch.ones(2)
    with CommDebugMode() as mode:
        for _ in range(3):
            dist.all_reduce(tensor)
        functional.all_reduce(tensor, "sum", default_group()).clone()
        dist.broadcast(tensor, 0)
    dist.all_reduce(tensor)
    return {str(op).split(".")[-1]: count for op, count in mode.get_comm_counts().items()}


def test_comm_debug_mode_counts_calls_of_each_rank(run_ranks: RunRanks) -> None:
    expected = {"allreduce_": 3, "all_reduce": 1, "broadcast_": 1}
    assert run_ranks(_count_by_hand, 2) == [expected, expected]


class _Logged(Tensor):
    """One that has memory and its own dispatch as well."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.seen.append(func._opname)
        with torch._C._DisableTorchDispatch():
            plain = tree_map_only(_Logged, lambda tensor: tensor.as_subclass(Tensor), args)
        return func(*plain, **(kwargs or {}))


def _logged(rank: int, world: pt.World) -> tuple[float, bool]:
    memory = torch.ones(3)
    with torch._C._DisableTorchDispatch():
        logged = memory.as_subclass(_Logged)
    dist.all_reduce(logged)
    return memory.sum().item(), "allreduce_" in _Logged.seen


def test_subclass_with_memory_is_asked_too(run_ranks: RunRanks) -> None:
    assert run_ranks(_logged, 2) == [(6.0, True)] * 2


def _async_collective_tensor(rank: int, world: pt.World) -> list[float]:
    tensor = functional.all_reduce(torch.ones(2), "sum", default_group())
    assert isinstance(tensor, functional.AsyncCollectiveTensor)
    dist.all_reduce(tensor)
    return tensor.tolist()  # type: ignore[no-any-return]


def test_async_collective_tensor(run_ranks: RunRanks) -> None:
    assert run_ranks(_async_collective_tensor, 2) == [[4.0, 4.0]] * 2


def _works_of_two(rank: int, world: pt.World) -> None:
    """The work of a call of which a class makes two is done when both are."""
    tensor = TwoTensor(torch.ones(300_000), torch.ones(300_000))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert tensor.a.sum().item() == tensor.b.sum().item() == 600_000


def test_work_of_a_subclass_waits_for_all_of_its_calls(run_ranks: RunRanks) -> None:
    run_ranks(_works_of_two, 2)


class _AlsoCalls(Watch):
    """A mode that makes calls of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            largest = torch.full((1,), float(dist.get_rank()))
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            assert largest.item() == dist.get_world_size() - 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def _mode_calls(rank: int, world: pt.World) -> tuple[float, list[str]]:
    tensor = torch.ones(1)
    with Watch() as outer, _AlsoCalls():
        dist.all_reduce(tensor)
        dist.barrier()
    return tensor.item(), outer.seen


def test_mode_that_communicates(run_ranks: RunRanks) -> None:
    for total, seen in run_ranks(_mode_calls, 2):
        assert total == 2.0
        assert seen == ["allreduce_", "allreduce_", "allreduce_", "barrier"]


class _Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise LookupError("not today")
        return func(*args, **(kwargs or {}))


def _refused(rank: int, world: pt.World) -> list[str]:
    """What a mode raises reaches the caller, and leaves the modes as they were."""
    tensor = torch.ones(1)
    watch = Watch()
    with watch:
        with pytest.raises(LookupError, match="not today"), _Refuses():  # type: ignore[no-untyped-call]
            dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    with torch._C._DisableTorchDispatch(), Watch() as blind:
        dist.all_reduce(tensor)
    assert blind.seen == []
    dist.all_reduce(tensor)
    assert tensor.item() == 8.0
    return watch.seen


def test_mode_that_raises(run_ranks: RunRanks) -> None:
    assert run_ranks(_refused, 2) == [["allreduce_"]] * 2


def _errors(rank: int, world: pt.World) -> list[str]:
    group: Any = dist.group.WORLD
    calls: list[Callable[[], Any]] = [
        lambda: group.allreduce("nonsense"),
        lambda: dist.broadcast(torch.ones(1, dtype=torch.float32), group_src=7),
        lambda: dist.all_reduce(torch.ones(2 + rank)),
    ]
    codes = []
    with Watch():
        for wrong in calls:
            with pytest.raises(dist.DistBackendError) as error:
                wrong()
            codes.append(error.value.code)  # type: ignore[attr-defined]
    return codes


def test_errors_keep_their_class_under_a_mode() -> None:
    assert pt.run(_errors, 2, processes=True) == [["INVALID:TENSOR", "INVALID:ROOT", "MISMATCH:COUNT"]] * 2


def _spellings(rank: int, world: pt.World) -> list[str]:
    """Calls of the group itself, with keywords and without options."""
    group = default_group()
    ones = torch.ones(2)
    watch = Watch()
    with watch:
        group.allreduce(ones, op=dist.ReduceOp.MAX).wait()
        group.allgather_coalesced([[torch.ones(1)], [torch.ones(1)]], [torch.ones(1)]).wait()
        group.allgather_into_tensor_coalesced([torch.ones(2)], [torch.ones(1)]).wait()
        group.reduce_scatter_tensor_coalesced([torch.ones(1)], [torch.ones(2)]).wait()
        group._allgather_base(torch.ones(2), torch.ones(1)).wait()
        group._reduce_scatter_base(torch.ones(1), torch.ones(2)).wait()
        group.alltoall_base(torch.ones(2), torch.ones(2), [], []).wait()
        group.broadcast(ones, root=1).wait()
        group.reduce(ones, root=1, op=dist.ReduceOp.MIN).wait()
        group.allreduce(ones, op=dist._make_nccl_premul_sum(0.5)).wait()
        group.monitored_barrier()
    assert ones.tolist() == [1.0, 1.0]
    return watch.seen


def test_spellings_without_options(run_ranks: RunRanks) -> None:
    assert (
        run_ranks(_spellings, 2)
        == [
            [
                "allreduce_",
                "allgather_coalesced_",
                "allgather_into_tensor_coalesced_",
                "reduce_scatter_tensor_coalesced_",
                "_allgather_base_",
                "_reduce_scatter_base_",
                "alltoall_base_",
                "broadcast_",
                "reduce_",
                "allreduce_",
                "barrier",
            ]
        ]
        * 2
    )


def _negative_view(rank: int, world: pt.World) -> list[float]:
    tensor = torch._neg_view(_plain(-(rank + 1), 2))
    with Watch():
        dist.all_reduce(tensor)
    return tensor.tolist()


def test_a_negative_view_under_a_mode_gets_the_result(run_ranks: RunRanks) -> None:
    """torch shows the mode a copy of it, which nobody copies back."""
    assert run_ranks(_negative_view, 2) == [[3.0, 3.0]] * 2
