"""The command `phalanx`, as people run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from boxes import Call, make_box
from jobs import ALL_IS_WELL, SIX

from phalanx import _native
from phalanx.commands import main


@pytest.fixture(autouse=True)
def _base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHALANX_FOLDER", str(tmp_path / "base"))


def test_a_folder_of_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid, start = _native.own_identity()
    (tmp_path / f"{pid}.box").write_bytes(make_box(*SIX, world_size=2, pid=pid, start=start))
    (tmp_path / "2.box").write_bytes(make_box(*SIX, rank=1, ending=1))
    (tmp_path / "later.txt").write_text("second")
    (tmp_path / "first.txt").write_text("first")
    os.utime(tmp_path / "first.txt", (1, 1))
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"{tmp_path.name}: 2 ranks, 1 running, 1 ended well",
        f"  rank 0 (pid {pid}): running",
        "  rank 1 (pid 1073741824): ended well",
    ]
    assert lines[-3:] == [
        "first.txt says (1 more report in the folder):",
        "  first",
        ALL_IS_WELL,
    ]


def test_several_folders_are_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
        (tmp_path / f"host{rank}" / "7.box").write_bytes(make_box(*SIX, rank=rank, ending=1))
    assert main(["report", str(tmp_path / "host0"), str(tmp_path / "host1")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "host0, host1: 2 ranks, all ended well"


def test_without_a_folder_the_newest_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day in ("20200102", "20200101"):
        folder = tmp_path / "base" / f"job-{day}-000000-1-abcd"
        folder.mkdir(parents=True)
        (folder / "7.box").write_bytes(make_box(*SIX, ending=2, world_size=1))
    assert main(["report"]) == 0
    assert capsys.readouterr().out.startswith("job-20200102-000000-1-abcd: 1 rank, failed\n")
    assert main(["report", str(tmp_path / "base")]) == 2
    assert capsys.readouterr().err == (
        f"phalanx: there are no black boxes in {tmp_path}/base; it has the folders of jobs, the newest is "
        "job-20200102-000000-1-abcd\n"
    )


@pytest.mark.parametrize("verb", [["report"], ["dump", "--out", "traces"]])
def test_where_there_is_nothing(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"phalanx: there is no folder {tmp_path}/none\n"
    (tmp_path / "strange.box").write_bytes(b"?")
    assert main([*verb, str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"phalanx: there are no black boxes in {tmp_path}\n"
        f"  {tmp_path}/strange.box: expected a black box, got something else\n"
    )


def test_no_job_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 2
    assert capsys.readouterr().err == (
        f"phalanx: there is no job folder in {tmp_path}/base; a job that ended well leaves none behind\n"
    )


def test_dump_says_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rank, start in (("1", 0, 1), ("2", 0, 2), ("3", -1, 1)):
        (tmp_path / f"{name}.box").write_bytes(make_box(*SIX, rank=rank, start=start))
    assert main(["dump", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"1 trace in {tmp_path}/out",
        f"Next: torchfrtrace --prefix rank_ --allow-incomplete-ranks {tmp_path}/out",
    ]
    assert said.err.splitlines() == [
        f"phalanx: left out: {tmp_path}/1.box: without a rank, or of an earlier process",
        f"phalanx: left out: {tmp_path}/3.box: without a rank, or of an earlier process",
    ]


def test_it_is_a_module_too(tmp_path: Path) -> None:
    (tmp_path / "1.box").write_bytes(make_box(*SIX, ending=1, world_size=1))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "phalanx", "report", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"{tmp_path.name}: 1 rank, ended well"


@pytest.mark.parametrize("verb", [["report"], ["dump", "--out", "{}/out"]])
def test_a_reader_that_has_seen_enough(tmp_path: Path, verb: list[str]) -> None:
    """As `head -1` has: nothing is said about it."""
    (tmp_path / "1.box").write_bytes(make_box(*SIX, ending=1, world_size=1))
    command = [sys.executable, "-m", "phalanx", *(word.format(tmp_path) for word in verb), str(tmp_path)]
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


_WITHOUT_TORCH = """
import sys
from phalanx.commands import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize("verb", [["report"], ["dump", "--out", "{}/out"]])
def test_commands_do_not_load_torch(tmp_path: Path, verb: list[str]) -> None:
    """That takes seconds."""
    (tmp_path / "1.box").write_bytes(make_box(*SIX[:-1], Call(seq=6, state="started"), world_size=2))
    words = [*(word.format(tmp_path) for word in verb), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
