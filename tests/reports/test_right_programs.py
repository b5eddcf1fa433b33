"""Programs that look wrong and are not do not raise, nor are they warned of, however much is compared."""

from __future__ import annotations

import logging

import pytest
from right_programs import PROGRAMS, Program

import phalanx.testing as pt

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated:FutureWarning"),
    pytest.mark.parametrize("level", ["on", "full"]),
    pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__),
]

_NUM_SEEDS = 5


def test_threads(
    program: Program, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHALANX_CHECK", level)
    with caplog.at_level(logging.WARNING, "phalanx"):
        pt.run(program, ranks=3)
        for seed in range(_NUM_SEEDS):
            pt.run(program, ranks=3, seed=seed)
    assert not caplog.messages


def test_processes(
    program: Program, level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_CHECK", level)
    pt.run(program, ranks=3, processes=True, stuck_after=30)
    # Nobody has set up logging in the ranks: warnings are printed.
    assert "group '" not in capsys.readouterr().err
