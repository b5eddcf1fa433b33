"""Reports of jobs whose processes are in several groups that number them differently: the right process is named."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Here, World

import phalanx
from phalanx.commands import main

_SECOND = ("split", "apart", "nested")


def _second_group(here: Here, everybody: phalanx.ProcessGroup, way: str) -> phalanx.ProcessGroup:
    """Of ranks 3 and 2, in this order."""
    if way == "apart":
        store = dist.PrefixStore("second", here.store())
        return phalanx.new_group(store=store, rank=3 - here.rank, world_size=2, name="second")
    if way == "split":
        group = everybody.split_group([3, 2], name="second")
    else:
        upper = everybody.split_group([1, 2, 3])
        assert upper is not None
        group = upper.split_group([2, 1], name="second")
    assert group is not None
    return group


def _lose_one(here: Here, way: str) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    everybody = phalanx.new_group(store=here.store(), rank=here.rank, world_size=here.size, name="everybody")
    if here.rank < 2:
        # The others split their groups without further calls of these.
        if way == "split":
            everybody.split_group([3, 2], name="second")
        if way == "nested":
            upper = everybody.split_group([1, 2, 3])
            if upper is not None:
                upper.split_group([2, 1], name="second")
    else:
        second = _second_group(here, everybody, way)
        second.barrier(async_op=False)
        if here.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(phalanx.PeerLost) as caught:
            second.barrier(async_op=False)
        assert caught.value.peer == 1
    with pytest.raises(phalanx.PeerLost):
        everybody.barrier(async_op=False)


@pytest.mark.parametrize("way", _SECOND)
def test_the_dead_process_is_named_by_its_rank_in_the_job(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(_lose_one, 4, tmp_path, way)
    pid = world.processes[2].pid
    ends = world.ends()
    for rank in (0, 1, 3):
        assert ends[rank].error is None, ends[rank].trace
    (job,) = (tmp_path / "jobs").iterdir()
    main(["report", os.fspath(job)])
    report = capsys.readouterr().out
    assert f"  rank 2 (pid {pid}): killed by SIGKILL\n" in report
    # Nobody else has died.
    assert re.findall(r"rank (\d) \(pid \d+\): (?:killed|died)", report) == ["2"]
    assert re.search(r"group 'second', ranks 2, 3\n", report), report
    assert report.splitlines()[-1].startswith(f"Earliest cause: rank 2 (pid {pid}) was killed by SIGKILL; ")
