"""What black boxes of real groups tell reports: which group, how many calls in flight; and what a terminal sees of a
crash."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, until, values
from torch.distributed.device_mesh import init_device_mesh

import programs
from phalanx.commands import main
from phalanx.debug.box_reader import read_box
from phalanx.debug.own_box import own_box


def _two_meshes(here: Here) -> list[tuple[str, str, int]]:
    here.init()
    # A dimension of all ranks has the default group.
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")) for _ in range(2)]
    groups = [mesh.get_group("dp") for mesh in meshes]
    for number, group in enumerate(groups, 1):
        for _ in range(number):
            dist.all_reduce(torch.ones(1), group=group)
    box = own_box().read()
    assert box is not None
    found = [(record.group.name, record.group.identity, record.seq) for record in box.records]
    return [each for each in found if "dp" in each[0]]


def test_groups_of_the_same_name_and_ranks_have_identities(tmp_path: Path) -> None:
    """Both meshes have a dimension "dp": their calls stay apart, and all ranks know them by the same identity."""
    first, second, third, fourth = values(_two_meshes, 4, tmp_path)
    assert (first, third) == (second, fourth)
    # Ranks 2 and 3 have groups of their own.
    assert not {identity for _, identity, _ in first} & {identity for _, identity, _ in third}
    one, *other = first
    assert one[0] == other[0][0]
    assert [seq for _, _, seq in first] == [1, 1, 2]
    assert len({identity for _, identity, _ in other}) == 1
    assert one[1] != other[0][1]


def _many_in_flight(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    os.environ["PHALANX_BLACK_BOX"] = "20"
    here.init()
    dist.barrier()
    if here.rank == 1:
        here.tell()
        here.hear()
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(50)]
    if here.rank == 0:
        here.tell()
        here.hear()
    for work in works:
        work.wait()
    box = own_box().read()
    assert box is not None
    here.tell(box.num_hidden)
    here.hear()


def test_more_calls_in_flight_than_a_box_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 is ahead, and has no record any more of the call that it waits in. It is not said to be behind."""
    world = World(_many_in_flight, 2, tmp_path)
    world.all_told(0, 1)
    (job,) = (tmp_path / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    said = capsys.readouterr().out
    assert "rank 0: in a call whose record was overwritten: the black box keeps 20 calls, more are in flight; " in said
    assert "behind;" not in said.partition("rank 0: ")[2].partition("\n")[0]
    assert "Earliest cause: rank 0" not in said
    world.tell_all(1, 0)
    # All have ended: nothing is hidden any more.
    assert [world.told(rank) for rank in (0, 1)] == [0, 0]
    world.tell_all(0, 1)
    assert [end.error for end in world.ends()] == [None, None]


_CRASH = """
import os, signal, sys
import torch, torch.distributed as dist

dist.init_process_group("phalanx")
dist.barrier()
open(os.path.join(sys.argv[1], f"ready{dist.get_rank()}"), "w").close()
if dist.get_rank() == 1:
    while not os.path.exists(os.path.join(sys.argv[1], "ready0")):
        pass
    os.kill(os.getpid(), signal.SIGSEGV)
while True:
    signal.pause()
"""


def test_torchrun_shows_a_crash_on_the_terminal(tmp_path: Path) -> None:
    """The only survivor is in its own code until the launcher ends it."""
    program = tmp_path / "train.py"
    program.write_text(_CRASH)
    options: list[Any] = ["--nproc-per-node=2", "--monitor-interval=0.1", "--standalone"]
    env = os.environ | {"PHALANX_FOLDER": str(tmp_path / "jobs")}
    done = programs.run(["torchrun", *options, program, tmp_path], tmp_path, env)
    assert done.returncode != 0
    (job,) = (tmp_path / "jobs").iterdir()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("phalanx:")]
    assert re.fullmatch(
        rf"phalanx: rank 1 \(pid \d+\) was killed by SIGSEGV; all ranks: phalanx report {re.escape(str(job))}", line
    )


def _waits_natively(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    here.init()
    dist.barrier()
    if here.rank == 0:
        # Nobody runs Python code here: this thread never gives the GIL back.
        here.tell(os.getpid())
        torch.ops.aten.ones([1])
        with open(here.folder / "fifo") as fifo:
            holder = _HoldGil(fifo.fileno())
            holder.run()
    here.tell(os.getpid())
    here.hear()


class _HoldGil:
    """Reads from a descriptor without giving up the GIL."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def run(self) -> None:
        import ctypes

        buffer = ctypes.create_string_buffer(1)
        ctypes.PyDLL(None).read(self._descriptor, buffer, 1)


def test_a_survivor_that_runs_no_python_code_notes_a_death(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    world = World(_waits_natively, 2, tmp_path, way=["child", "child"])
    world.told(0)
    world.told(1)
    with open(tmp_path / "fifo", "w") as fifo:
        (job,) = (tmp_path / "jobs").iterdir()
        boxes = {box.rank: box for box in map(read_box, job.glob("*.box"))}
        world.processes[1].kill()
        until(lambda: bool(read_box(boxes[0].path).deaths), "rank 0 notes no death")
        (death,) = read_box(boxes[0].path).deaths
        assert (death.pid, death.status) == (boxes[1].pid, 9)
        until((job / "crash").exists, "nobody speaks")
        text = f"phalanx: rank 1 (pid {boxes[1].pid}) was killed by SIGKILL; all ranks: phalanx report {job}\n"
        until(lambda: text in world.output(0), "nothing on stderr")
        fifo.write("x")
    world.kill()
