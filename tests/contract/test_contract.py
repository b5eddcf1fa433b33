"""Every op, spelling, dtype and reduce op on the real backend, bit for bit against the meaning of the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contract_cases import run_cases
from contract_forms import FORMS

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("form", FORMS)
def test_the_backend_does_what_the_calls_mean(run: Run, form: str) -> None:
    answers = run(run_cases, form)
    assert len({num_cases for num_cases, _ in answers}) == 1
    assert answers[0][0] > 0
    problems = [f"rank {rank}: {failure}" for rank, (_, failures) in enumerate(answers) for failure in failures]
    assert not problems, "\n".join([f"{len(problems)} or more of {answers[0][0]} cases failed", *problems])
