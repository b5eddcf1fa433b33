"""The last line of a report names the true cause, whatever came after it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from fallen_jobs import JOBS, SIZE
from fallen_runs import EndedRun, Run, run_by_torchrun, running

from phalanx.commands import main
from phalanx.debug.evidence import read_boxes

# Jobs that run at once: they mostly wait.
_AT_ONCE = 8
_PATIENCE = 60.0


@pytest.fixture(scope="session", params=[False, True], ids=["plain", "launcher"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """All jobs, after they have fallen. The launcher is the part of torchrun that starts and ends processes."""
    ended: list[Run] = []
    folder = tmp_path_factory.mktemp("jobs")
    for first in range(0, len(JOBS), _AT_ONCE):
        with running(JOBS[first : first + _AT_ONCE], folder / str(first), has_launcher=request.param) as group:
            for run in group:
                run.end(time.monotonic() + _PATIENCE)
        ended += group
    return ended


def _pids(job: Path) -> dict[str, int]:
    boxes, problems = read_boxes(job)
    assert not problems
    return {f"pid{box.rank}": box.pid for box in boxes}


@pytest.mark.parametrize("number", range(len(JOBS)), ids=[job.name for job in JOBS])
def test_the_last_line_names_the_cause(runs: list[Run], number: int, capsys: pytest.CaptureFixture[str]) -> None:
    _check_cause(runs[number], capsys)


def _check_cause(run: EndedRun | Run, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = (run.folder / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    said = capsys.readouterr().out
    causes = re.findall(r"^Earliest cause: (.*)", said, re.MULTILINE)
    assert len(_pids(job)) == SIZE
    assert causes, said
    assert causes[0].startswith(run.job.expected(_pids(job))), f"{said}\n{run.output()}"


@pytest.mark.parametrize(
    ("name", "is_forked"),
    [
        ("killed_while_others_wait", False),
        ("crash_while_others_compute", True),
        ("exception_while_others_wait", True),
    ],
)
def test_jobs_that_torchrun_itself_runs(
    name: str, is_forked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the survivors as soon as one rank has failed, by SIGTERM, while they wait or compute."""
    (job,) = [job for job in JOBS if job.name == name]
    _check_cause(run_by_torchrun(job, tmp_path, is_forked=is_forked), capsys)


def test_the_first_survivor_that_knows_says_so_once(runs: list[Run]) -> None:
    """On the terminal, although every survivor was in its own code and was ended before it could raise anything."""
    (run,) = [run for run in runs if run.job.name == "crash_while_others_compute"]
    (job,) = (run.folder / "jobs").iterdir()
    said = f"phalanx: rank 1 (pid {_pids(job)['pid1']}) was killed by SIGSEGV; all ranks: phalanx report {job}\n"
    assert run.output().count("phalanx: rank") == 1
    assert said in run.output()
    assert (job / "crash").read_text() == said


def test_every_error_that_ends_a_program_points_to_the_report(runs: list[Run]) -> None:
    """The rank's own exceptions, and ours."""
    (run,) = [run for run in runs if run.job.name == "exception_while_others_wait"]
    (job,) = (run.folder / "jobs").iterdir()
    output = [(run.folder / f"output{rank}").read_text() for rank in range(SIZE)]
    assert f"LookupError: no shard\n[rank2]: phalanx: all ranks: phalanx report {job}\n" in output[2]
    for text in output:
        assert text.count(f"phalanx report {job}") == ("Traceback" in text)
    assert not any("phalanx: rank" in text for text in output)
