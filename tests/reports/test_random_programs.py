"""Random programs: those that are right never raise, and of those with one fault it is found and named."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from random_faults import KINDS, FaultyProgram, draw_fault
from random_oracle import Judge
from random_programs import Sources, draw_program
from random_steps import COLLECTIVES, MESSAGES, OBJECTS
from telling import Outcome, run_telling

import phalanx.testing as pt

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated:FutureWarning")

_NUM_PARTS = 10
_NUM_PROGRAMS = 200  # a part
_NUM_FAULTY = 30  # of each kind
_PROCESS_SEEDS = range(10_000, 10_010)
# Seconds: of the run's own time where ranks are threads.
_TIMEOUT = 60
_TIMEOUT_OF_PROCESSES = 5
# A report of processes waits only so long for a rank that is late, which on a busy machine any rank may be.
_LATE = "had not made this call"
_MOST_ATTEMPTS = 5


@pytest.mark.parametrize("part", range(_NUM_PARTS))
def test_right_programs_in_threads(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part * _NUM_PROGRAMS, (part + 1) * _NUM_PROGRAMS):
        program = draw_program(seed)
        sources = program.write()
        seen.update(step.kind for step in program.steps)
        seen["asynchronous"] += sum(step.is_async for step in program.steps)
        seen["groups"] += len(program.groups) - 1
        try:
            pt.run(sources, program.ranks, schedule="random", seed=seed)
        except Exception as error:
            error.add_note(f"seed {seed}\n{_listing(sources)}")
            raise
    missing = [kind for kind in (*COLLECTIVES, *OBJECTS, *MESSAGES, "asynchronous", "groups") if not seen[kind]]
    assert not missing, f"never drawn: {missing}"


@pytest.mark.parametrize("seed", _PROCESS_SEEDS)
def test_right_programs_in_processes(seed: int) -> None:
    program = draw_program(seed)
    program.timeout = _TIMEOUT_OF_PROCESSES
    sources = program.write()
    try:
        pt.run(sources, program.ranks, processes=True, timeout=timedelta(seconds=_TIMEOUT_OF_PROCESSES))
    except Exception as error:
        error.add_note(_listing(sources))
        raise


def _faulty_programs(kind: str, first_seed: int) -> Iterator[tuple[int, FaultyProgram]]:
    """Not every program has a place for every fault."""
    seed = first_seed
    while True:
        program = draw_fault(draw_program(seed), kind, random.Random(seed))
        if program is not None:
            yield seed, program
        seed += 1


def _check(program: FaultyProgram, sources: Sources, outcome: Outcome, seed: int, *, processes: bool = False) -> None:
    complaints = list(Judge(program, outcome, processes=processes).complaints())
    if complaints:
        assert program.fault is not None
        said = "\n".join(f"--- on rank {rank}: {each.text}" for rank, each in outcome.raised.items())
        where = f"seed {seed}, {program.fault.describe(program)}, line {program.fault_line}, groups {program.groups}"
        pytest.fail("\n".join([*complaints, where, f"first: {outcome.first!r}", said, _listing(sources)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("timeout", [None, _TIMEOUT], ids=["for ever", "with a timeout"])
def test_faults_in_threads(kind: str, timeout: int | None, tmp_path: Path) -> None:
    programs = _faulty_programs(kind, 0 if timeout is None else 5_000)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    for _ in range(_NUM_FAULTY // 2):
        seed, program = next(programs)
        program.timeout = timeout
        sources = program.write()
        outcome = run_telling(sources, program.ranks, tmp_path / str(seed), schedule="random", seed=seed, **options)
        _check(program, sources, outcome, seed)


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


def _listing(sources: Sources) -> str:
    return "\n".join(
        f"--- rank{rank}.py\n" + "\n".join(f"{number:3} {line}" for number, line in enumerate(text.splitlines(), 1))
        for rank, text in enumerate(sources.texts)
    )
