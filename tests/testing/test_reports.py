"""What pytest shows of a failure: the program's frames, and the report once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from programs import run_pytest

_STEP = """
import pytest
import torch
import torch.distributed as dist
"""
BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def _run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(_STEP + source)
    return run_pytest(pytester, *options)


def assert_only_the_program_is_shown(text: str) -> None:
    assert "torch/distributed" not in text
    assert re.search(r"phalanx/(\w+/)?\w+\.py", text) is None
    assert "c10d" not in text
    assert "entries are hidden" not in text


@BOTH
def test_a_failure_shows_the_frames_of_the_program_and_the_report(pytester: pytest.Pytester, processes: bool) -> None:
    source = f"""
def reduce(rank):
    dist.all_reduce(torch.ones(1 + rank))

@pytest.mark.ranks(2, processes={processes})
def test_it(rank):
    reduce(rank)
"""
    result = _run(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [">       reduce(rank)", ">       dist.all_reduce*", "E  *MISMATCH:COUNT*", "*on rank ?*"]
    )
    text = result.stdout.str()
    assert_only_the_program_is_shown(text)
    assert text.count("ranks disagree about the number of elements") <= 2, "the summary shows it, too"
    result = _run(pytester, source, "--full-trace")
    result.stdout.fnmatch_lines(["*torch/distributed*"])


@BOTH
def test_what_a_failure_came_from_is_shown(pytester: pytest.Pytester, processes: bool) -> None:
    result = _run(
        pytester,
        f"""
@pytest.mark.ranks(2, processes={processes})
def test_cause(rank):
    try:
        dist.all_reduce(torch.ones(1 + rank))
    except RuntimeError as error:
        raise AssertionError("the step failed") from error

@pytest.mark.ranks(2, processes={processes})
def test_context(rank):
    try:
        raise ValueError("the real problem")
    finally:
        dist.all_reduce(torch.ones(1 + rank))

@pytest.mark.ranks(2, processes={processes})
def test_group(rank):
    try:
        dist.all_reduce(torch.ones(1 + rank))
    except RuntimeError as error:
        raise ExceptionGroup("several problems", [error])
""",
    )
    result.assert_outcomes(failed=3)
    because = "The above exception was the direct cause of the following exception:"
    result.stdout.fnmatch_lines(["E  *MISMATCH:COUNT*", because, "E  *AssertionError: the step failed*"])
    during = "During handling of the above exception, another exception occurred:"
    result.stdout.fnmatch_lines(["E  *ValueError: the real problem*", during, "E  *MISMATCH:COUNT*"])
    result.stdout.fnmatch_lines(["*ExceptionGroup: several problems*", "*MISMATCH:COUNT*"])
    assert_only_the_program_is_shown(result.stdout.str())


def test_of_two_ranks_with_the_same_failure_the_one_is_shown_that_had_another_problem_before(
    pytester: pytest.Pytester,
) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks(3)
def test_it(rank):
    try:
        if rank == 1:
            raise ValueError("the real problem")
    finally:
        dist.all_reduce(torch.ones(1 + rank))
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E  *ValueError: the real problem*", "E  *MISMATCH:COUNT*", "*on rank 1, and the same on*"]
    )


def test_frames_of_a_process(pytester: pytest.Pytester) -> None:
    """They look as those of a thread: how a worker came to call the test is not of interest."""
    result = _run(
        pytester,
        """
def fail(rank):
    if rank == 1:
        raise ValueError("no shard")

@pytest.mark.ranks(2, processes=True)
async def test_it(rank):
    fail(rank)
""",
    )
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    result.stdout.fnmatch_lines(
        [
            "    async def test_it(rank):",
            ">       fail(rank)",
            ">           raise ValueError*",
            "E  *no shard",
            "E *on rank 1",
        ]
    )
    assert_only_the_program_is_shown(text)
    assert "asyncio" not in text
    assert "Traceback" not in text


def test_an_error_without_frames(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
import os, signal

@pytest.mark.ranks(2, processes=True)
def test_it(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E  *rank 1 was killed by SIGKILL*"])
    assert "entries are hidden" not in result.stdout.str()


def test_where_a_thread_that_no_rank_has_started_made_its_call(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
import queue, threading

todo = queue.SimpleQueue()

def serve():
    for done in iter(todo.get, None):
        try:
            dist.barrier()
        except RuntimeError:
            done.set()

threading.Thread(target=serve, daemon=True).start()

@pytest.mark.ranks(1)
def test_it(rank):
    done = threading.Event()
    todo.put(done)
    done.wait()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["> *dist.barrier()", "E  *INVALID:THREAD*"])
    assert_only_the_program_is_shown(result.stdout.str())


def test_reports_of_processes_are_named_only_if_they_stay(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = """
import os, signal

@pytest.mark.ranks(2, processes=True)
def test_it(rank):
    dist.all_reduce(torch.ones(1 + rank))

@pytest.mark.ranks(2, processes=True)
def test_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""
    monkeypatch.delenv("PHALANX_FOLDER", raising=False)
    result = _run(pytester, source)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["phalanx: rank 1 (pid *) was killed by SIGKILL"])
    assert "phalanx report" not in result.stdout.str()
    monkeypatch.setenv("PHALANX_FOLDER", str(tmp_path))
    result = _run(pytester, source)
    result.stdout.fnmatch_lines([f"*phalanx: all ranks: phalanx report {tmp_path}/*"])
    result.stdout.fnmatch_lines([f"phalanx: rank 1 *was killed by SIGKILL; all ranks: phalanx report {tmp_path}/*"])
