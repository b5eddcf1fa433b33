"""One fault in a random program: on one rank, at one step.

Only faults that can be found are drawn. Not among them, since nobody can know:
- a short message that is not received: its send is done when it is handed over;
- a rank that returns early and that nobody waits for afterwards;
- anything in a group of one rank.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, fields, replace
from typing import Any

from random_programs import Program, Sources, Step
from random_steps import COLLECTIVES, DTYPES, MESSAGES, OBJECTS, REDUCE_OPS, REDUCING, ROOTED, Params, write_side

__all__ = ["DISAGREEMENTS", "INJECTED", "KINDS", "Fault", "FaultyProgram", "draw_fault"]

# Those of a step that a rank makes otherwise, and those after which it is out of step or gone.
DISAGREEMENTS = ("op", "dtype", "count", "root", "reduce_op")
KINDS = (*DISAGREEMENTS, "message dtype", "message count", "left out", "extra", "exception", "return")

INJECTED = "LookupError: injected"
_INLINE_BYTES = 1984


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    # The step, or the one before which something happens.
    step: int
    # What the rank does instead.
    instead: Step | None = None
    # What it does before.
    statement: str = ""

    def describe(self, program: Program) -> str:
        return f"{self.kind} on rank {self.rank}, step {self.step} ({program.steps[self.step].kind})"


@dataclass
class FaultyProgram(Program):
    """Nothing is said of results: what meets the wrong call may get anything."""

    fault: Fault | None = None
    # The line of the fault, once written.
    fault_line: int = 0

    def write(self) -> Sources:
        sources = super().write()
        assert self.fault is not None
        self.fault_line = self.lines.get((self.fault.step, self.fault.rank), 0)
        return sources

    def statement(self, number: int, rank: int) -> str:
        fault = self.fault
        if fault is not None and (number, rank) == (fault.step, fault.rank) and fault.instead is not None:
            other = copy.copy(self)
            other.fault = None
            other.steps = [*self.steps[:number], fault.instead, *self.steps[number + 1 :]]
            return other.statement(number, rank)
        return _without_check(super().statement(number, rank))

    def wait_statement(self, number: int, rank: int) -> str:
        return f"w{number}.wait()"

    def statements_at(self, number: int, rank: int) -> list[tuple[int, str]]:
        fault = self.fault
        assert fault is not None
        statements = super().statements_at(number, rank)
        if rank != fault.rank:
            return statements
        if fault.kind == "left out":
            gone = (f"t{fault.step} =", f"w{fault.step}.")
            return [each for each in statements if not each[1].startswith(gone)]
        if number == fault.step and fault.statement:
            return [(number, fault.statement), *((-1 if step == number else step, text) for step, text in statements)]
        return statements


def _without_check(statement: str) -> str:
    """A check is what comes after the call, if that is done by then."""
    tensors, call, *_ = statement.split("; ")
    return f"{tensors}; {call}"


def draw_fault(program: Program, kind: str, rng: random.Random) -> FaultyProgram | None:
    """The program with a fault of that kind; None where there is no place for one."""
    faults = [fault for step in range(len(program.steps)) for fault in _faults_at(program, step, kind, rng)]
    if not faults:
        return None
    fault = rng.choice(faults)
    given = {each.name: getattr(program, each.name) for each in fields(program) if each.name != "lines"}
    return FaultyProgram(**given, fault=fault)


def _faults_at(program: Program, number: int, kind: str, rng: random.Random) -> list[Fault]:
    step = program.steps[number]
    if len(program.groups[step.group]) == 1:
        return []
    rank = rng.choice(step.ranks)
    if kind in ("exception", "return"):
        statement = "raise LookupError('injected')" if kind == "exception" else "return"
        is_missed = any(_needs(program, later, rank) for later in range(number, len(program.steps)))
        return [Fault(kind, rank, number, statement=statement)] if is_missed else []
    if kind == "extra":
        return [Fault(kind, rank, number, statement=_extra(program, number, rank, rng))]
    if kind == "left out":
        return [Fault(kind, rank, number)] if _needs(program, number, rank) else []
    if kind.startswith("message "):
        other = _other_params(step, kind.removeprefix("message "), rank, rng) if step.is_message else None
    else:
        other = None if step.is_message or step.kind in OBJECTS else _other(step, kind, rank, rng)
    return [] if other is None else [Fault(kind, rank, number, instead=other)]


def _needs(program: Program, number: int, rank: int) -> bool:
    """Whether somebody waits for the rank in a step."""
    step = program.steps[number]
    if rank not in step.ranks or len(program.groups[step.group]) == 1:
        return False
    receives = step.kind in ("message", "recv", "irecv", "fan_in") and rank == step.params["to"]
    return not receives or not _is_short(step)


def _is_short(step: Step) -> bool:
    """Whether the message is sent when it is handed over."""
    width = {"float32": 4, "float64": 8, "int32": 4, "int16": 2}[step.params["dtype"]]
    return bool(step.params["count"] * width <= _INLINE_BYTES)


def _extra(program: Program, number: int, rank: int, rng: random.Random) -> str:
    """A call that the others do not make: the step's own once more, or one that is like no other."""
    step = program.steps[number]
    if step.kind in COLLECTIVES and rng.random() < 0.5:
        side = write_side(step.kind, step.params, program.spot(number, rank))
        return f"t{number} = {side.tensors}; {side.call}"
    return f"dist.all_reduce(full(7, 1, 'float64'), group=g{step.group})"


def _other(step: Step, kind: str, rank: int, rng: random.Random) -> Step | None:
    """The step as another one, of the same call otherwise."""
    if kind == "op":
        kinds = [other for other in ("barrier", "all_reduce", "broadcast", "all_to_all_single") if other != step.kind]
        # The same op in another form.
        if step.kind in ("coalesced", "all_to_all", "all_to_all_uneven"):
            kinds = ["barrier"]
        return replace(step, kind=rng.choice(kinds))
    return _other_params(step, kind, rank, rng)


def _other_params(step: Step, kind: str, rank: int, rng: random.Random) -> Step | None:
    params: Params = copy.deepcopy(step.params)
    choices: tuple[Any, ...] = ()
    if kind == "dtype" and step.kind != "barrier":
        choices = DTYPES
    elif kind == "root" and step.kind in ROOTED:
        choices = step.ranks
    elif kind == "reduce_op" and step.kind in REDUCING:
        choices = REDUCE_OPS
    elif kind == "count" and step.kind != "barrier":
        choices = (params["count"], params["count"] + 1)
    choices = tuple(each for each in choices if each != params[kind])
    if not choices:
        return None
    params[kind] = rng.choice(choices)
    if kind == "count" and step.kind not in MESSAGES:
        # Where sizes are a list: of what another rank has. A rank sees for itself whether its own fit.
        peer = rng.choice([each for each in step.ranks if each != rank])
        params["sizes"][step.ranks.index(peer)] += 1
        params["matrix"][step.ranks.index(rank)][step.ranks.index(peer)] += 1
    return replace(step, params=params)
