"""Which cases each form runs, and the runner that compares the backend with the meaning of the calls.

Every reduce op of every dtype and every dtype that moves is run with no, one and an odd number of elements; a handful
also with so many that a transport has to cut them; all of them sync, and async with many in flight. Arrangement in
memory, inference mode and so on are drawn for each case, the same in every process.
"""

from __future__ import annotations

import functools
import random
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from contract_data import ARRANGEMENTS, UNCOMMON
from contract_forms import FORMS, Case, Target
from contract_methods import METHODS
from contract_oracle import Oracle, turns
from contract_pool import Member

import phalanx
from phalanx.collectives.reduction import (
    AVG,
    BXOR,
    MAX,
    MIN,
    PREMUL_SUM,
    PRODUCT,
    REDUCE_OPS,
    SUM,
)
from phalanx.types import REDUCIBLE

__all__ = ["Flight", "cases", "draw_case", "problems_of", "run_bursts", "run_cases", "run_methods", "wait_for"]

SMALL = (0, 1, 1037)
LARGE = 400_003
LARGE_BLOCK = 100_003  # where each rank has a block for every other
ALL_REDUCTIONS = [(dtype, op) for dtype, ops in REDUCE_OPS.items() for op in sorted(ops)]
SOME_REDUCTIONS = [
    (torch.float32, SUM),
    (torch.bfloat16, AVG),
    (torch.float16, PRODUCT),
    (torch.int64, MAX),
    (torch.uint8, BXOR),
    (torch.bool, SUM),
    (torch.float64, PREMUL_SUM),
    (torch.complex64, SUM),
    (torch.float8_e4m3fn, MIN),
]
SOME_DTYPES = (torch.bool, torch.int16, torch.float32, torch.complex128, torch.bfloat16, torch.int64)
REDUCES = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
HAS_IN_PLACE = ("all_gather", "all_gather single", "gather", "scatter", "reduce_scatter", "reduce_scatter single")
# The forms of which every dtype, or every reduce op of every dtype, is run; of the others some are.
THOROUGH = ("all_reduce", "reduce", "broadcast", "all_gather single", "reduce_scatter single", "all_to_all split")
# torch.distributed passes complex numbers on as such here. Elsewhere they become real ones, which rules out products
# and lazy conjugation.
AS_COMPLEX = ("reduce", "gather", "reduce_scatter")
WITH_GRAD = (torch.float32, torch.float64, torch.bfloat16)
SHOWN = 12
WINDOW = 24
# Of the cases of a form, those that methods run: one that has elements, and each so many after it. The number is prime
# to the number of counts, and of names that take turns.
FIRST_OF_METHODS, EACH_OF_METHODS = 5, 13
BURST = 40
BURST_COUNTS = (0, 1, 7, 1037, 1037, 20_011, 70_001)


@functools.cache
def cases(form: str, size: int) -> Sequence[Case]:
    return list(_cases(form, size))


def _cases(form: str, size: int) -> Iterator[Case]:
    op = form.split()[0]
    draw = random.Random(form)
    seed = 0
    for dtype, reduce_op, count in _work(form, op):
        if reduce_op == PRODUCT and dtype.is_complex and op not in AS_COMPLEX:
            continue
        # Every root is due, but not every root of every case.
        roots = [seed % size] if op in ROOTED else [-1]
        if op in ROOTED and dtype is torch.float32:
            roots = list(range(size))
        for root in roots:
            seed += 1
            inference = draw.random() < 0.15
            grad = not inference and dtype in WITH_GRAD and draw.random() < 0.15
            arrangements = (*ARRANGEMENTS, "lazy") if not grad and _may_be_lazy(op, dtype) else ARRANGEMENTS
            yield Case(
                form,
                dtype,
                count,
                reduce_op,
                root,
                into=draw.choice(arrangements),
                of=draw.choice(arrangements),
                in_place=form in HAS_IN_PLACE and draw.random() < 0.25,
                async_op=draw.random() < 0.5,
                inference=inference,
                grad=grad,
                seed=seed,
            )


def run_cases(member: Member, form: str, share: slice) -> tuple[int, list[str]]:
    """The number of cases, and what went wrong in the first of those that failed. `share` says which cases are run.

    A window of cases is started async, so that all of it is in flight at once, and run again sync, before or after
    the first ones are waited for.
    """
    return _run_windows(member, form, cases(form, member.size)[share])


def run_methods(member: Member) -> tuple[int, list[str]]:
    """The same for every form that is a method of the group: some of its cases, through the method."""
    num_cases, failures = 0, []
    for form in METHODS:
        chosen = cases(form, member.size)[FIRST_OF_METHODS::EACH_OF_METHODS]
        num, problems = _run_windows(member, form, [replace(case, by_method=True) for case in chosen])
        num_cases += num
        failures += problems
    return num_cases, failures[:SHOWN]


def _run_windows(member: Member, form: str, chosen: Sequence[Case]) -> tuple[int, list[str]]:
    warnings.simplefilter("ignore")
    draw = random.Random(f"windows of {form}")
    failures: list[str] = []
    for start in range(0, len(chosen), WINDOW):
        window = chosen[start : start + WINDOW]
        behind = draw.random() < 0.5
        member.note(f"the window of cases at {start} of {form}, sync behind async: {behind}")
        flights = [Flight(member, replace(case, async_op=True)) for case in window]
        if not behind:
            wait_for(flights, draw)
        calls = [Flight(member, replace(case, async_op=False)) for case in window]
        if behind:
            wait_for(flights, draw)
        failures += problems_of(flights, member) + problems_of(calls, member)
    member.note(f"finished all cases of {form}")
    return len(chosen), failures[:SHOWN]


def run_bursts(member: Member, forms: list[str], num_bursts: int) -> tuple[int, list[str]]:
    """Calls of several kinds right after one another, waited for in another order, and compared only in the end.

    All of every other burst is async; in the rest sync calls come between.
    """
    warnings.simplefilter("ignore")
    draw = random.Random(repr(forms))
    choices = {form: cases(form, member.size) for form in forms}
    failures: list[str] = []
    for burst in range(num_bursts):
        member.note(f"burst {burst}")
        chosen = [draw_case(draw, choices, member.size) for _ in range(BURST)]
        if burst % 2 == 0:
            chosen = [replace(case, async_op=True) for case in chosen]
        flights = [Flight(member, case) for case in chosen]
        wait_for(flights, draw)
        failures += [f"burst {burst}: {text}" for text in problems_of(flights, member)]
    return num_bursts, failures[:SHOWN]


def draw_case(draw: random.Random, choices: dict[str, Sequence[Case]], size: int) -> Case:
    """Any case of any form, of a size that suits many at once."""
    case = draw.choice(choices[draw.choice(list(choices))])
    root = draw.randrange(size) if case.root >= 0 else case.root
    return replace(case, count=draw.choice(BURST_COUNTS), root=root)


class Waitable(Protocol):
    def wait(self) -> None: ...


def wait_for(flights: Sequence[Waitable], draw: random.Random) -> None:
    for flight in draw.sample(flights, len(flights)):
        flight.wait()


class Flight:
    """A case that has been started. What it raises is kept for `problem`."""

    def __init__(self, member: Member, case: Case) -> None:
        self._member = member
        self._case = case
        self._args: list[Any] = []
        self._work: Any = None
        self._raised: str | None = None
        form = FORMS[case.form]
        try:
            with torch.inference_mode(case.inference):
                self._args = form.make(case, member.rank, member.size)
                if case.by_method:
                    group = member.process_group
                    assert isinstance(group, phalanx.ProcessGroup)
                    self._work = METHODS[case.form](group, member.rank, case, self._args)
                else:
                    self._work = form.call(case, Target(member.group, member.rank, member.size), self._args)
        except Exception:
            self._raised = traceback.format_exc()

    def wait(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except Exception:
            self._raised = traceback.format_exc()

    def problem(self) -> str | None:
        problem = self._raised
        if problem is None:
            member = self._member
            problem = Oracle(member.answers).problem(self._case, member.rank, member.size, self._args)
        return None if problem is None else f"{self._case}\n    {problem}"


def problems_of(flights: Sequence[Flight], member: Member) -> list[str]:
    """What went wrong, of each that did not do what it means."""
    problems = (flight.problem() for flight in turns(flights, member.rank, member.size))
    return [problem for problem in problems if problem is not None]


def _work(form: str, op: str) -> Iterator[tuple[torch.dtype, int, int]]:
    """(dtype, reduce op, count)"""
    thorough = form in THOROUGH
    large = LARGE if op in ("all_reduce", "reduce", "broadcast") else LARGE_BLOCK
    if op in REDUCES:
        reductions = ALL_REDUCTIONS if thorough else SOME_REDUCTIONS
        yield from ((dtype, reduce_op, count) for dtype, reduce_op in reductions for count in SMALL)
        yield from ((dtype, reduce_op, large) for dtype, reduce_op in SOME_REDUCTIONS)
    else:
        dtypes = (*REDUCIBLE, *UNCOMMON) if thorough else SOME_DTYPES
        yield from ((dtype, -1, count) for dtype in dtypes for count in SMALL)
        yield from ((dtype, -1, large) for dtype in (torch.float32, torch.uint8, torch.complex64))


def _may_be_lazy(op: str, dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64) or (dtype.is_complex and op in AS_COMPLEX)
