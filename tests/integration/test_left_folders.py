"""What is left in the temporary directory of ranks that are in no group any more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, World

import phalanx
from phalanx.commands import main
from phalanx.debug.evidence import read_boxes
from phalanx.debug.own_box import own_box


def _init(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    here.init()


def _leave(here: Here, num_worlds: int) -> None:
    for _ in range(num_worlds):
        _init(here)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    os._exit(0)


@pytest.mark.parametrize("num_worlds", [1, 3])
def test_ranks_that_leave_in_order_and_end_without_handlers_leave_no_folder(num_worlds: int, tmp_path: Path) -> None:
    world = World(_leave, 3, tmp_path, num_worlds, way="program")
    for process in world.processes:
        process.join(30)
        assert process.exitcode == 0
    world.kill()
    assert list((tmp_path / "jobs").iterdir()) == []


def _leave_and_come_back(here: Here) -> None:
    gate = Gate(here)
    _init(here)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    gate.open(f"left{here.rank}")
    gate.wait("left0", "left1")
    jobs = here.folder / "jobs"
    assert list(jobs.iterdir()) == []
    gate.open(f"looked{here.rank}")
    gate.wait("looked0", "looked1")
    _init(here)
    dist.barrier()
    (job,) = jobs.iterdir()
    box = own_box().read()
    assert box is not None
    # All that the box had, in the folder of the same name.
    assert [record.op for record in box.records] == ["all_reduce", "barrier"]
    boxes, _ = read_boxes(job)
    assert sorted(box.pid for box in boxes if box.rank == here.rank) == [os.getpid()]
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost):
        dist.barrier()
    here.tell(box.path)


def test_a_rank_that_makes_another_group_gets_its_box_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(_leave_and_come_back, 2, tmp_path, way="short program")
    world.told(0)
    for process in world.processes:
        process.join(30)
    world.kill()
    (job,) = (tmp_path / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("Earliest cause: rank 1 (pid "), said
    assert "was killed by SIGKILL; it had not begun barrier, seq 2" in said.splitlines()[-1]


def _raise_after_all(here: Here) -> None:
    gate = Gate(here)
    _init(here)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    gate.open(f"left{here.rank}")
    gate.wait("left0", "left1")
    if here.rank == 1:
        raise LookupError("no shard")
    os._exit(0)


def test_a_rank_that_raises_after_it_left_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(_raise_after_all, 2, tmp_path, way="short program")
    for process in world.processes:
        process.join(30)
    world.kill()
    (job,) = (tmp_path / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "raised LookupError: no shard (" in last
    assert f"phalanx report {job}" in (tmp_path / "output1").read_text()


def _one_fails(here: Here) -> None:
    _init(here)
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(phalanx.PeerLost):
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def test_ranks_that_leave_after_a_failure_keep_the_folder(tmp_path: Path) -> None:
    world = World(_one_fails, 2, tmp_path, way="program")
    for process in world.processes:
        process.join(30)
    world.kill()
    (job,) = (tmp_path / "jobs").iterdir()
    assert len(read_boxes(job)[0]) == 2
