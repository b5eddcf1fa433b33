"""How many random programs Hypothesis draws: a tenth of what `make soak` runs, and the same ones each time.

Hypothesis draws every number of a program, so that it can make a program that fails smaller.
"""

from __future__ import annotations

import os

import hypothesis
import hypothesis.strategies as st
from random_programs import Abilities, Program, draw_program

__all__ = ["FACTOR", "NUMBERS", "SEEDS", "examples", "programs"]

# How many times as many as in `make test`; tests/soak/run.py sets it, and the seed of Hypothesis.
FACTOR = int(os.environ.get("PHALANX_RANDOM_PROGRAMS", "1"))
NUMBERS = st.randoms(use_true_random=False)
# Of schedules.
SEEDS = st.integers(0, 1_000_000)


def examples(num: int) -> hypothesis.settings:
    """For a test that runs so many in `make test`."""
    return hypothesis.settings(
        max_examples=num * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@st.composite
def programs(draw: st.DrawFn, abilities: Abilities | None = None) -> Program:
    return draw_program(draw(NUMBERS), abilities)
