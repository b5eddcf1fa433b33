"""Runs programs whose ranks fail, and keeps what each of them raised."""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import phalanx.testing as pt

__all__ = ["Outcome", "Raised", "Running", "Start", "place", "run_telling"]

# Seconds of real time, where ranks are processes: a program that hangs is to fail and not to block the suite.
_PATIENCE = 30

Program = Callable[[int, pt.World], Any]
Start = Callable[[int, pt.World], AbstractContextManager[None]]


@dataclass
class Raised:
    """What a rank raised."""

    error: BaseException

    @property
    def text(self) -> str:
        """As Python prints it; of our own errors without the class, which their code says."""
        return str(self.error) if hasattr(self.error, "code") else f"{type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Running:
    """A program that runs with a default group of its own."""

    program: Program
    start: Start

    def __call__(self, rank: int, world: pt.World) -> Any:
        with self.start(rank, world):
            return self.program(rank, world)


@dataclass(frozen=True)
class _Telling:
    """A program whose ranks write down what they raise. It is raised all the same: peers are to see how a rank ends."""

    program: Program
    folder: Path
    # Makes the default group, and takes it down.
    start: Start | None = None

    def __call__(self, rank: int, world: pt.World) -> Any:
        with contextlib.nullcontext() if self.start is None else self.start(rank, world):
            try:
                return self.program(rank, world)
            except Exception as error:
                (self.folder / str(rank)).write_bytes(pickle.dumps(error))
                raise


def place() -> str:
    """The line above that calls the program, as a stack shows it from this folder."""
    source, first = inspect.getsourcelines(_Telling.__call__)
    number, line = next((number, line) for number, line in enumerate(source, first) if "self.program(" in line)
    return f"{Path(__file__).name}:{number}, in __call__: {line.strip()}"


@dataclass
class Outcome:
    """What a run raised, if it did, and what the ranks raised that did, by rank."""

    first: Exception | None
    raised: dict[int, Raised]


def run_telling(program: Program, ranks: int, folder: Path, *, start: Start | None = None, **options: Any) -> Outcome:
    """`options` are those of `run`. With `start`, ranks make their default group in it."""
    folder.mkdir()
    if start is not None:
        options |= {"init": False}
    if options.get("processes"):
        options = {"timeout": timedelta(seconds=_PATIENCE), "stuck_after": _PATIENCE} | options
    first: Exception | None = None
    try:
        pt.run(_Telling(program, folder, start), ranks, **options)
    except Exception as error:
        first = error
    raised = {int(path.name): Raised(pickle.loads(path.read_bytes())) for path in sorted(folder.iterdir())}
    if first is not None and not raised:
        # As when a rank was stuck: not to be taken for silence.
        raise first
    return Outcome(first, raised)
