"""The table of wrong programs.

A wrong program is a function `(rank, world)` whose docstring is what it must print. A report begins with its first line
on each rank that must raise it, "on rank 2: ..." or "on ranks 0, 1: ...": ranks may have made different calls. What
follows is the same on all of them. An empty line separates two reports. Ranks that are in none must not raise.

In a report
    {one}      is the source line that the program marks with "# one", as in `wrong_programs.py:12, in another_op`,
    {harness}  is the line that calls the program, where a stack has it,
    {rank}     is the rank within the group,
    {call}     is the call in which the rank is told, where that depends on who comes first,
    {ended}    is how a rank is gone that has returned,
    {hash}     is any hash,
    |          begins a line that goes on with the one before.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import telling

import phalanx.testing as pt

__all__ = ["PROGRAMS", "Wrong", "wrong"]

Program = Callable[[int, pt.World], Any]

_HEAD = re.compile(r"on ranks? ([\d, ]+): (.*)")
_MARK = re.compile(r"# (\w+)$")
_CALL = re.compile(r"\] \w+(, seq \d+)?, group")
_FINDER = re.compile(r"while rank \d+ (\(global rank \d+\) )?waited")
_GROUP = re.compile(r"^  the group has ranks .*")
_HASH = re.compile(r"result [0-9a-f]{8}$")


@dataclass(frozen=True)
class Wrong:
    """A wrong program, and how it is to be run."""

    program: Program
    ranks: int
    # Of the group that the reports are about; all ranks if empty.
    members: tuple[int, ...]
    processes: bool
    level: str
    # In processes ranks may be ahead of each other: which call they have completed last is a matter of time.
    eager: bool

    @property
    def name(self) -> str:
        return self.program.__name__

    @property
    def text(self) -> str:
        return inspect.cleandoc(self.program.__doc__ or "")

    def expected(self, *, processes: bool = False) -> dict[int, list[str]]:
        """The lines that each rank must print, by rank among all."""
        known = {
            **_places(self.program),
            "harness": telling.place(),
            "ended": "left the group (it was destroyed there)" if processes else "ended",
            "call": "{call}",
            "hash": "{hash}",
        }
        found = {}
        for report in self.text.split("\n\n"):
            lines = _unfolded(report)
            heads = [head for line in lines if (head := _HEAD.fullmatch(line))]
            for head in heads:
                for rank in map(int, head[1].split(", ")):
                    known["rank"] = str(self.members.index(rank) if rank in self.members else rank)
                    found[rank] = [line.format(**known) for line in (head[2], *lines[len(heads) :])]
        return found

    def difference(
        self,
        outcome: telling.Outcome,
        *,
        processes: bool = False,
        any_order: bool = False,
        silent: Collection[int] = (),
        engine: str = "",
    ) -> str:
        """Between what ranks must print and what they raised, in words; nothing where there is none.

        With `any_order` ranks come when they like. Ranks that are `silent` could print nothing. Groups
        whose calls an `engine` carries out say so.
        """
        expected = self.expected(processes=processes)
        for rank in silent:
            expected.pop(rank, None)
        told = {rank: _told(each.text.splitlines(), expected.get(rank, [""])) for rank, each in outcome.raised.items()}
        if engine:
            for rank, lines in expected.items():
                expected[rank] = [_GROUP.sub(rf"\g<0>; {engine} carries out its calls", line) for line in lines]
        for reports in (expected, told):
            for rank, lines in reports.items():
                if any_order:
                    lines[0] = _FINDER.sub("while a rank waited", lines[0])
                if processes and self.eager:
                    reports[rank] = [line for line in lines if not line.startswith("  last completed call of ")]
        if told == expected:
            return ""
        return f"expected\n{_as_text(expected)}\n\ngot\n{_as_text(told)}"


PROGRAMS: list[Wrong] = []


def wrong(
    ranks: int = 3,
    *,
    members: tuple[int, ...] = (),
    processes: bool = True,
    level: str = "on",
    eager: bool = False,
) -> Callable[[Program], Program]:
    """Puts a program into the table. `level` is how much is compared (PHALANX_CHECK)."""

    def add(program: Program) -> Program:
        PROGRAMS.append(Wrong(program, ranks, members, processes, level, eager))
        return program

    return add


def _unfolded(report: str) -> list[str]:
    lines: list[str] = []
    for line in report.splitlines():
        if line.lstrip().startswith("| "):
            lines[-1] += " " + line.lstrip().removeprefix("| ")
        else:
            lines.append(line)
    return lines


def _places(program: Program) -> dict[str, str]:
    """The marked lines, as seen from the folder of the file."""
    source, first = inspect.getsourcelines(program)
    file = Path(inspect.getfile(program)).name
    marks = [(mark[1], number) for number, line in enumerate(source, first) if (mark := _MARK.search(line))]
    return {mark: f"{file}:{number}, in {program.__name__}" for mark, number in marks}


def _told(lines: list[str], expected: list[str]) -> list[str]:
    """Without what depends on who comes first, or on the run."""
    head = lines[0].replace("the group is broken: ", "")
    if "{call}" in expected[0]:
        head = _CALL.sub("] {call}, group", head)
    return [head, *(_HASH.sub("result {hash}", line) for line in lines[1:])]


def _as_text(reports: dict[int, list[str]]) -> str:
    return "\n".join(f"on rank {rank}: " + "\n".join(lines) for rank, lines in sorted(reports.items())) or "nothing"
