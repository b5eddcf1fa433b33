"""Random programs that are right: guarded Gloo never raises, and gives what plain Gloo gives."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import guarded_gloo
import hypothesis
import pytest
from examples import FACTOR, examples, programs
from random_programs import Abilities, Program
from random_steps import COLLECTIVES, MESSAGES, OBJECTS
from telling import Running, Start

import phalanx.testing as pt

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated:FutureWarning")

_NUM_PROGRAMS = 25
_NUM_ON_PLAIN_GLOO = 5
_TIMEOUT = timedelta(seconds=guarded_gloo.TIMEOUT)
# Gloo wants lists of equal sizes, has no int16, and its reduce also writes to the tensors of the other ranks.
_LEFT_OUT = ("all_gather_uneven", "reduce_scatter", "all_to_all", "reduce")
_GLOO = Abilities(
    most_ranks=3,
    collectives=tuple(kind for kind in COLLECTIVES if kind not in _LEFT_OUT),
    dtypes=("float32", "float64", "int32"),
)


def _run(program: Program, start: Start) -> None:
    """Every program checks its results."""
    sources = program.write()
    try:
        pt.run(Running(sources, start), program.ranks, processes=True, init=False, timeout=_TIMEOUT)
    except Exception as error:
        error.add_note(sources.listing())
        raise


def test_right_programs_on_plain_gloo() -> None:
    """So what guarded Gloo must give is what Gloo gives."""

    @examples(_NUM_ON_PLAIN_GLOO)
    @hypothesis.given(programs(_GLOO))
    def run(program: Program) -> None:
        _run(program, guarded_gloo.plain)

    run()


def test_right_programs_on_guarded_gloo() -> None:
    seen: Counter[str] = Counter()

    @examples(_NUM_PROGRAMS)
    @hypothesis.given(programs(_GLOO))
    def run(program: Program) -> None:
        seen.update(step.kind for step in program.steps)
        seen["asynchronous"] += sum(step.is_async for step in program.steps)
        seen["groups"] += len(program.groups) - 1
        _run(program, guarded_gloo.guarded)

    run()
    if FACTOR > 1:
        # Others each time.
        return
    missing = [one for one in (*OBJECTS[:1], *MESSAGES, "all_reduce", "asynchronous", "groups") if not seen[one]]
    assert not missing, f"never drawn: {missing}"
