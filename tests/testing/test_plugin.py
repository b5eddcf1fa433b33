"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import pytest

_STEP = """
import pytest
import torch
import torch.distributed as dist
"""


def _run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(_STEP + source)
    return pytester.runpytest_subprocess(*options)


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
    result.stdout.fnmatch_lines(["*AssertionError: not me*", "*on rank 1; because of it also on ranks 0, 2"])
    result.stdout.fnmatch_lines(["*again: replay='*'"])
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


def test_bad_marks(pytester: pytest.Pytester) -> None:
    result = _run(pytester, "def test_bare(rank):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*expected the mark ranks on a test that takes 'rank'*"])
    result = _run(pytester, "@pytest.mark.ranks()\ndef test_none(rank):\n    pass\n")
    result.stdout.fnmatch_lines(["*expected the mark ranks(number) or ranks(?number, ...?), got ranks()*"])


def test_nothing_of_torch_is_loaded_for_tests_without_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\n\ndef test_plain():\n    assert 'torch' not in sys.modules\n")
    pytester.runpytest_subprocess("-p", "no:hypothesispytest").assert_outcomes(passed=1)
