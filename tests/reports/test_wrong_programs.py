"""Wrong programs print exactly the report that they must, on every rank, whoever comes first."""

from __future__ import annotations

from pathlib import Path

import pytest
import wrong_endings
import wrong_messages
import wrong_models
import wrong_orders
import wrong_programs
import wrong_refusals
import wrong_sides
from telling import run_telling
from wrong_table import PROGRAMS, Wrong

# Importing them has put their programs into the table.
MODULES = (wrong_programs, wrong_sides, wrong_orders, wrong_messages, wrong_endings, wrong_refusals, wrong_models)

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated:FutureWarning")

_NUM_SEEDS = 5
# A report of processes waits only so long for a rank that is late, which on a busy machine any rank may be.
LATE = "had not made this call"
MOST_ATTEMPTS = 20


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports name files as seen from the working folder."""
    monkeypatch.chdir(Path(__file__).parent)


def _param(wrong: Wrong) -> object:
    return pytest.param(wrong, id=wrong.name)


@pytest.mark.parametrize("wrong", [_param(wrong) for wrong in PROGRAMS])
def test_threads(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CHECK", wrong.level)
    difference = wrong.difference(run_telling(wrong.program, wrong.ranks, tmp_path / "one after another"))
    assert not difference, difference
    for seed in range(_NUM_SEEDS):
        outcome = run_telling(wrong.program, wrong.ranks, tmp_path / str(seed), seed=seed)
        difference = wrong.difference(outcome, any_order=True)
        assert not difference, f"seed {seed}: {difference}"


@pytest.mark.parametrize("wrong", [_param(wrong) for wrong in PROGRAMS if wrong.processes])
def test_processes(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CHECK", wrong.level)
    for attempt in range(MOST_ATTEMPTS):
        outcome = run_telling(wrong.program, wrong.ranks, tmp_path / str(attempt), processes=True)
        if LATE in wrong.text or not any(LATE in each.text for each in outcome.raised.values()):
            break
    difference = wrong.difference(outcome, processes=True, any_order=True)
    assert not difference, difference


def test_the_table() -> None:
    assert len({wrong.name for wrong in PROGRAMS}) == len(PROGRAMS) >= 60
    for wrong in PROGRAMS:
        assert wrong.expected(), f"{wrong.name} has no report"
