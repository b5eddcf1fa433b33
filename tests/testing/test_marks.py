"""Marks that are wrong fail when tests are collected, all of them, and without a traceback."""

from __future__ import annotations

import pytest

from programs import run_pytest

_WRONG = {
    "ranks(2, sede=3)": "expected options among sizes, seeds, seed, *, got 'sede' (did you mean 'seed'?)",
    "ranks": "expected ranks(number) or ranks([[]number, ...[]]), got ranks()",
    "ranks('4')": "expected ranks(number) or ranks([[]number, ...[]]), got ranks('4')",
    "ranks(2, sizes=3)": "expected ranks(number) or *, got ranks(2, sizes=3)",
    "ranks([2, '4'])": "expected at least one rank, got '4'",
    "ranks(0)": "expected at least one rank, got 0",
    "ranks(True)": "expected at least one rank, got True",
    "ranks([])": "expected one number of ranks or more, got an empty list",
    "ranks(2, seeds=0)": "expected a number of seeds from 1 on, got 0",
    "ranks(2, seeds=2, seed=1)": "expected seeds or a seed, got both",
    "ranks(2, seeds=2, processes=True)": "expected no schedule, seed, *",
    "ranks(2, timeout=5.0)": "expected a timeout as a datetime.timedelta above zero, got 5.0",
    "ranks(2, schedule='randon')": "expected a schedule of *, got 'randon'",
    "ranks(2, stuck_after='x')": "expected stuck_after as a number of seconds above zero, got 'x'",
    "ranks(2, faults=[1])": "expected faults made by kill, delay or fail, got 1",
    "ranks(2, faults=1)": "expected faults made by kill, delay or fail, got 1",
    "ranks(2, replay='x')": "expected *",
    "requires(2, min_rank=4)": "expected some of backend, min_ranks, *, got requires(2, min_rank=4)",
    "requires(multiple_of=0)": "expected multiple_of as a number from 1 on, got 0",
}


def test_all_wrong_marks_of_a_file_are_told(pytester: pytest.Pytester) -> None:
    tests = [f"@pytest.mark.{mark}\ndef test_{number}(): pass\n" for number, mark in enumerate(_WRONG)]
    in_class = "class TestIt:\n    @pytest.mark.ranks(0)\n    def test_method(self): pass\n"
    pytester.makepyfile(test_wrong="import pytest\n" + "".join(tests) + in_class)
    pytester.makepyfile(test_right="def test_it(): pass\n")
    result = run_pytest(pytester, "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    begin = next(number for number, line in enumerate(result.outlines) if "ERROR collecting" in line)
    pattern = [
        f"test_wrong.py::test_{number}: mark {mark.partition('(')[0]}: {text}"
        for number, (mark, text) in enumerate(_WRONG.items())
    ]
    pytest.LineMatcher(result.outlines[begin + 1 :]).fnmatch_lines(pattern, consecutive=True)
    assert "Traceback" not in result.stdout.str()
    assert "pluggy/" not in result.stdout.str()


def test_wrong_marks_in_classes_and_of_whole_files(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_class="import pytest\nclass TestIt:\n    @pytest.mark.ranks(0)\n    def test_method(self): pass\n",
        test_file="import pytest\npytestmark = pytest.mark.ranks(0)\ndef test_1(): pass\ndef test_2(): pass\n",
    )
    result = run_pytest(pytester)
    result.assert_outcomes(errors=2)
    told = [line for line in result.outlines if "expected at least one rank" in line and line.startswith("test_")]
    assert told == [
        "test_class.py::TestIt::test_method: mark ranks: expected at least one rank, got 0",
        "test_file.py::test_1: mark ranks: expected at least one rank, got 0",
    ]


def test_sizes_may_be_given_by_name(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(sizes=[1, 2])\ndef test_it(rank): pass\n")
    run_pytest(pytester).assert_outcomes(passed=2)


def test_our_fixtures_without_the_mark(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_bare(rank):\n    pass\n")
    result = run_pytest(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*expected the mark ranks on a test that takes 'rank'*"])
