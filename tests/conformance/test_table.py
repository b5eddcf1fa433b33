"""The table of conformance and what is objected to."""

from __future__ import annotations

from pathlib import Path

import pytest
from conform import ROOT, load_all, versions
from table import AllResults, ByVersion, Results, Verdict, kind_of, objections, write_table

from phalanx._autoload import TORCH_VERSIONS


def _test(status: str, why: str = "") -> Verdict:
    return {"status": status, "why": why, "seconds": 1.0}


def _results(
    gloo: Verdict, phalanx: Verdict, name: str = "test_all_gather", guarded: Verdict | None = None
) -> AllResults:
    def of(backend: str, test: Verdict) -> Results:
        return {
            "backend": backend,
            "ranks": 2,
            "torch": "2.13.0+cpu",
            "python": "3.11",
            "seconds": 1.0,
            "tests": {name: test},
        }

    return {
        ("gloo", 2): of("gloo", gloo),
        ("guarded gloo", 2): of("guarded gloo", guarded or gloo),
        ("phalanx", 2): of("phalanx", phalanx),
    }


@pytest.fixture
def kept() -> ByVersion:
    return {version: load_all(version) for version in versions()}


def test_results_are_kept_of_the_first_and_the_last_supported_torch() -> None:
    (major, first), (_, end) = TORCH_VERSIONS
    assert versions() == [f"{major}.{first}", f"{major}.{end - 1}"]


def test_the_page_is_what_the_kept_results_give(kept: ByVersion, tmp_path: Path) -> None:
    write_table(tmp_path / "made.md", kept)
    assert (ROOT / "docs" / "conformance.md").read_text() == (tmp_path / "made.md").read_text()


@pytest.mark.parametrize("version", versions())
def test_nothing_to_object_to_in_the_kept_results(version: str) -> None:
    kept = load_all(version)
    assert objections(kept) == []
    assert {len(results["tests"]) for results in kept.values()} == {285}
    assert all(results["torch"].startswith(f"{version}.") for results in kept.values())


def test_page_shows_where_versions_differ(tmp_path: Path) -> None:
    older = _results(_test("passed"), _test("passed"))
    newer = _results(_test("passed"), _test("skipped", "Needs CUDA devices."))
    write_table(tmp_path / "made.md", {"2.13": older, "2.15": newer})
    row = "| test_all_gather | passed | passed | 2.13: passed; 2.15: skipped: GPU |  |"
    assert (tmp_path / "made.md").read_text().splitlines()[-1] == row
    del newer["gloo", 2]["tests"]["test_all_gather"]
    write_table(tmp_path / "made.md", {"2.13": older, "2.15": newer})
    assert "| test_all_gather | 2.13: passed; 2.15: not there |" in (tmp_path / "made.md").read_text()


@pytest.mark.parametrize(
    ("gloo", "phalanx", "problem"),
    [
        (_test("passed"), _test("passed"), None),
        (_test("passed"), _test("failed", "Error: x"), "failed: Error: x"),
        (_test("skipped", "Need at least 2 CUDA devices"), _test("failed", "Error: x"), "failed: Error: x"),
        (_test("passed"), _test("skipped", "Needs 3 ranks."), "passes on Gloo; skipped: Needs 3 ranks."),
        (_test("skipped", "CUDA is not available."), _test("skipped", "Needs CUDA devices."), None),
        (_test("skipped", "Skipped due to small world size."), _test("skipped", "Needs 3 ranks."), None),
        (
            _test("skipped", "Only MPI"),
            _test("skipped", "Only MPI"),
            "skipped, though for no want of a GPU or of ranks: Only MPI",
        ),
    ],
)
def test_objections(gloo: Verdict, phalanx: Verdict, problem: str | None) -> None:
    expected = [] if problem is None else [f"test_all_gather, 2 ranks: {problem}"]
    guarded = _test("passed") if gloo["status"] == "failed" else gloo
    assert objections(_results(gloo, phalanx, guarded=guarded)) == expected


@pytest.mark.parametrize(
    ("gloo", "guarded", "problem"),
    [
        (_test("passed"), _test("passed"), None),
        (_test("skipped", "Only MPI"), _test("skipped", "Only MPI"), None),
        (_test("passed"), _test("failed", "Error: x"), "passed on Gloo; failed: Error: x"),
        (_test("passed"), _test("skipped", "Only MPI"), "passed on Gloo; skipped: Only MPI"),
        (_test("skipped", "Only MPI"), _test("passed"), "skipped on Gloo; passed"),
        (_test("failed", "Error: x"), _test("failed", "Error: x"), "failed on Gloo; failed: Error: x"),
        (_test("failed", "Error: x"), _test("passed"), None),
    ],
)
def test_objections_to_guarded_gloo(gloo: Verdict, guarded: Verdict, problem: str | None) -> None:
    expected = [] if problem is None else [f"test_all_gather, guarded Gloo, 2 ranks: {problem}"]
    found = objections(_results(gloo, _test("passed"), guarded=guarded))
    assert found == expected


def test_a_test_that_needs_the_name_of_another_backend_may_be_skipped() -> None:
    skipped = _test("skipped", "only gloo")
    assert objections(_results(_test("passed"), skipped, "test_monitored_barrier_gloo")) == []


def test_a_test_that_one_of_the_results_lacks() -> None:
    results = _results(_test("passed"), _test("passed"))
    del results["gloo", 2]["tests"]["test_all_gather"]
    problems = objections(results)
    assert len(problems) == 2
    assert all("does not have it" in problem for problem in problems)


def test_kinds_of_skips() -> None:
    assert kind_of(_test("skipped", "Need at least 2 CUDA devices")) == "skipped: GPU"
    assert kind_of(_test("skipped", "Need at least 2 accelerator devices")) == "skipped: GPU"
    assert kind_of(_test("skipped", "Test requires world size of 4")) == "skipped: ranks"
    assert kind_of(_test("skipped", "no torchvision")) == "skipped: other"
    assert kind_of(_test("passed")) == "passed"
