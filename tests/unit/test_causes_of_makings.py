"""What a report calls the earliest cause where ranks died, ended or did not come while a group was made."""

from __future__ import annotations

from typing import Any

import pytest
from boxes import Call, making
from jobs import ALL_IS_WELL, SIX, process, report

from phalanx._native import UNKNOWN_STATUS
from phalanx.debug.job import Process
from phalanx.debug.records import DIED, ENDED_WELL, FAILED

SIGKILL, SIGTERM = 9, 15
EXIT_1, EXIT_3 = 1 << 8, 3 << 8
NOT_COME = "it had not begun new_group, of group '1', for which ranks 0, 1 waited"
ENDED: dict[str, Any] = {"size": 3, "ending": FAILED, "how": 1, "status": EXIT_1}


def _cause(*processes: Process) -> str:
    return next(line for line in report(*processes) if line.startswith("Earliest cause: ")).partition(": ")[2]


def _failed(failure: str | None, blamed: int = -1, **fields: object) -> Call:
    return making(**({"state": "failed", "failure": failure, "blamed": blamed, "at": 2.0, "took": 1.0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "said"),
    [(SIGKILL, "was killed by SIGKILL"), (0, "left early with exit code 0"), (EXIT_3, "left early with exit code 3")],
)
def test_survivors_that_exit_with_a_code_of_their_own(status: int, said: str) -> None:
    lost = _failed("lost", 2)
    assert _cause(
        process(0, *SIX, lost, **ENDED, ended_at=3.1, deaths=[(2.9, 102, 1, status, 2)]),
        process(1, *SIX, lost, **ENDED, ended_at=3.05),
        process(2, *SIX, size=3, ending=DIED),
    ) == (f"rank 2 (pid 102) {said}; {NOT_COME}")


def test_the_lines_of_a_group_that_was_not_made() -> None:
    lost = _failed("lost", 2)
    lines = report(
        process(0, *SIX, lost, **ENDED, ended_at=3.1, deaths=[(2.9, 102, 1, SIGKILL, 2)]),
        process(1, *SIX, lost, **ENDED, ended_at=3.05),
        process(2, *SIX, size=3, ending=DIED),
    )
    assert lines[3:6] == [
        "group '1', ranks 0, 1, 2",
        "  ranks 0, 1: failed in new_group, after 1.0 s, at train.py:20, in main",
        "  rank 2: has not come",
    ]


def test_a_rank_whose_box_is_gone_or_that_never_had_one() -> None:
    """Its death is in the boxes of those who saw it."""
    lost = _failed("lost", 2)
    lines = report(
        process(0, lost, **ENDED, ended_at=3.1, deaths=[(2.9, 102, 1, SIGKILL, 2)]),
        process(1, lost, **ENDED, ended_at=3.05),
    )
    assert lines[:2] == ["job: 3 ranks, 1 killed by SIGKILL, 2 failed", "  rank 2 (pid 102): killed by SIGKILL"]
    assert lines[-1] == f"Earliest cause: rank 2 (pid 102) was killed by SIGKILL; {NOT_COME}"


def test_a_rank_that_left_its_groups_in_order_and_was_killed_then() -> None:
    lost = _failed("lost", 2)
    assert _cause(
        process(0, *SIX, lost, **ENDED, ended_at=3.1, deaths=[(2.9, 102, 1, SIGKILL, 2)]),
        process(1, *SIX, lost, **ENDED, ended_at=3.05),
        process(2, *SIX, size=3, ending=ENDED_WELL),
    ) == (f"rank 2 (pid 102) was killed by SIGKILL; {NOT_COME}")


def test_a_rank_that_ends_for_a_reason_of_its_own_in_the_making() -> None:
    """The others hear of it before its process has begun to end."""
    left = _failed("left", 2)
    assert (
        _cause(
            process(0, *SIX, left, **ENDED, ended_at=3.1),
            process(1, *SIX, left, **ENDED, ended_at=3.05),
            process(2, *SIX, _failed(None, took=0.9), size=3, ending=ENDED_WELL, ended_at=3.2, how=1, status=0),
        )
        == "rank 2 (pid 102) left early with exit code 0 in new_group, of group '1', which then failed on ranks 0, 1"
    )


def test_a_rank_that_leaves_its_groups_instead_of_making_one() -> None:
    left = _failed("left", 2)
    assert _cause(
        process(0, *SIX, left, **ENDED, ended_at=3.1),
        process(1, *SIX, left, **ENDED, ended_at=3.05),
        process(2, *SIX, size=3),
    ).startswith(f"rank 2 (pid 102) left the group early; {NOT_COME}")


def test_a_making_that_gave_up() -> None:
    gave_up = _failed("timeout", took=5.0, timeout_ms=5000)
    assert _cause(
        process(0, *SIX, gave_up, **ENDED, ended_at=7.1),
        process(1, *SIX, gave_up, **ENDED, ended_at=7.2),
        process(2, *SIX, size=3, ending=DIED),
    ) == (f"rank 2 (pid 102) was still running; {NOT_COME} until their timeout")


def test_ranks_that_failed_to_meet_and_met_when_they_tried_again() -> None:
    """Also in another store, where meetings are counted from 1 again."""
    gave_up, met = _failed("timeout", took=0.5), making(1, at=4.0)
    assert report(process(0, *SIX, gave_up, met), process(1, *SIX, met))[-1] == ALL_IS_WELL
    assert _cause(
        process(0, *SIX, gave_up, met, deaths=[(5.0, 101, 1, SIGKILL)]), process(1, *SIX, met, ending=DIED)
    ).startswith("rank 1 (pid 101) was killed by SIGKILL; its last completed call is all_reduce, seq 6")


def test_ranks_that_make_different_groups() -> None:
    """The error of a rank says more than the boxes do."""
    refused = _failed("mismatch")
    assert _cause(
        process(0, *SIX, refused, ending=FAILED, ended_at=3.1, how=3, exception="GroupError: [GROUP:RANKS] …"),
        process(1, *SIX, refused, ending=FAILED, ended_at=3.2, how=3, exception="GroupError: [GROUP:RANKS] …"),
    ).startswith("rank 0 (pid 100) raised GroupError: [GROUP:RANKS] …")


def test_a_rank_that_was_ended_by_a_launcher_after_it_had_left_in_order() -> None:
    """Its end began before the exit of the rank that failed, and its SIGTERM came after that."""
    assert _cause(
        process(0, *SIX, size=3, ending=DIED, deaths=[(3.0, 101, 1, EXIT_3), (3.1, 102, 1, SIGTERM)]),
        process(1, *SIX, size=3, ending=DIED),
        process(2, *SIX, size=3, ending=ENDED_WELL, ended_at=2.9, how=1, status=0),
    ).startswith("rank 1 (pid 101) left early with exit code 3; its last completed call is all_reduce, seq 6")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (SIGKILL, "rank 1 (pid 101) was killed by SIGKILL"),
        (0, "rank 0 (pid 100) raised ValueError: wrong"),
        (UNKNOWN_STATUS, "rank 0 (pid 100) raised ValueError: wrong"),
    ],
)
def test_a_rank_that_left_in_order_and_then_ended(status: int, said: str) -> None:
    """By os._exit, say: it is not the cause of what another rank does later. A rank that was killed may be."""
    raised: dict[str, Any] = {"ending": FAILED, "how": 2, "exception": "ValueError: wrong", "ended_at": 5.0}
    cause = _cause(process(0, *SIX, **raised, deaths=[(4.0, 101, 1, status, 1)]), process(1, *SIX, ending=ENDED_WELL))
    assert cause.startswith(said)
