"""The programs of torch's tests of its own wrapper (test/distributed/test_pg_wrapper.py), on guarded Gloo.

torch's wrapper compares op, number of tensors, dtypes, device types and shapes. Each of its programs is named by the
test that it comes from; docs/conformance.md lists them. Device types are in test_guarded_device_engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, values

import phalanx
from phalanx import _autoload

_Call = Callable[[Here], Any]


def _init(here: Here, timeout: float = 30) -> None:
    os.environ["PHALANX_GUARD"] = "1"
    _autoload.register()
    dist.init_process_group(
        "gloo",
        store=here.store(),
        rank=here.rank,
        world_size=here.size,
        timeout=timedelta(seconds=timeout),
    )


def _rank_1_reduces(here: Here) -> None:
    tensor = torch.ones(20, 10)
    dist.reduce(tensor, 0) if here.rank == 1 else dist.all_reduce(tensor)


def _rank_1_scatters(here: Here) -> None:
    one, many = torch.ones(2), torch.ones(2 * here.size)
    if here.rank == 1:
        dist.reduce_scatter_single(one, many)
    else:
        dist.all_gather_single(many, one)


def _rank_1_waits_at_a_barrier(here: Here) -> None:
    dist.barrier() if here.rank == 1 else dist.all_reduce(torch.ones(4))


def _lists_and_one_tensor(here: Here) -> None:
    group: Any = dist.group.WORLD
    group.allreduce_coalesced([torch.ones(2)] * 2).wait() if here.rank == 1 else dist.all_reduce(torch.ones(4))


def _shapes(here: Here) -> None:
    dist.all_reduce(torch.ones(2, 10 + here.rank))


def _shapes_to_gather(here: Here) -> None:
    dist.all_gather([torch.ones(2 + here.rank) for _ in range(here.size)], torch.ones(2 + here.rank))


def _dtypes(here: Here) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if here.rank == 1 else torch.float32))


def _reduce_ops(here: Here) -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if here.rank == 1 else dist.ReduceOp.SUM)


def _roots(here: Here) -> None:
    dist.broadcast(torch.ones(4), here.rank)


_WRONG: dict[str, tuple[_Call, str]] = {
    "test_collectives_op_mismatch": (_rank_1_reduces, "MISMATCH:OP"),
    "test_collectives_op_mismatch, single tensors": (_rank_1_scatters, "MISMATCH:OP"),
    "test_collectives_op_mismatch, barrier": (_rank_1_waits_at_a_barrier, "MISMATCH:OP"),
    "number of tensors": (_lists_and_one_tensor, "MISMATCH:SHAPE"),
    "test_collective_shape_mismatch": (_shapes, "MISMATCH:COUNT"),
    "test_collective_shape_mismatch, all_gather": (_shapes_to_gather, "MISMATCH:COUNT"),
    "dtype": (_dtypes, "MISMATCH:DTYPE"),
    # What torch's wrapper does not compare.
    "reduce op": (_reduce_ops, "MISMATCH:REDUCE_OP"),
    "root": (_roots, "MISMATCH:ROOT"),
}


def _call_wrongly(here: Here, name: str) -> tuple[str, bool]:
    _init(here)
    with pytest.raises(phalanx.Mismatch) as caught:
        _WRONG[name][0](here)
    dist.destroy_process_group()
    return caught.value.code, Path(__file__).name in str(caught.value)


@pytest.mark.parametrize("name", _WRONG)
def test_ranks_that_disagree(name: str, tmp_path: Path) -> None:
    assert values(_call_wrongly, 2, tmp_path, name) == [(_WRONG[name][1], True)] * 2


def _hang(here: Here) -> str:
    """test_collective_hang: rank 1 never comes."""
    _init(here, timeout=1.0)
    gate = Gate(here)
    if here.rank == 1:
        gate.wait("given up")
        dist.destroy_process_group()
        return ""
    with pytest.raises(phalanx.CallTimeout) as caught:
        dist.all_reduce(torch.ones(2))
    gate.open("given up")
    dist.destroy_process_group()
    return str(caught.value)


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    text, _ = values(_hang, 2, tmp_path)
    assert text.startswith("[MISSING] all_reduce, seq 1")
    assert "rank 1 did not come" in text


def _right(here: Here) -> float:
    """test_collectives_op_mismatch, its right part: nothing is found in calls that agree."""
    _init(here)
    tensor = torch.ones(20, 10)
    dist.all_reduce(tensor)
    dist.reduce(tensor, 0)
    dist.broadcast(tensor, 0)
    dist.all_gather([torch.empty(20, 10) for _ in range(here.size)], tensor)
    dist.barrier()
    dist.destroy_process_group()
    return tensor.sum().item()


def test_ranks_that_agree(tmp_path: Path) -> None:
    first, second = values(_right, 2, tmp_path)
    assert first == second == 800.0
