"""Which cases each form runs, and the runner that compares the backend with the meaning of the calls.

Every reduce op of every dtype and every dtype that moves is run with no, one and an odd number of elements; a handful
also with so many that a transport has to cut them. Arrangement in memory, sync or async, inference mode and so on are
drawn for each case, the same in every process.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from contract_data import ARRANGEMENTS, UNCOMMON, difference
from contract_forms import FORMS, Case, Target
from contract_pool import Member
from torch import Tensor

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
from phalanx.types import DTYPE_CODES, GroupInfo

__all__ = ["cases", "run_bursts", "run_cases"]

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
BURST = 40
BURST_COUNTS = (0, 1, 7, 1037, 1037, 20_011, 70_001)


def cases(form: str, size: int) -> Iterator[Case]:
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


def run_cases(member: Member, form: str) -> tuple[int, list[str]]:
    """The number of cases, and what went wrong in the first of those that failed."""
    warnings.simplefilter("ignore")
    num_cases = 0
    failures: list[str] = []
    for case in cases(form, member.size):
        num_cases += 1
        member.note(str(case))
        try:
            args, work = _start(member, case)
            if work is not None:
                work.wait()
            problem = _check(member, case, args)
        except Exception:
            problem = traceback.format_exc()
        if problem is not None and len(failures) < SHOWN:
            failures.append(f"{case}\n    {problem}")
    member.note(f"finished all cases of {form}")
    return num_cases, failures


def run_bursts(member: Member, forms: list[str], num_bursts: int) -> tuple[int, list[str]]:
    """Calls of several kinds right after one another, waited for in another order, and compared only in the end."""
    warnings.simplefilter("ignore")
    draw = random.Random(repr(forms))
    choices = {form: list(cases(form, member.size)) for form in forms}
    failures: list[str] = []
    for burst in range(num_bursts):
        member.note(f"burst {burst}")
        chosen = []
        for _ in range(BURST):
            case = draw.choice(choices[draw.choice(forms)])
            root = draw.randrange(member.size) if case.root >= 0 else case.root
            chosen.append(replace(case, count=draw.choice(BURST_COUNTS), root=root))
        started = [(case, *_start(member, case)) for case in chosen]
        for _, _, work in draw.sample(started, len(started)):
            if work is not None:
                work.wait()
        for place, (case, args, _) in enumerate(started):
            problem = _check(member, case, args)
            if problem is not None and len(failures) < SHOWN:
                failures.append(f"call {place} of burst {burst}: {case}\n    {problem}")
    return num_bursts, failures


def _work(form: str, op: str) -> Iterator[tuple[torch.dtype, int, int]]:
    """(dtype, reduce op, count)"""
    thorough = form in THOROUGH
    large = LARGE if op in ("all_reduce", "reduce", "broadcast") else LARGE_BLOCK
    if op in REDUCES:
        reductions = ALL_REDUCTIONS if thorough else SOME_REDUCTIONS
        yield from ((dtype, reduce_op, count) for dtype, reduce_op in reductions for count in SMALL)
        yield from ((dtype, reduce_op, large) for dtype, reduce_op in SOME_REDUCTIONS)
    else:
        dtypes = (*DTYPE_CODES, *UNCOMMON) if thorough else SOME_DTYPES
        yield from ((dtype, -1, count) for dtype in dtypes for count in SMALL)
        yield from ((dtype, -1, large) for dtype in (torch.float32, torch.uint8, torch.complex64))


def _may_be_lazy(op: str, dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64) or (dtype.is_complex and op in AS_COMPLEX)


def _start(member: Member, case: Case) -> tuple[list[Any], Any]:
    """The arguments, and what has to be waited for before they are looked at."""
    form = FORMS[case.form]
    with torch.inference_mode(case.inference):
        args = form.make(case, member.rank, member.size)
        return args, form.call(case, Target(member.group, member.rank, member.size), args)


def _check(member: Member, case: Case, args: list[Any]) -> str | None:
    form = FORMS[case.form]
    ranks = range(member.size)
    with torch.inference_mode(case.inference):
        everyones = [form.make(case, rank, member.size) for rank in ranks]
        calls = [form.build(case, GroupInfo("oracle", rank, member.size), everyones[rank]) for rank in ranks]
        calls[0].meaning(calls)
        for i, (got, expected) in enumerate(zip(_flatten(args), _flatten(everyones[member.rank]), strict=True)):
            problem = difference(got, expected, nan_is_nan=case.reduce_op >= 0)
            if problem is not None:
                return f"tensor {i} of the arguments: {problem}"
    return None


def _flatten(args: Any) -> Iterator[Tensor]:
    if isinstance(args, list):
        for arg in args:
            yield from _flatten(arg)
    elif args is not None:
        yield args
