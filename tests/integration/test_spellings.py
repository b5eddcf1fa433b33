"""Groups as plain objects: every spelling that torch's own groups take, without any global state."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import Here, values
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

import phalanx

_SECOND = timedelta(seconds=20)
_MAX = dist.ReduceOp.MAX


def _options(kind: Any, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    return options


Spelling = Callable[[phalanx.ProcessGroup, int, torch.Tensor, list[torch.Tensor], list[torch.Tensor]], Any]

# Each gets the group, the rank, a tensor [rank, rank], a list of two empty outputs and a list of two inputs, and
# returns its work; what the work's result holds is compared with the second entry, by rank.
SPELLINGS: dict[str, tuple[Spelling, list[list[float]]]] = {
    "allreduce(list)": (lambda g, r, t, o, i: g.allreduce([t]), [[1, 1], [1, 1]]),
    "allreduce(list, opts)": (lambda g, r, t, o, i: g.allreduce([t], _options(AllreduceOptions)), [[1, 1], [1, 1]]),
    "allreduce(list, op)": (lambda g, r, t, o, i: g.allreduce([t], op=_MAX, timeout=_SECOND), [[1, 1], [1, 1]]),
    "allreduce(tensor, op, timeout)": (lambda g, r, t, o, i: g.allreduce(t, _MAX, _SECOND), [[1, 1], [1, 1]]),
    "allreduce(premul)": (
        lambda g, r, t, o, i: g.allreduce(t, op=dist.ReduceOp.PREMUL_SUM(3.0)),
        [[3, 3], [3, 3]],
    ),
    "allreduce_coalesced": (
        lambda g, r, t, o, i: g.allreduce_coalesced([t, i[0]], _options(AllreduceCoalescedOptions)),
        [[1, 1, 10, 10], [1, 1, 10, 10]],
    ),
    "broadcast(list, opts)": (
        lambda g, r, t, o, i: g.broadcast([t], _options(BroadcastOptions, rootRank=1)),
        [[1, 1], [1, 1]],
    ),
    "broadcast(tensor, root)": (lambda g, r, t, o, i: g.broadcast(t, 1), [[1, 1], [1, 1]]),
    "broadcast(root=)": (lambda g, r, t, o, i: g.broadcast(t, root=1, timeout=_SECOND), [[1, 1], [1, 1]]),
    "reduce(list, opts)": (
        lambda g, r, t, o, i: g.reduce([t], _options(ReduceOptions, rootRank=1, reduceOp=_MAX)),
        [[0, 0], [1, 1]],
    ),
    "reduce(tensor, root, op)": (lambda g, r, t, o, i: g.reduce(t, 0, _MAX, _SECOND), [[1, 1], [1, 1]]),
    "reduce(root=, op=)": (lambda g, r, t, o, i: g.reduce(t, root=0, op=_MAX), [[1, 1], [1, 1]]),
    "allgather(lists, opts)": (
        lambda g, r, t, o, i: g.allgather([o], [t], _options(AllgatherOptions)),
        [[0, 0, 1, 1], [0, 0, 1, 1]],
    ),
    "allgather(list, tensor)": (lambda g, r, t, o, i: g.allgather(o, t, timeout=_SECOND), [[0, 0, 1, 1]] * 2),
    "allgather(input_tensor=)": (lambda g, r, t, o, i: g.allgather(o, input_tensor=t), [[0, 0, 1, 1]] * 2),
    "all_gather_single": (lambda g, r, t, o, i: g.all_gather_single(torch.empty(4), t), [[0, 0, 1, 1]] * 2),
    "_allgather_base": (
        lambda g, r, t, o, i: g._allgather_base(torch.empty(2, 2), t, _options(AllgatherOptions)),
        [[0, 0, 1, 1]] * 2,
    ),
    "allgather_coalesced": (
        lambda g, r, t, o, i: g.allgather_coalesced([[o[0]], [o[1]]], [t]),
        [[0, 0, 1, 1]] * 2,
    ),
    "all_gather_single_coalesced": (
        lambda g, r, t, o, i: g.all_gather_single_coalesced([torch.empty(4), torch.empty(4)], [t, i[0]]),
        [[0, 0, 1, 1, 0, 0, 10, 10]] * 2,
    ),
    "allgather_into_tensor_coalesced": (
        lambda g, r, t, o, i: g.allgather_into_tensor_coalesced([torch.empty(4)], [t]),
        [[0, 0, 1, 1]] * 2,
    ),
    "gather(lists, opts)": (
        lambda g, r, t, o, i: g.gather([o] if r == 1 else [], [t], _options(GatherOptions, rootRank=1)),
        [[], [0, 0, 1, 1]],
    ),
    "gather(list, tensor, root)": (lambda g, r, t, o, i: g.gather(o if r == 0 else [], t, 0), [[0, 0, 1, 1], []]),
    "gather(root=)": (
        lambda g, r, t, o, i: g.gather(o if r == 0 else [], input_tensor=t, root=0, timeout=_SECOND),
        [[0, 0, 1, 1], []],
    ),
    "scatter(lists, opts)": (
        lambda g, r, t, o, i: g.scatter([t], [i] if r == 1 else [], _options(ScatterOptions, rootRank=1)),
        [[10, 10], [11, 11]],
    ),
    "scatter(tensor, list, root)": (lambda g, r, t, o, i: g.scatter(t, i if r == 1 else [], 1), [[10, 10], [11, 11]]),
    "scatter(output_tensor=)": (
        lambda g, r, t, o, i: g.scatter(output_tensor=t, input_tensors=i if r == 0 else [], root=0),
        [[0, 0], [1, 1]],
    ),
    "reduce_scatter(lists, opts)": (
        lambda g, r, t, o, i: g.reduce_scatter([t], [i], _options(ReduceScatterOptions)),
        [[10, 10], [12, 12]],
    ),
    "reduce_scatter(tensor, list, op)": (
        lambda g, r, t, o, i: g.reduce_scatter(t, i, _MAX, _SECOND),
        [[10, 10], [11, 11]],
    ),
    "reduce_scatter_single": (
        lambda g, r, t, o, i: g.reduce_scatter_single(t, torch.cat(i), _options(ReduceScatterOptions)),
        [[10, 10], [12, 12]],
    ),
    "_reduce_scatter_base": (lambda g, r, t, o, i: g._reduce_scatter_base(t, torch.cat(i)), [[10, 10], [12, 12]]),
    "reduce_scatter_single_coalesced": (
        lambda g, r, t, o, i: g.reduce_scatter_single_coalesced([t, o[0]], [torch.cat(i), torch.cat(i)]),
        [[10, 10, 10, 10], [12, 12, 12, 12]],
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda g, r, t, o, i: g.reduce_scatter_tensor_coalesced([t], [torch.cat(i)], _options(ReduceScatterOptions)),
        [[10, 10], [12, 12]],
    ),
    "all_to_all_single": (
        lambda g, r, t, o, i: g.all_to_all_single(torch.empty(4), torch.cat(i), [], [], _options(AllToAllOptions)),
        [[0, 0, 10, 10], [1, 1, 11, 11]],
    ),
    "alltoall_base(splits)": (
        lambda g, r, t, o, i: g.alltoall_base(
            torch.empty(2 if r == 0 else 6), torch.cat(i), [1, 1] if r == 0 else [3, 3], [1, 3], timeout=_SECOND
        ),
        [[0, 10], [0, 1, 1, 10, 11, 11]],
    ),
    "alltoall(lists, opts)": (
        lambda g, r, t, o, i: g.alltoall(o, i, _options(AllToAllOptions)),
        [[0, 0, 10, 10], [1, 1, 11, 11]],
    ),
    "tensor=": (lambda g, r, t, o, i: g.allreduce(tensor=t, op=_MAX), [[1, 1], [1, 1]]),
    "broadcast(tensor=)": (lambda g, r, t, o, i: g.broadcast(tensor=t, root=1), [[1, 1], [1, 1]]),
    "reduce(tensor=)": (lambda g, r, t, o, i: g.reduce(tensor=t, root=1), [[0, 0], [1, 1]]),
    "reduce_scatter(output=)": (lambda g, r, t, o, i: g.reduce_scatter(output=t, input=i), [[10, 10], [12, 12]]),
    "reduce_scatter_single_coalesced(outputs=)": (
        lambda g, r, t, o, i: g.reduce_scatter_single_coalesced(outputs=[t], inputs=[torch.cat(i)]),
        [[10, 10], [12, 12]],
    ),
    "all_gather_single_coalesced(outputs=)": (
        lambda g, r, t, o, i: g.all_gather_single_coalesced(outputs=[torch.empty(4)], inputs=[t]),
        [[0, 0, 1, 1]] * 2,
    ),
    "alltoall(output_tensors=)": (
        lambda g, r, t, o, i: g.alltoall(output_tensors=o, input_tensors=i),
        [[0, 0, 10, 10], [1, 1, 11, 11]],
    ),
    "all_to_all_single(output_tensor=)": (
        lambda g, r, t, o, i: g.all_to_all_single(output_tensor=torch.empty(4), input_tensor=torch.cat(i)),
        [[0, 0, 10, 10], [1, 1, 11, 11]],
    ),
    "broadcast(numpy root)": (
        lambda g, r, t, o, i: g.broadcast(t, numpy.int64(1)),  # type: ignore[arg-type]
        [[1, 1], [1, 1]],
    ),
    "alltoall(timeout=)": (lambda g, r, t, o, i: g.alltoall(o, i, timeout=_SECOND), [[0, 0, 10, 10], [1, 1, 11, 11]]),
    # As in the tests of torch's own groups as objects.
    "allreduce(tensor, op, timeout=)": (
        lambda g, r, t, o, i: g.allreduce(t, dist.ReduceOp.SUM, timeout=_SECOND),
        [[1, 1], [1, 1]],
    ),
    "gather(list, tensor, root=)": (
        lambda g, r, t, o, i: g.gather(o if r == 1 else [], t, root=1, timeout=_SECOND),
        [[], [0, 0, 1, 1]],
    ),
    "scatter(tensor, list, root=)": (
        lambda g, r, t, o, i: g.scatter(t, i if r == 0 else [], root=0, timeout=_SECOND),
        [[0, 0], [1, 1]],
    ),
    "reduce(tensor, op=, root=)": (
        lambda g, r, t, o, i: g.reduce(t, op=dist.ReduceOp.SUM, root=1, timeout=_SECOND),
        [[0, 0], [1, 1]],
    ),
    "reduce_scatter(tensor, list, op=)": (
        lambda g, r, t, o, i: g.reduce_scatter(t, i, op=dist.ReduceOp.SUM, timeout=_SECOND),
        [[10, 10], [12, 12]],
    ),
    "barrier()": (lambda g, r, t, o, i: g.barrier(), [[], []]),
    "barrier(opts)": (lambda g, r, t, o, i: g.barrier(_options(BarrierOptions)), [[], []]),
    "barrier(timeout=)": (lambda g, r, t, o, i: g.barrier(timeout=_SECOND), [[], []]),
}


def _spell_all(here: Here) -> dict[str, list[float]]:
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size, timeout=timedelta(seconds=30), name="plain")
    results = {}
    for name, (spelling, _) in SPELLINGS.items():
        tensor = torch.full((2,), float(here.rank))
        outputs = [torch.empty(2), torch.empty(2)]
        inputs = [torch.full((2,), 10.0 * here.rank), torch.full((2,), 10.0 * here.rank + 1)]
        work = spelling(group, here.rank, tensor, outputs, inputs)
        assert work.wait() is True
        assert work.wait(timedelta(seconds=1)) is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        result = work.result()
        assert [t.data_ptr() for t in work.get_future().wait()] == [t.data_ptr() for t in result], name
        results[name] = [float(x) for t in result for x in t.reshape(-1)]
    assert not dist.is_initialized()
    return results


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    return values(_spell_all, 2, tmp_path_factory.mktemp("spellings"))


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str, spelled: list[dict[str, list[float]]]) -> None:
    assert [by_name[name] for by_name in spelled] == SPELLINGS[name][1]


def _several_worlds(here: Here) -> list[float]:
    """Groups of different sizes and orders in one process, none of them known to torch.distributed."""
    sums = []
    for index in range(3):
        order = here.rank if index % 2 else here.size - 1 - here.rank
        group = phalanx.ProcessGroup(here.store(f"store{index}"), order, here.size)
        tensor = torch.tensor([float(order * 10**index)])
        group.allreduce(tensor)
        group.broadcast(tensor, root=here.size - 1).wait()
        sums.append(tensor.item())
        group.shutdown()
    return sums


def test_several_worlds_in_one_process(tmp_path: Path) -> None:
    assert values(_several_worlds, 3, tmp_path) == [[3.0, 30.0, 300.0]] * 3


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_the_group(rank: int, size: int) -> None:
    with pytest.raises(phalanx.GroupError, match="expected a rank in"):
        phalanx.ProcessGroup(dist.HashStore(), rank, size)


@pytest.mark.parametrize("timeout", [timedelta(0), 5.0, None])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(phalanx.GroupError, match="expected a timeout above zero"):
        phalanx.ProcessGroup(dist.HashStore(), 0, 1, timeout=timeout)


def test_a_store_that_is_none() -> None:
    with pytest.raises(phalanx.GroupError, match=r"expected a torch\.distributed\.Store, got None"):
        phalanx.ProcessGroup(None, 0, 1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> phalanx.ProcessGroup:
    return phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="alone")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce(torch.ones(1), op="sum"), "expected a torch.distributed.ReduceOp, got 'sum'"),
        (lambda g: g.allreduce(torch.ones(1), op=3), "expected a torch.distributed.ReduceOp, got 3"),
        (lambda g: g.allreduce(torch.ones(1), timeout=5.0), "expected a timeout as a datetime.timedelta, got 5.0"),
    ],
)
def test_arguments_of_the_wrong_type(
    alone: phalanx.ProcessGroup, call: Callable[[phalanx.ProcessGroup], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call(alone)


def test_all_to_all_whose_own_block_differs(alone: phalanx.ProcessGroup) -> None:
    with pytest.raises(phalanx.InvalidCall, match="got 2 elements of input and 4 of output"):
        alone.all_to_all_single(torch.ones(4), torch.ones(2))
    with pytest.raises(phalanx.InvalidCall, match="got 2 elements of input and 4 of output"):
        alone.alltoall([torch.ones(4)], [torch.ones(2)])


def test_too_many_ranks() -> None:
    with pytest.raises(phalanx.GroupError, match="expected at most 1024 ranks, got 5000"):
        phalanx.ProcessGroup(dist.HashStore(), 0, 5000)
