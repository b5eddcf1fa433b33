"""The same function as ranks that are processes."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt


def _sum(rank: int, world: pt.World) -> tuple[float, int]:
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    (world.tmp_path / str(rank)).touch()
    world.barrier()
    assert len(list(world.tmp_path.glob("[0-9]"))) == world.size
    return tensor[0].item(), os.getpid()


def test_results_by_rank_and_workers_that_stay() -> None:
    first = pt.run(_sum, 3, processes=True)
    assert [value for value, _ in first] == [3.0] * 3
    pids = {pid for _, pid in first}
    assert len(pids) == 3
    assert os.getpid() not in pids
    again = pt.run(_sum, 2, processes=True)
    assert {pid for _, pid in again} < pids


def _fail(rank: int, world: pt.World) -> None:
    if rank == 1:
        raise LookupError("no shard")
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.barrier()
    raise caught.value


def test_the_first_failure_is_raised() -> None:
    with pytest.raises(LookupError, match="no shard") as caught:
        pt.run(_fail, 3, processes=True)
    assert "on rank 1; because of it also on ranks 0, 2" in caught.value.__notes__
    assert any("in _fail" in note for note in caught.value.__notes__)


def _die(rank: int, world: pt.World) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.barrier()
    return str(caught.value)


def test_a_worker_that_was_killed_is_replaced() -> None:
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL"):
        pt.run(_die, 2, processes=True)
    assert [value for value, _ in pt.run(_sum, 2, processes=True)] == [1.0] * 2


def _leave_a_thread(rank: int, world: pt.World) -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_a_worker_that_was_left_dirty_is_replaced() -> None:
    dirty = set(pt.run(_leave_a_thread, 2, processes=True))
    assert not dirty & {pid for _, pid in pt.run(_sum, 4, processes=True)}


def _lambda(rank: int, world: pt.World) -> object:
    return lambda: None


def test_what_processes_can_not_be_sent() -> None:
    with pytest.raises(ValueError, match="expected a function that another process can be sent"):
        pt.run(lambda rank, world: None, 2, processes=True)
    with pytest.raises(RuntimeError, match="a result of <class 'function'> can't be sent"):
        pt.run(_lambda, 1, processes=True)
    with pytest.raises(ValueError, match="they run freely"):
        pt.run(_sum, 2, processes=True, seed=1)
