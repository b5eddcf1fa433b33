"""Wrong programs on guarded Gloo print the reports that they print on groups of our own.

Gloo ends a process with SIGABRT when it gets more bytes than it expects, which may happen before all ranks have come to
the call. The other ranks print the report all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import guarded_gloo
import pytest
import telling
from telling import run_telling
from test_wrong_programs import LATE, MODULES, MOST_ATTEMPTS
from wrong_table import PROGRAMS, Wrong

import phalanx

# They have put their programs into the table.
assert MODULES

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated:FutureWarning")

# Programs of which Gloo refuses a call. A guard posts a call before Gloo looks at its arguments, so the call counts as
# made. These are the reports then; a rank whose call was refused may raise Gloo's own error instead.
_REFUSED_BY_GLOO = {
    "an_invalid_call": r"\[MISMATCH:COUNT\] all_gather, seq 1, .*rank 2: all_gather\(elements of float32\)  <--",
    "another_dtype_to_exchange": r"\[MISMATCH:DTYPE\] all_to_all, seq 1, .*rank 0: .* of int16\)  <-- int16",
    "another_list_to_gather_on_all": r"\[MISMATCH:SHAPE\] all_gather, seq 1, .*sizes 2, 1, 3\)  <-- sizes 2, 1, 3",
    "a_refused_call_and_another_one": r"\[MISMATCH:COUNT\] all_gather, seq 2, .*rank 1: all_gather\(.*  <--",
    "calls_that_most_ranks_refused": r"\[(MISMATCH:COUNT|PEER_LOST)\] all_reduce, seq 1, .*ranks? 1",
    "a_refused_call_and_an_early_return": r"\[MISMATCH:ROOT\] broadcast, seq 1, .*rank 1: .*  <-- root 7",
    "a_refused_call_and_a_group_that_is_destroyed": r"\[MISMATCH:COUNT\] reduce_scatter, .*rank 1: .*\(SUM, elements",
    "a_refused_call_and_another_exception": r"\[MISMATCH:REDUCE_OP\] all_reduce, seq 1, .*rank 1: .*  <-- BAND",
    "a_refused_call_within_a_smaller_group": r"\[MISMATCH:ROOT\] broadcast, .*group 'columns', .*rank 1: .*<-- root 3",
    "a_refused_send_and_another_one": r"\[PEER_LOST\] recv, seq 1, .*rank 1 left the group",
    "a_refused_receive_and_an_early_return": r"\[PEER_LOST\] send, seq 1, .*rank 1: RuntimeError: Tag must be",
    "a_refused_call_that_went_on": r"\[MISMATCH:REDUCE_OP\] all_reduce, seq 1, .*rank 1: .*  <-- BAND",
}
# Splits are compared by what they add up to. So the report shows those of all ranks, and not the two that do not fit.
_SPLITS = {
    "splits_that_do_not_fit": r"\[MISMATCH:SPLITS\] all_to_all, seq 1, .*rank 1: all_to_all\(.*, sizes 1, 2, 2\)",
    "lists_that_do_not_fit": r"\[MISMATCH:SPLITS\] all_to_all, seq 1, .*rank 2: all_to_all\(.*, sizes 4, 2, 2\)",
    "splits_within_a_smaller_group": r"\[MISMATCH:SPLITS\] all_to_all, seq 1, group 'columns', .*, sizes 1, 2\)",
}
_OTHER_REPORTS = _REFUSED_BY_GLOO | _SPLITS
# Programs that are not run, and why.
_LEFT_OUT = {
    "nothing_to_reduce": "Gloo ends a call without elements at once: that rank may be through when the others come",
    "a_sender_that_is_ahead": "Gloo's send waits for the receive: the ranks wait for each other",
    "a_sender_that_is_ahead_and_meets_the_others": "Gloo's send waits for the receive: the ranks wait for each other",
    "a_message_from_anybody": "the sender is known when Gloo has received; Gloo ends the process before",
    "groups_mixed_up": "who finds a difference raises at once: a rank that makes no further call is lost to the others",
}
# Gloo may not have ended the call before the wrong one when the difference is found.
_UNFINISHED = {"an_asynchronous_call", "another_way_back"}


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports name files as seen from the working folder."""
    monkeypatch.chdir(Path(__file__).parent)


def _param(wrong: Wrong) -> object:
    return pytest.param(wrong, id=wrong.name)


def _run(wrong: Wrong, folder: Path) -> telling.Outcome:
    for attempt in range(MOST_ATTEMPTS):
        one = folder / str(attempt)
        outcome = run_telling(wrong.program, wrong.ranks, one, processes=True, start=guarded_gloo.guarded)
        if LATE in wrong.text or not any(LATE in each.text for each in outcome.raised.values()):
            break
    return outcome


def _with_same_reports() -> Iterator[Wrong]:
    for one in PROGRAMS:
        if one.processes and one.name not in _LEFT_OUT and one.name not in _OTHER_REPORTS:
            yield replace(one, eager=one.eager or one.name in _UNFINISHED)


@pytest.mark.parametrize("wrong", [_param(wrong) for wrong in _with_same_reports()])
def test_the_report_is_the_same(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CHECK", wrong.level)
    outcome = _run(wrong, tmp_path)
    silent = _ended_by_gloo(outcome)
    difference = wrong.difference(outcome, processes=True, any_order=True, silent=silent, engine="gloo")
    assert not difference, f"{difference}\n{outcome.first!r} {getattr(outcome.first, '__notes__', '')}"


@pytest.mark.parametrize("wrong", [_param(wrong) for wrong in PROGRAMS if wrong.name in _OTHER_REPORTS])
def test_another_report(wrong: Wrong, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CHECK", wrong.level)
    reports = 0
    for one in _run(wrong, tmp_path).raised.values():
        if not isinstance(one.error, phalanx.PhalanxError):
            assert type(one.error) in (RuntimeError, NotImplementedError, TypeError), one.text
            continue
        reports += 1
        assert re.match(_OTHER_REPORTS[wrong.name], one.text, re.DOTALL), one.text
    assert reports > 0


def test_the_tables() -> None:
    names = {wrong.name for wrong in PROGRAMS if wrong.processes}
    assert names >= {*_OTHER_REPORTS, *_LEFT_OUT, *_UNFINISHED}
    assert len(list(_with_same_reports())) > 50


def _ended_by_gloo(outcome: telling.Outcome) -> set[int]:
    text = "\n".join([str(outcome.first), *getattr(outcome.first, "__notes__", [])])
    return {int(rank) for rank in re.findall(r"rank (\d+) was killed by SIGABRT", text)}
