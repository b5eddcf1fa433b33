"""Random programs: those that are right never raise, and of those with one fault it is found and named."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import random_steps
from examples import NUMBERS, SEEDS, examples, programs
from random_faults import KINDS, FaultyProgram, draw_fault
from random_oracle import Judge
from random_programs import Program, Sources, draw_program
from random_steps import COLLECTIVES, MESSAGES, OBJECTS, REDUCING
from telling import Outcome, run_telling

import phalanx.testing as pt

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated:FutureWarning")

_NUM_PROGRAMS = 200
_NUM_FAULTY = 3  # of each kind, with and without a timeout
_PROCESS_SEEDS = range(10_000, 10_010)
# Seconds: of the run's own time where ranks are threads.
_TIMEOUT = 60
_TIMEOUT_OF_PROCESSES = 5
# A report of processes waits only so long for a rank that is late, which on a busy machine any rank may be.
_LATE = "had not made this call"
_MOST_ATTEMPTS = 5


def _run_in_threads(program: Program, seed: int) -> None:
    sources = program.write()
    try:
        pt.run(sources, program.ranks, schedule="random", seed=seed)
    except Exception as error:
        error.add_note(f"schedule {seed}\n{sources.listing()}")
        raise


def test_right_programs_in_threads() -> None:
    seen: Counter[str] = Counter()

    @examples(_NUM_PROGRAMS)
    @hypothesis.given(programs(), SEEDS)
    def run(program: Program, seed: int) -> None:
        seen.update(step.kind for step in program.steps)
        seen["asynchronous"] += sum(step.is_async for step in program.steps)
        seen["groups"] += len(program.groups) - 1
        _run_in_threads(program, seed)

    run()
    missing = [kind for kind in (*COLLECTIVES, *OBJECTS, *MESSAGES, "asynchronous", "groups") if not seen[kind]]
    assert not missing, f"never drawn: {missing}"


def test_a_program_that_fails_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """To one call of two ranks, where what a maximum is to be is wrong."""
    monkeypatch.setattr(random_steps, "max", lambda values: 0, raising=False)
    failed: list[Program] = []

    @examples(_NUM_PROGRAMS)
    @hypothesis.given(programs(), SEEDS)
    def run(program: Program, seed: int) -> None:
        try:
            _run_in_threads(program, seed)
        except Exception:
            failed.append(program)
            raise

    with pytest.raises(AssertionError, match="expected 0, got") as caught:
        run()
    (step,) = failed[-1].steps
    assert failed[-1].ranks == 2
    assert step.kind in REDUCING
    assert step.params["reduce_op"] == "MAX"
    # What is told is the smallest one.
    assert any("rank1.py" in note and "MAX" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("seed", _PROCESS_SEEDS)
def test_right_programs_in_processes(seed: int) -> None:
    program = draw_program(random.Random(seed))
    program.timeout = _TIMEOUT_OF_PROCESSES
    sources = program.write()
    try:
        pt.run(sources, program.ranks, processes=True, timeout=timedelta(seconds=_TIMEOUT_OF_PROCESSES))
    except Exception as error:
        error.add_note(sources.listing())
        raise


def _faulty_programs(kind: str, first_seed: int) -> Iterator[tuple[int, FaultyProgram]]:
    """Not every program has a place for every fault."""
    seed = first_seed
    while True:
        program = draw_fault(draw_program(random.Random(seed)), kind, random.Random(seed))
        if program is not None:
            yield seed, program
        seed += 1


def _check(program: FaultyProgram, sources: Sources, outcome: Outcome, seed: int, *, processes: bool = False) -> None:
    complaints = list(Judge(program, outcome, processes=processes).complaints())
    if complaints:
        assert program.fault is not None
        said = "\n".join(f"--- on rank {rank}: {each.text}" for rank, each in outcome.raised.items())
        where = f"seed {seed}, {program.fault.describe(program)}, line {program.fault_line}, groups {program.groups}"
        pytest.fail("\n".join([*complaints, where, f"first: {outcome.first!r}", said, sources.listing()]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout", [None, _TIMEOUT], ids=["for ever", "with a timeout"])
def test_faults_in_threads(kind: str, timeout: int | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    folders = (tmp_path / str(number) for number in itertools.count())

    @examples(_NUM_FAULTY)
    @hypothesis.given(programs(), NUMBERS, SEEDS)
    def run(right: Program, rng: random.Random, seed: int) -> None:
        program = draw_fault(right, kind, rng)
        # Not every program has a place for every fault.
        hypothesis.assume(program is not None)
        assert program is not None
        program.timeout = timeout
        sources = program.write()
        outcome = run_telling(sources, program.ranks, next(folders), schedule="random", seed=seed, **options)
        _check(program, sources, outcome, seed)

    run()


@pytest.mark.parametrize("kind", ["op", "count", "root", "message dtype", "exception", "return"])
def test_faults_in_processes(kind: str, tmp_path: Path) -> None:
    seed, program = next(_faulty_programs(kind, 10_000))
    program.timeout, program.meets = _TIMEOUT_OF_PROCESSES, True
    sources = program.write()
    for attempt in range(_MOST_ATTEMPTS):
        timeout = timedelta(seconds=_TIMEOUT_OF_PROCESSES)
        outcome = run_telling(sources, program.ranks, tmp_path / str(attempt), processes=True, timeout=timeout)
        if not any(_LATE in each.text for each in outcome.raised.values()):
            break
    _check(program, sources, outcome, seed, processes=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_sees_what_is_wrong(kind: str, tmp_path: Path) -> None:
    """Of a report about another line or rank than that of the fault, and of silence."""
    _, program = next(each for each in _faulty_programs(kind, 20_000) if each[1].ranks > 3)
    outcome = run_telling(program.write(), program.ranks, tmp_path / "run")
    fault = program.fault
    assert fault is not None
    assert not list(Judge(program, outcome).complaints())
    assert list(Judge(program, Outcome(None, {})).complaints()) == ["the fault was not found"]
    if kind == "return":
        other = replace(program, fault=replace(fault, rank=(fault.rank + 1) % program.ranks))
        assert list(Judge(other, outcome).complaints())
    elif kind not in ("left out", "extra"):
        other = replace(program, fault_line=program.fault_line + 1)
        assert list(Judge(other, outcome).complaints())
