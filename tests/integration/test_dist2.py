"""torch.distributed._dist2, torch's experiment with groups as objects, where torch has it: what its own tests do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, values

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed._dist2") is None, reason="this version of torch has no _dist2"
)
_LIMIT = timedelta(seconds=30)


def _new_group(here: Here, port: int, **options: Any) -> Any:
    dist2 = importlib.import_module("torch.distributed._dist2")
    os.environ |= {
        "RANK": str(here.rank),
        "WORLD_SIZE": str(here.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return dist2.new_group("phalanx", timedelta(seconds=60), "cpu", **options)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _make(here: Here, port: int) -> list[Any]:
    dist2 = importlib.import_module("torch.distributed._dist2")
    one, other = _new_group(here, port), _new_group(here, port, name="mine")
    assert dist2.current_process_group() is None
    with dist2.process_group(one):
        assert dist2.current_process_group() is one
        with dist2.process_group(other):
            assert dist2.current_process_group() is other
        assert dist2.current_process_group() is one
    # Rank 0 has the store, which the other may still read.
    other.barrier().wait()
    return [one.size(), one.timeout, one._get_backend(torch.device("cpu")).options._timeout, other.group_name]


def test_a_timeout_options_and_the_context_manager(port: int, tmp_path: Path) -> None:
    minute = timedelta(seconds=60)
    assert values(_make, 2, tmp_path, port) == [[2, minute, minute, "mine"]] * 2


def _call(here: Here, port: int) -> dict[str, Any]:
    """Every collective as a method."""
    pg, rank, size = _new_group(here, port), here.rank, here.size
    told: dict[str, Any] = {}

    tensor = torch.ones(2)
    pg.allreduce(tensor, dist.ReduceOp.SUM, timeout=_LIMIT).wait()
    told["allreduce"] = tensor.tolist()

    pg.barrier(timeout=_LIMIT).wait()

    tensor = torch.full((2,), float(rank))
    pg.broadcast(tensor, root=1, timeout=_LIMIT).wait()
    told["broadcast"] = tensor.tolist()

    outputs = [torch.zeros(1) for _ in range(size)]
    pg.allgather(outputs, torch.tensor([float(rank)]), timeout=_LIMIT).wait()
    told["allgather"] = [output.item() for output in outputs]

    outputs = [torch.zeros(1) for _ in range(size)] if rank == 0 else []
    pg.gather(outputs, torch.tensor([float(rank)]), root=0, timeout=_LIMIT).wait()
    told["gather"] = [output.item() for output in outputs]

    tensor = torch.zeros(1)
    inputs = [torch.tensor([10.0 + to]) for to in range(size)] if rank == 0 else []
    pg.scatter(tensor, inputs, root=0, timeout=_LIMIT).wait()
    told["scatter"] = tensor.item()

    tensor = torch.ones(1)
    pg.reduce(tensor, op=dist.ReduceOp.SUM, root=0, timeout=_LIMIT).wait()
    told["reduce"] = tensor.item() if rank == 0 else None

    tensor = torch.zeros(1)
    pg.reduce_scatter(tensor, [torch.tensor([float(to)]) for to in range(size)], dist.ReduceOp.SUM, _LIMIT).wait()
    told["reduce_scatter"] = tensor.item()

    tensor = torch.zeros(size)
    pg.alltoall_base(tensor, torch.full((size,), float(rank)), [1] * size, [1] * size, timeout=_LIMIT).wait()
    told["alltoall_base"] = tensor.tolist()
    return told


def test_every_collective_as_a_method(port: int, tmp_path: Path) -> None:
    for rank, told in enumerate(values(_call, 3, tmp_path, port)):
        assert told == {
            "allreduce": [3.0, 3.0],
            "broadcast": [1.0, 1.0],
            "allgather": [0.0, 1.0, 2.0],
            "gather": [0.0, 1.0, 2.0] if rank == 0 else [],
            "scatter": 10.0 + rank,
            "reduce": 3.0 if rank == 0 else None,
            "reduce_scatter": 3.0 * rank,
            "alltoall_base": [0.0, 1.0, 2.0],
        }


def _split(here: Here, port: int) -> Any:
    pg = _new_group(here, port)
    part = pg.split_group([0], timeout=_LIMIT)
    if here.rank != 0:
        return part
    tensor = torch.ones(1)
    part.allreduce(tensor).wait()
    return part.size(), part._get_backend(torch.device("cpu")).options._timeout, tensor.item()


def test_split(port: int, tmp_path: Path) -> None:
    assert values(_split, 3, tmp_path, port) == [(1, _LIMIT, 1.0), None, None]


def _merge(here: Here, port: int) -> Any:
    """Each rank has a group of its own, and all of them become one."""
    alone = _new_group(Here(here._pipe, 0, 1, here.folder), 0)
    store = dist.TCPStore("127.0.0.1", port, here.size, is_master=here.rank == 0, wait_for_workers=False)
    merged = alone.merge_remote_group(store, here.size, timeout=_LIMIT)
    tensor = torch.tensor([here.rank])
    merged.allreduce(tensor).wait()
    # The store's process is to end last.
    merged.barrier().wait()
    return merged.size(), merged._get_backend(torch.device("cpu")).options._timeout, tensor.item()


def test_merge(port: int, tmp_path: Path) -> None:
    assert values(_merge, 3, tmp_path, port) == [(3, _LIMIT, 3)] * 3
