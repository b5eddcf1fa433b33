"""Every op, spelling, dtype and reduce op on the real backend, bit for bit against the meaning of the calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract_cases import run_bursts, run_cases, run_methods
from contract_forms import FORMS
from contract_leaving import leave_in_flight
from contract_misuse import MISUSES, misuse, pass_barriers
from contract_pool import GROUPS, Member, moved_on

Run = Callable[..., list[Any]]
Passes = Callable[..., None]


# The groups that run every case. The others run each fifth one, and begin with different ones. The number is prime to
# the numbers of counts and of roots, which take turns. Ranks that are threads carry out the meaning itself, whatever
# their number.
_THOROUGH = {"shm": ("world of 1", "world of 2", "world of 3", "world of 4"), "threads": ("world of 3",), "seats": ()}
_SHARES = 5


@pytest.mark.parametrize("form", FORMS)
def test_the_backend_does_what_the_calls_mean(passes: Passes, transport: str, group: str, form: str) -> None:
    is_thorough = group in _THOROUGH[transport]
    passes(run_cases, form, slice(None) if is_thorough else slice(list(GROUPS).index(group) % _SHARES, None, _SHARES))


def ranks_by_seat(member: Member) -> list[list[int]]:
    """In the memory of each group that the process is in."""
    transports = [other.process_group._group.quick for other in member.memberships.values()]  # type: ignore[attr-defined]
    return [transport.native.ranks for transport in transports]


@pytest.mark.parametrize("transport", ["shm", "seats"], indirect=True, scope="session")
def test_seats_are_those_that_were_asked_for(run: Run, transport: str) -> None:
    """In all groups of a process, those that are made of the world as well."""
    for tables in run(ranks_by_seat):
        for ranks in tables:
            assert ranks == (moved_on(len(ranks)) if transport == "seats" else list(range(len(ranks))))


def test_the_methods_of_a_group_do_what_the_calls_mean(passes: Passes) -> None:
    passes(run_methods)


@pytest.mark.parametrize("forms", [list(FORMS), ["gather", "reduce", "broadcast", "scatter"]], ids=["all", "rooted"])
def test_calls_right_after_one_another(passes: Passes, forms: list[str]) -> None:
    passes(run_bursts, forms, 5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [2, 3])
def test_leaving_completes_the_calls_that_every_rank_has_made(
    run_in_world: Run, transport: str, form: str, size: int
) -> None:
    # Calls of threads end as soon as all have made them: there a rank has to leave before the others come.
    for problems in run_in_world(size, leave_in_flight, form, transport != "threads"):
        assert problems == []


def test_nobody_leaves_a_barrier_before_everybody_has_come(run: Run, tmp_path: Path) -> None:
    for missing in run(pass_barriers, tmp_path, 50):
        assert missing == []


@pytest.mark.parametrize("name", MISUSES)
def test_the_group_works_after_a_call_that_was_refused(run: Run, name: str) -> None:
    for problems in run(misuse, name):
        assert problems == []
