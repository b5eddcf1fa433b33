"""Black boxes of real groups: what they hold, what torch's analyzer and our own report make of them, and levels."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, run, values

import phalanx
import programs

_TOOLS = Path(sys.executable).parent


def _analyzed(folder: Path) -> str:
    """What torch's analyzer says of the traces there."""
    done = programs.run(
        ["python", "-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "rank_", folder], folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _healthy(here: Here) -> None:
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, dtype=torch.float64), 0)
    dist.all_gather([torch.empty(2) for _ in range(here.size)], torch.ones(2))
    if here.rank == 0:
        dist.send(torch.ones(4), 1)
    if here.rank == 1:
        dist.recv(torch.ones(4), 0)
    dist.all_to_all_single(torch.empty(here.size), torch.ones(here.size))
    dist.barrier()


def _mismatched(here: Here) -> None:
    dist.all_reduce(torch.ones(3))
    with pytest.raises(phalanx.Mismatch):
        dist.all_reduce(torch.ones(5 if here.rank == 1 else 4))


def _missing(here: Here) -> None:
    dist.all_reduce(torch.ones(3))
    group = dist.group.WORLD
    assert group is not None
    if here.rank == 1:
        here.hear()
        return
    with pytest.raises(phalanx.CallTimeout):
        group.allreduce(torch.ones(4), timeout=timedelta(seconds=0.5)).wait()
    here.tell()


def _dumped(here: Here, body: Callable[[Here], None]) -> None:
    here.init()
    body(here)
    phalanx.dump(here.folder)
    phalanx.dump(here.folder / f"short{here.rank}.json", format="json", short=True)
    dist.destroy_process_group()


def test_the_analyzer_finds_nothing_in_a_healthy_run(tmp_path: Path) -> None:
    values(_dumped, 3, tmp_path, _healthy)
    said = _analyzed(tmp_path)
    assert "mismatch" not in said.lower()
    assert "missing" not in said.lower()
    trace = pickle.loads((tmp_path / "rank_1").read_bytes())
    names = [entry["profiling_name"] for entry in trace["entries"]]
    assert names == [
        "gloo:all_reduce",
        "gloo:broadcast",
        "gloo:all_gather",
        "gloo:recv 1<-0",
        "gloo:all_to_all",
        "gloo:barrier",
    ]
    assert {entry["state"] for entry in trace["entries"]} == {"completed"}
    (frame, *_) = trace["entries"][0]["frames"]
    assert frame["filename"] == __file__
    assert frame["name"] == "_healthy"
    short = json.loads((tmp_path / "short1.json").read_text())
    assert len(short["entries"]) == 6
    assert "frames" not in short["entries"][0]


def test_the_analyzer_finds_a_mismatch(tmp_path: Path) -> None:
    values(_dumped, 3, tmp_path, _mismatched)
    assert "mismatch" in _analyzed(tmp_path).lower()


def test_the_analyzer_finds_a_missing_rank(tmp_path: Path) -> None:
    world = World(_dumped, 3, tmp_path, _missing)
    world.all_told(0, 2)
    world.tell(1)
    assert [end.error for end in world.ends()] == [None] * 3
    said = _analyzed(tmp_path).lower()
    assert "missing" in said
    assert "1" in said


def _raises(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    here.init()
    dist.barrier()
    if here.rank == 2:
        raise LookupError("no shard")
    dist.all_reduce(torch.ones(4))  # here


def test_a_report_of_the_boxes_names_the_cause(tmp_path: Path) -> None:
    World(_raises, 3, tmp_path, way="program").ends()
    (job,) = (tmp_path / "jobs").iterdir()
    said = subprocess.run([_TOOLS / "phalanx", "report", job], capture_output=True, text=True, check=True).stdout
    assert "Earliest cause: rank 2 " in said
    assert "LookupError: no shard" in said
    assert "it had not begun all_reduce, seq 2, of group 'default_pg', for which rank" in said


def _log_of_groups(here: Here, level: str) -> list[str]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
    here.init()
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize(("level", "checks"), [("OFF", None), ("INFO", "on"), ("DETAIL", "full")])
def test_groups_that_are_made_are_logged_where_torch_is_asked_to(
    level: str, checks: str | None, tmp_path: Path
) -> None:
    for rank, said in enumerate(values(_log_of_groups, 2, tmp_path, level)):
        if checks is None:
            assert said == []
        else:
            (line,) = said
            assert line.startswith(f"group '0' was made: rank {rank} of 2, checks {checks}, black box /")


def _levels(here: Here, levels: list[str]) -> str:
    os.environ["PHALANX_CHECK"] = levels[here.rank]
    here.init()
    # Same number of elements in another shape: an error at the full level only.
    try:
        dist.all_reduce(torch.ones(2, 3) if here.rank else torch.ones(6))
        dist.all_reduce(torch.ones(1), dist.ReduceOp.MAX if here.rank else dist.ReduceOp.SUM)
    except phalanx.Mismatch as error:
        return error.code
    return "none"


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        (["off", "off"], "none"),
        (["off", "on"], "MISMATCH:REDUCE_OP"),
        (["on", "full"], "MISMATCH:SHAPE"),
        (["full", "off"], "MISMATCH:SHAPE"),
    ],
)
def test_the_strictest_level_is_what_all_ranks_have(levels: list[str], code: str, tmp_path: Path) -> None:
    assert values(_levels, 2, tmp_path, levels) == [code, code]


def _unknown_level(here: Here) -> None:
    os.environ["PHALANX_CHECK"] = "loud"
    here.init()


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    (end,) = run(_unknown_level, 1, tmp_path)
    assert end.error == "GroupError"
    assert "expected PHALANX_CHECK to be one of off, on, full, got 'loud'" in end.text


def _without_a_box(here: Here, folder: str) -> str:
    os.environ["PHALANX_FOLDER"] = folder
    here.init()
    dist.all_reduce(torch.ones(1))
    file = phalanx.dump(here.folder)
    return file.name


def test_a_folder_that_can_not_be_written_to_leaves_the_box_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert values(_without_a_box, 2, tmp_path, os.fspath(tmp_path / "file")) == ["rank_0", "rank_1"]


def _off(here: Here) -> str:
    os.environ["PHALANX_BLACK_BOX"] = "0"
    here.init()
    dist.all_reduce(torch.ones(1))
    with pytest.raises(phalanx.GroupError) as caught:
        phalanx.dump(here.folder)
    return str(caught.value)


def test_no_black_box_is_wanted(tmp_path: Path) -> None:
    (text,) = values(_off, 1, tmp_path)
    assert text.startswith("[GROUP] there is no black box: this process has made no group, or PHALANX_BLACK_BOX is 0")


def _ring(here: Here) -> list[int]:
    os.environ["PHALANX_BLACK_BOX"] = "5"
    here.init()
    for _ in range(12):
        dist.all_reduce(torch.ones(1))
    trace = pickle.loads(phalanx.dump(here.folder).read_bytes())
    return [entry["collective_seq_id"] for entry in trace["entries"]]


def test_a_box_keeps_the_last_calls(tmp_path: Path) -> None:
    assert values(_ring, 2, tmp_path) == [[8, 9, 10, 11, 12]] * 2


def _in_long_paths(here: Here) -> tuple[str, str]:
    """Its place has more bytes than a report keeps, and characters of several bytes."""
    source = "def wait(call):\n    call()\n"
    file = "/" + "/".join(["é" * 30] * 4) + "/train.py"
    names: dict[str, Callable[[Callable[[], object]], None]] = {}
    exec(compile(source, file, "exec"), names)
    here.init()
    dist.barrier()
    if here.rank == 1:
        here.hear()
        return "", ""
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(phalanx.CallTimeout) as caught:
        names["wait"](lambda: group.allreduce(torch.ones(1), timeout=timedelta(seconds=0.3)).wait())
    with pytest.raises(phalanx.CallTimeout) as again:
        names["wait"](lambda: dist.barrier())
    here.tell()
    return str(caught.value), str(again.value)


def test_the_place_of_a_call_may_have_a_long_name(tmp_path: Path) -> None:
    world = World(_in_long_paths, 2, tmp_path)
    world.told(0)
    world.tell(1)
    end, other = world.ends()
    assert (end.error, other.error) == (None, None), end.trace
    for text in end.value:
        assert "rank 1 did not come" in text


def _without_a_reason(here: Here) -> str:
    """A group that explains nothing after one that does: the place of the one is not that of the other."""
    here.init()
    dist.all_reduce(torch.ones(1))
    os.environ.update(PHALANX_CHECK="off", PHALANX_BLACK_BOX="0")
    plain = dist.new_group()
    assert isinstance(plain, phalanx.ProcessGroup)
    plain.set_timeout(timedelta(seconds=0.3))
    if here.rank == 1:
        here.hear()
        return ""
    with pytest.raises(phalanx.CallTimeout):
        dist.all_reduce(torch.ones(1), group=plain)
    with pytest.raises(phalanx.CallTimeout) as caught:
        dist.all_reduce(torch.ones(1), group=plain)
    here.tell()
    return caught.value.message.splitlines()[0]


def test_places_are_not_those_of_another_group(tmp_path: Path) -> None:
    world = World(_without_a_reason, 2, tmp_path)
    world.told(0)
    world.tell(1)
    end, _ = world.ends()
    assert end.value == (
        "the group is broken: rank 0 gave up on all_reduce, seq 1, when its timeout ran out: rank 1 did not come"
    )


def _never_made(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    with pytest.raises(phalanx.CallTimeout):
        phalanx.ProcessGroup(here.store(), 0, 2, timedelta(seconds=0.3))


def test_a_group_that_is_never_made_leaves_no_folder(tmp_path: Path) -> None:
    values(_never_made, 1, tmp_path)
    assert list((tmp_path / "jobs").iterdir()) == []


def _handled(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    here.init()
    try:
        next(iter(()))
    except StopIteration:
        dist.destroy_process_group()


def test_an_exception_that_is_handled_is_no_failure(tmp_path: Path) -> None:
    values(_handled, 2, tmp_path)
    assert list((tmp_path / "jobs").iterdir()) == []


def _full_boxes(here: Here) -> list[str]:
    here.init()
    tensor = torch.ones(1)
    for _ in range(2100):
        dist.all_reduce(tensor)
    with pytest.raises(phalanx.Mismatch) as caught:
        dist.all_reduce(torch.ones(1 + here.rank))
    dist.destroy_process_group()
    return caught.value.message.splitlines()[-1:]


def test_a_report_where_boxes_are_full(tmp_path: Path) -> None:
    for (line,) in values(_full_boxes, 2, tmp_path):
        assert line.startswith("  last completed call of all ranks: all_reduce, seq 2100, at ")


def _failed_and_ended(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    here.init()
    with pytest.raises(phalanx.Mismatch):
        dist.all_reduce(torch.ones(1 + here.rank))


@pytest.mark.parametrize("way", ["call", "short program"])
def test_a_failure_leaves_a_trace(way: str, tmp_path: Path) -> None:
    World(_failed_and_ended, 2, tmp_path, way=way).ends()
    (job,) = (tmp_path / "jobs").iterdir()
    assert sorted(path.name for path in job.glob("rank_*")) == ["rank_0", "rank_1"]
    assert "mismatch" in _analyzed(job).lower()


def _some_without(here: Here) -> list[str]:
    here.init()
    os.environ["PHALANX_BLACK_BOX"] = "0"
    quiet = dist.new_group(group_desc="quiet")
    dist.all_reduce(torch.ones(1), group=quiet)
    dist.barrier()
    del os.environ["PHALANX_BLACK_BOX"]
    trace = pickle.loads(phalanx.dump(here.folder).read_bytes())
    return [entry["profiling_name"] for entry in trace["entries"]]


def test_a_group_without_a_black_box_stays_without_when_it_gets_its_name(tmp_path: Path) -> None:
    assert values(_some_without, 2, tmp_path) == [["gloo:barrier"]] * 2
