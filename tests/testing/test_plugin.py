"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import re

import pytest

from programs import run_pytest

_STEP = """
import pytest
import torch
import torch.distributed as dist
"""


def _run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(_STEP + source)
    return run_pytest(pytester, *options)


def test_one_test_a_size(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks([1, 2, 4])
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_sum(rank, world, value, tmp_path, monkeypatch):
    assert world.size == dist.get_world_size()
    tensor = torch.full((2,), value)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [value * world.size] * 2
    (tmp_path / str(rank)).touch()

@pytest.mark.ranks(2, seeds=5)
def test_seeds(rank):
    dist.barrier()

@pytest.mark.ranks(2, processes=True)
def test_processes(rank, tmp_path):
    dist.barrier()

def test_plain():
    assert not dist.is_initialized()
""",
        "-v",
    )
    result.assert_outcomes(passed=9)
    result.stdout.fnmatch_lines_random(["*::test_sum?4 ranks-1.0? PASSED*", "*::test_seeds?2 ranks? PASSED*"])


def test_a_failure_names_its_rank_and_its_schedule(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks(3)
def test_fails(rank, world):
    print("I am", rank)
    assert rank != 1, "not me"
    dist.barrier()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: not me*", "*on rank 1"])
    result.stdout.fnmatch_lines(["*because of it:*", "*ranks 0, 2: PeerLost in barrier, seq 1"])
    result.stdout.fnmatch_lines(["*again: pytest 'test_*.py::test_fails?3 ranks?' --ranks-replay=*"])
    result.stdout.fnmatch_lines(["*Captured stdout call*", "rank 0:", "I am 0", "*Captured stdout call*", "rank 1:"])


def test_a_deadlock_fails_at_once(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks(2)
def test_waits(rank):
    dist.recv(torch.ones(1), 1 - rank)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 0 waits for rank 1 in recv, seq 1, tag 0, group 'default_pg' (*"])


def test_nothing_of_torch_is_loaded_for_tests_without_ranks(pytester: pytest.Pytester) -> None:
    test = "@pytest.mark.requires(cpus=1)\ndef test_plain():\n    assert 'torch' not in sys.modules\n"
    pytester.makepyfile("import pytest, sys\n\n" + test)
    pytester.runpytest_subprocess("-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_a_failure_is_repeated_by_its_command(pytester: pytest.Pytester) -> None:
    source = """
@pytest.mark.ranks(3, seeds=20)
def test_race(rank, world):
    if rank == 0:
        first = torch.zeros(1)
        assert dist.recv(first) == 1, "rank 2 was first"
        dist.recv(first)
    else:
        dist.send(torch.ones(1), 0)
"""
    result = _run(pytester, source)
    result.assert_outcomes(failed=1)
    # Where CI is set in the environment, pytest's summary shows the whole text a second time.
    (option,) = {line.split()[-1] for line in result.outlines if "again: pytest " in line}
    repeated = run_pytest(pytester, option)
    repeated.assert_outcomes(failed=1)
    repeated.stdout.fnmatch_lines(["*rank 2 was first*", f"*{option}"])


def test_what_a_test_requires(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.requires(min_ranks=2, max_ranks=3)
def test_sizes(rank):
    pass

@pytest.mark.ranks([3, 4])
@pytest.mark.requires(multiple_of=2)
def test_multiple(rank):
    pass

@pytest.mark.ranks(2)
@pytest.mark.requires(gpus=64)
def test_gpus(rank):
    pass

@pytest.mark.requires(backend="no such backend")
def test_backend():
    pass

@pytest.mark.requires(cpus=100000)
def test_cpus():
    pass

@pytest.mark.ranks(2)
@pytest.mark.requires(backend="phalanx", cpus=1)
def test_all_there(rank):
    pass
""",
        "-rs",
    )
    result.assert_outcomes(passed=4, skipped=6)
    result.stdout.fnmatch_lines_random(
        [
            "*needs at least 2 ranks, has 1",
            "*needs at most 3 ranks, has 4",
            "*needs a multiple of 2 ranks, has 3",
            "*needs 64 GPUs, has *",
            "*needs the backend 'no such backend', which this torch does not have",
            "*needs 100000 CPUs, has *",
        ]
    )


@pytest.mark.parametrize("processes", [False, True])
def test_a_rank_that_skips(pytester: pytest.Pytester, processes: bool) -> None:
    result = _run(
        pytester,
        f"""
@pytest.mark.ranks(2, processes={processes})
def test_skips(rank):
    if rank == 1:
        pytest.skip("not here")
    dist.barrier()
""",
        "-rs",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not here*"])


def test_output_of_processes(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks(2, processes=True)
def test_fails(rank, monkeypatch):
    monkeypatch.setenv("LEFT", "1")
    print("I am", rank)
    assert rank == 0, "not me"

@pytest.mark.ranks(2, processes=True)
def test_environment(rank):
    import os
    assert "LEFT" not in os.environ
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: not me*", "*on rank 1"])
    result.stdout.fnmatch_lines(["*Captured stdout call*", "rank 0:", "I am 0", "*Captured stdout call*", "rank 1:"])


def test_fixtures_that_processes_can_not_be_sent(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.fixture
def opener():
    return lambda: None

@pytest.mark.ranks(2, processes=True)
def test_it(rank, opener):
    pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*expected fixtures that processes can be sent, got 'opener' (*"])


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_modules_that_can_not_be_found_by_name(pytester: pytest.Pytester, mode: str) -> None:
    folder = pytester.mkdir("inner")
    (folder / "test_inner.py").write_text(
        _STEP
        + """
import phalanx.testing as pt

class OwnError(Exception):
    pass

@pytest.mark.xfail(raises=OwnError, strict=True)
@pytest.mark.ranks(2, processes=True, faults=[pt.fail(0, 1, OwnError("planned"))])
def test_fails(rank):
    dist.barrier()

@pytest.mark.ranks(2, processes=True)
def test_it(rank):
    dist.barrier()
"""
    )
    run_pytest(pytester, f"--import-mode={mode}").assert_outcomes(passed=1, xfailed=1)


def test_beside_xdist(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks([2, 3], seeds=3)
@pytest.mark.parametrize("number", range(4))
def test_threads(rank, world, number):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world.size

@pytest.mark.ranks(2, processes=True)
@pytest.mark.parametrize("number", range(2))
def test_processes(rank, number):
    dist.barrier()

@pytest.mark.ranks(2)
def test_fails(rank):
    print("I am", rank)
    assert rank == 0, "not me"
    dist.barrier()
""",
        "-n",
        "2",
    )
    result.assert_outcomes(passed=10, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: not me*", "*on rank 1", "*again: pytest *"])
    result.stdout.fnmatch_lines(["rank 1:", "I am 1"])


def test_tests_that_capture(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
import sys

@pytest.mark.ranks(2)
def test_capsys(rank, capsys):
    if rank == 0:
        print("captured")
        assert capsys.readouterr().out == "captured\\n"
    dist.barrier()

@pytest.mark.ranks(1)
def test_streams(rank):
    assert sys.stdout.fileno() == 1
    sys.stdout.buffer.write(b"bytes")
    assert sys.stdout.encoding
""",
        "-s",
    )
    result.assert_outcomes(passed=2)


def test_what_the_mark_can_not_be_put_on(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
import unittest

class TestPlain:
    @pytest.mark.ranks(2)
    def test_method(self, rank):
        dist.barrier()

class TestUnit(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_method(self):
        pass
""",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines_random(
        ["*expected the mark ranks on a function or on a method of a plain class, got it on one of unittest's*"]
    )


def test_output_that_is_not_captured(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.ranks(2)
def test_threads(rank):
    print("thread", rank)

@pytest.mark.ranks(2, processes=True)
def test_processes(rank):
    print("process", rank)
""",
        "-s",
    )
    result.stdout.fnmatch_lines_random(["*thread 0", "*thread 1", "*process 0", "process 1"])


def test_the_command_is_to_be_given_where_pytest_was_started(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pytester.mkdir("inner")
    pytester.makeini("[pytest]")
    (folder / "test_inner.py").write_text(_STEP + "@pytest.mark.ranks(2)\ndef test_it(rank):\n    assert rank\n")
    monkeypatch.chdir(folder)
    result = run_pytest(pytester)
    result.stdout.fnmatch_lines(["*again: pytest 'test_inner.py::test_it?2 ranks?' --ranks-replay=*"])


def test_async_functions_run_with_a_loop_per_rank(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
import asyncio
from hypothesis import given, strategies

loops = set()

@pytest.mark.ranks(2, seeds=2)
async def test_sum(rank, world):
    loops.add(asyncio.get_running_loop())
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    await asyncio.to_thread(dist.all_reduce, tensor)
    await asyncio.sleep(0)
    assert tensor.item() == 4

def test_loops():
    assert len(loops) == 4

@pytest.mark.ranks(2, processes=True)
async def test_processes(rank):
    await asyncio.sleep(0)
    dist.barrier()

@pytest.mark.ranks(2)
@given(number=strategies.integers())
async def test_given(rank, number):
    await asyncio.sleep(0)
    dist.barrier()

@pytest.mark.ranks(2)
async def test_fails(rank):
    await asyncio.sleep(0)
    assert rank == 0, "not me"
""",
    )
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: not me*", "*on rank 1*"])


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_examples_of_hypothesis(pytester: pytest.Pytester, processes: bool) -> None:
    """Each is a run of all ranks with the same values, and a failing one is shrunk, and shown once."""
    result = _run(
        pytester,
        f"""
from hypothesis import given, settings, strategies

@pytest.mark.ranks(2, processes={processes})
@settings(max_examples=20, database=None)
@given(values=strategies.lists(strategies.integers(-9, 9), max_size=4))
def test_sum(rank, world, values):
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2 * value for value in values]

class TestSmall:
    @pytest.mark.ranks(2, processes={processes})
    @settings(database=None)
    @given(number=strategies.integers(0, 1000))
    def test_small(self, rank, number):
        tensor = torch.tensor([number])
        dist.all_reduce(tensor)
        assert tensor.item() < 84
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    shown = [line.strip(" E") for line in result.outlines if line.startswith("E ")]
    assert [line for line in shown if line.startswith("number=")] == ["number=42,"]
    # Of processes, which run freely, either is the first.
    result.stdout.fnmatch_lines(["*on rank ?, and the same on rank ?"])
    if not processes:
        result.stdout.fnmatch_lines(["*on rank 0, and the same on rank 1", "*again: pytest *"])


def test_failing_examples_of_one_test_are_not_those_of_another(pytester: pytest.Pytester) -> None:
    """Hypothesis keeps them in a database, and takes those of a test for shrunk."""
    source = """
from hypothesis import given, settings, strategies
from hypothesis.database import DirectoryBasedExampleDatabase

@pytest.mark.ranks(2)
@settings(database=DirectoryBasedExampleDatabase("examples"))
@given(first=strategies.integers(1, 50))
def test_first(rank, first):
    assert first < 30

@pytest.mark.ranks([2, 3])
@settings(database=DirectoryBasedExampleDatabase("examples"))
@given(second=strategies.integers(1, 50))
def test_second(rank, world, second):
    assert second < 15 // (world.size - 1)
"""
    for _ in range(2):
        result = _run(pytester, source)
        result.assert_outcomes(failed=3)
        shown = [line.strip(" E") for line in result.outlines if line.startswith("E ")]
        values = [line for line in shown if line.startswith(("first=", "second="))]
        assert values == ["first=30,", "second=15,", "second=7,"]
        assert re.search(r"phalanx/(\w+/)?\w+\.py", result.stdout.str()) is None
