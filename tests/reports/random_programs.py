"""Random programs that are right.

A program is a list of steps, in one order for all: each rank makes its side of those that it takes part in. What is
asynchronous is waited for later, by each rank when it likes. A step never needs one that comes after it, so no schedule
makes a program hang.

Every rank has a source text of its own, in which every step has a line of its own: `rank2.py:17` tells rank and step.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from random_steps import COLLECTIVES, DTYPES, EARLY, MESSAGES, OBJECTS, Params, Spot, draw_params, write_side

import phalanx.testing as pt

__all__ = ["Abilities", "Program", "Sources", "Step", "draw_program"]

_MOST_RANKS = 5
_MOST_GROUPS = 3
_NUM_STEPS = (1, 12)
_NUM_TAGS = 3
# Elements of a message that is not sent before it is received.
_LONG = 1000


@dataclass(frozen=True)
class Step:
    kind: str
    group: int
    # Those that have a side of it, of all.
    ranks: tuple[int, ...]
    params: Params
    is_async: bool = False

    @property
    def is_message(self) -> bool:
        return self.kind in MESSAGES


@dataclass(frozen=True)
class Sources:
    """The source texts of a program, by rank. It is what runs."""

    texts: tuple[str, ...]

    def __call__(self, rank: int, world: pt.World) -> None:
        file, text = f"rank{rank}.py", self.texts[rank]
        # For those who show the line of a stack.
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        namespace: dict[str, Any] = dict(_GIVEN)
        exec(compile(text, file, "exec"), namespace)
        namespace["program"]()

    def listing(self) -> str:
        return "\n".join(
            f"--- rank{rank}.py\n" + "\n".join(f"{number:3} {line}" for number, line in enumerate(text.splitlines(), 1))
            for rank, text in enumerate(self.texts)
        )


@dataclass
class Program:
    ranks: int
    # The members of each group, in the group's order. The first one is the default group.
    groups: list[tuple[int, ...]]
    steps: list[Step]
    # The step after which a rank waits for an asynchronous one, by (step, rank).
    waits: dict[tuple[int, int], int]
    # Seconds after which calls give up, if they do.
    timeout: float | None = None
    # All ranks meet at the end, in every group: those who wait for nobody learn there what was wrong.
    meets: bool = False
    # The line of each step, by (step, rank), once written.
    lines: dict[tuple[int, int], int] = field(default_factory=dict)

    def write(self) -> Sources:
        return Sources(tuple(self._write_rank(rank) for rank in range(self.ranks)))

    def spot(self, number: int, rank: int) -> Spot:
        group = self.steps[number].group
        return Spot(self.groups[group], rank, f"g{group}", f"t{number}")

    def statement(self, number: int, rank: int) -> str:
        """A rank's line of a step."""
        step = self.steps[number]
        side = write_side(step.kind, step.params, self.spot(number, rank))
        start = f"t{number} = {side.tensors}"
        if self.is_waited_for(number):
            call = side.call if step.is_message else f"{side.call[:-1]}, async_op=True)"
            return f"{start}; w{number} = {call}"
        return f"{start}; {side.call}; {side.check}"

    def wait_statement(self, number: int, rank: int) -> str:
        step = self.steps[number]
        return f"w{number}.wait(); {write_side(step.kind, step.params, self.spot(number, rank)).check}"

    def is_waited_for(self, number: int) -> bool:
        return self.steps[number].is_async or self.steps[number].kind in EARLY

    def statements_at(self, number: int, rank: int) -> list[tuple[int, str]]:
        """What a rank does for a step, with its number, and then what it waits for."""
        made = [(number, self.statement(number, rank))] if rank in self.steps[number].ranks else []
        due = [step for (step, waiting), after in self.waits.items() if waiting == rank and after == number]
        return made + [(-1, self.wait_statement(step, rank)) for step in due]

    def _write_rank(self, rank: int) -> str:
        timeout = "" if self.timeout is None else f", timeout=seconds({self.timeout:g})"
        text = ["def program():", "    g0 = dist.group.WORLD"]
        for number, members in enumerate(self.groups[1:], 1):
            name = f"group_desc='g{number}'"
            text.append(f"    g{number} = dist.new_group({list(members)}, sort_ranks=False, {name}{timeout})")
        for number in range(len(self.steps)):
            for step, statement in self.statements_at(number, rank):
                text.append(f"    {statement}")
                if step >= 0:
                    self.lines[step, rank] = len(text)
        groups = [number for number, members in enumerate(self.groups) if self.meets and rank in members]
        text += [f"    dist.barrier(group=g{number})" for number in groups]
        return "\n".join(text) + "\n"


@dataclass(frozen=True)
class Abilities:
    """What programs may ask of a backend."""

    most_ranks: int = _MOST_RANKS
    collectives: tuple[str, ...] = COLLECTIVES
    dtypes: tuple[str, ...] = DTYPES


def draw_program(rng: random.Random, abilities: Abilities | None = None) -> Program:
    """The same one for the same numbers."""
    return _Drawing(rng, abilities or Abilities()).draw()


class _Drawing:
    def __init__(self, rng: random.Random, abilities: Abilities) -> None:
        self._rng = rng
        self._abilities = abilities
        self._ranks = rng.randint(2, abilities.most_ranks)
        self._groups = [tuple(range(self._ranks))]
        for _ in range(rng.randint(0, _MOST_GROUPS)):
            members = rng.sample(range(self._ranks), rng.randint(1, self._ranks))
            self._groups.append(tuple(members))
        self._steps: list[Step] = []
        self._partners: dict[int, int] = {}
        # Messages of which one side is still to come, as the number of the step that has the first.
        self._open: list[int] = []

    def draw(self) -> Program:
        for _ in range(self._rng.randint(*_NUM_STEPS)):
            self._draw_step()
        while self._open:
            self._close_message()
        return Program(self._ranks, self._groups, self._steps, self._draw_waits())

    def _draw_step(self) -> None:
        rng = self._rng
        if self._open and rng.random() < 0.3:
            self._close_message()
            return
        group = rng.randrange(len(self._groups))
        members = self._groups[group]
        drawn = rng.random()
        if drawn < 0.25 and len(members) > 1:
            self._draw_message(group, members)
            return
        kind = rng.choice(OBJECTS if drawn > 0.9 else self._abilities.collectives)
        # torch gives a future for a coalesced call, and futures do not keep the class of an exception.
        is_async = kind not in (*OBJECTS, "coalesced") and rng.random() < 0.35
        self._steps.append(Step(kind, group, members, draw_params(rng, members, self._abilities.dtypes), is_async))

    def _draw_message(self, group: int, members: Sequence[int]) -> None:
        rng = self._rng
        kind = rng.choice(("message", "message", "batch", "fan_in", "isend", "irecv"))
        sender, to = rng.sample(list(members), 2)
        params = draw_params(rng, members, self._abilities.dtypes) | {"sender": sender, "to": to}
        if rng.random() < 0.4:
            params["count"] = _LONG
        if kind == "fan_in":
            # A tag of its own: whoever receives from anybody would take other messages, too.
            params["tag"] = 100 + len(self._steps)
            self._steps.append(Step(kind, group, tuple(members), params))
            return
        tags = [tag for tag in range(_NUM_TAGS) if not self._is_taken(group, {sender, to}, tag)]
        if not tags:
            return
        params["tag"] = rng.choice(tags)
        if kind in EARLY:
            self._open.append(len(self._steps))
            first = (sender,) if kind == "isend" else (to,)
            self._steps.append(Step(kind, group, first, params))
        else:
            self._steps.append(Step(kind, group, (sender, to), params))

    def _is_taken(self, group: int, pair: set[int], tag: int) -> bool:
        """By a message of which one side is still to come: another one would be taken for it."""
        taken = [self._steps[number] for number in self._open]
        return any(
            (step.group, {step.params["sender"], step.params["to"]}, step.params["tag"]) == (group, pair, tag)
            for step in taken
        )

    def _close_message(self) -> None:
        number = self._open.pop(self._rng.randrange(len(self._open)))
        first = self._steps[number]
        kind = EARLY[first.kind]
        second = first.params["to" if kind == "recv" else "sender"]
        self._partners[number] = len(self._steps)
        self._steps.append(Step(kind, first.group, (second,), first.params))

    def _draw_waits(self) -> dict[tuple[int, int], int]:
        waits = {}
        for number, step in enumerate(self._steps):
            if step.is_async or step.kind in EARLY:
                first = self._partners.get(number, number)
                for rank in step.ranks:
                    waits[number, rank] = min(first + self._rng.randint(0, 6), len(self._steps) - 1)
        # In the order in which they are waited for where several are due.
        order = self._rng.sample(list(waits), len(waits))
        return {key: waits[key] for key in order}


# What the source texts use.


def _full(count: int, value: int, dtype: str) -> torch.Tensor:
    return torch.full((count,), value, dtype=getattr(torch, dtype))


def _holds(tensor: torch.Tensor, value: int) -> None:
    assert bool((tensor == value).all()), f"expected {value}, got {set(tensor.tolist())}"


def _hold(tensors: Sequence[torch.Tensor], values: Sequence[int]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        _holds(tensor, value)


def _agree(got: Any, expected: Any) -> None:
    assert got == expected, f"expected {expected}, got {got}"


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


_GIVEN = {
    "torch": torch,
    "dist": dist,
    "full": _full,
    "holds": _holds,
    "hold": _hold,
    "agree": _agree,
    "seconds": _seconds,
}
