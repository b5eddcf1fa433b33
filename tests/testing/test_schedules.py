"""Schedules can be repeated, and faults happen where they are asked for."""

from __future__ import annotations

import contextlib
import random
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import phalanx
import phalanx.testing as pt
from phalanx.testing.schedules import Recorded, decode


@given(st.integers(1, 300), st.booleans(), st.lists(st.integers(0, 300)), st.integers(0, 2**32 - 1))
def test_a_schedule_comes_back_from_its_string(
    ranks: int, at_calls: bool, choices: list[int], fingerprint: int
) -> None:
    assert decode(Recorded(ranks, at_calls, choices, fingerprint).encode()) == (ranks, at_calls, choices, fingerprint)


@given(st.text())
def test_other_strings_are_no_schedules(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert decode(text).ranks >= 1


def _race(seen: list[int]) -> Any:
    """Fails in some schedules: where rank 2's message comes first."""

    def race(rank: int, world: pt.World) -> None:
        nonlocal seen
        if rank > 0:
            dist.send(torch.full((1,), float(rank)), 0)
            return
        seen += [dist.recv(torch.zeros(1)) for _ in range(world.size - 1)]
        assert seen[-2] == 1, "rank 2 was first"

    return race


def _failing_schedule() -> tuple[list[int], str]:
    """What rank 0 saw in a schedule that fails, and the schedule; others do not fail."""
    failing: list[tuple[list[int], str]] = []
    for seed in range(20):
        seen: list[int] = []
        try:
            pt.run(_race(seen), 3, seed=seed)
        except AssertionError as error:
            (note,) = [note for note in error.__notes__ if note.startswith("again: pt.run(race, ranks=3, replay=")]
            failing.append((seen, re.findall("replay='(.*)'", note)[0]))
    assert 0 < len(failing) < 20
    return failing[0]


def test_a_failure_can_be_replayed() -> None:
    seen, replay = _failing_schedule()
    for _ in range(3):
        again: list[int] = []
        with pytest.raises(AssertionError, match="rank 2 was first"):
            pt.run(_race(again), 3, replay=replay)
        assert again == seen


def test_a_schedule_of_another_program() -> None:
    _, replay = _failing_schedule()

    def meet_often(rank: int, world: pt.World) -> None:
        for _ in range(20):
            world.barrier()

    with pytest.raises(ValueError, match="expected the schedule of this program"):
        pt.run(meet_often, 3, replay=replay)
    with pytest.raises(ValueError, match="expected a schedule of 2 ranks, got one of 3"):
        pt.run(_race([]), 2, replay=replay)
    with pytest.raises(ValueError, match="expected a schedule as a failed run prints it, got 'abc'"):
        pt.run(_race([]), 3, replay="abc")
    with pytest.raises(ValueError, match="got both"):
        pt.run(_race([]), 3, replay=replay, seed=1)


def test_check_finds_a_program_that_does_not_do_the_same() -> None:
    draw = random.SystemRandom()

    def moody(rank: int, world: pt.World) -> None:
        for _ in range(20):
            dist.barrier() if draw.random() < 0.5 else dist.all_reduce(torch.ones(1))

    def same(rank: int, world: pt.World) -> None:
        world.barrier()

    pt.run(same, 2, check=True)
    with pytest.raises(RuntimeError, match=r"does the same each time, got other events: at event \d+: rank 0 came to"):
        pt.run(moody, 1, check=True)


def test_a_rank_that_is_killed() -> None:
    after: list[str] = []

    def work(rank: int, world: pt.World) -> str:
        try:
            dist.all_reduce(torch.ones(1))
            dist.barrier()
        except phalanx.PeerLost as error:
            assert not after
            return str(error)
        finally:
            if rank == 1:
                after.append("finally")
        return ""

    results = pt.run(work, 3, faults=[pt.kill(1, at_call=2)])
    assert results[1] is None
    for rank in (0, 2):
        assert "rank 1 died (killed by SIGKILL) while rank" in results[rank]
        assert "waited for it in barrier, seq 2" in results[rank]
    assert after == ["finally"]


def test_a_rank_that_fails() -> None:
    def work(rank: int, world: pt.World) -> None:
        for _ in range(3):
            dist.barrier()

    with pytest.raises(OSError, match="disk full") as caught:
        pt.run(work, 3, faults=[pt.fail(2, at_call=3, error=OSError("disk full"))])
    assert caught.value.__notes__[:2] == ["on rank 2", "because of it:\n  ranks 0, 1: PeerLost in barrier, seq 3"]


@pytest.mark.parametrize(("seconds", "late"), [(5, False), (15, True)])
def test_a_rank_that_is_late(seconds: float, late: bool) -> None:
    def work(rank: int, world: pt.World) -> bool:
        try:
            dist.barrier()
        except phalanx.CallTimeout:
            return True
        return False

    faults = [pt.delay(1, at_call=1, seconds=seconds)]
    assert pt.run(work, 2, faults=faults, timeout=timedelta(seconds=10)) == [late, late]


def test_two_ranks_that_are_late() -> None:
    faults = [pt.delay(0, at_call=1, seconds=10), pt.delay(1, at_call=1, seconds=20)]
    assert pt.run(lambda rank, world: world.barrier(), 2, faults=faults) == [None, None]


@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        (pt.kill(2, at_call=1), ValueError, "expected a fault of a rank between 0 and 1"),
        (pt.kill(1, at_call=0), ValueError, "expected a fault at a call from 1 on"),
        ("kill", TypeError, "expected faults made by kill, delay or fail, got 'kill'"),
    ],
)
def test_faults_that_make_no_sense(fault: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        pt.run(lambda rank, world: None, 2, faults=[fault])


def test_faults_that_are_made_wrong() -> None:
    for seconds in (float("inf"), -1, timedelta(seconds=1)):
        with pytest.raises(ValueError, match="expected a delay as a number of seconds"):
            pt.delay(1, 1, seconds)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an exception for a rank to raise, got 'disk'"):
        pt.fail(1, 1, "disk")  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", [False, True])
def test_a_fault_that_never_happens(processes: bool) -> None:
    with pytest.raises(ValueError, match=r"expected rank 1 to come to its call 3, where pt.kill\(1, .*; it made 2"):
        pt.run(_two_barriers, 2, faults=pt.kill(1, at_call=3), processes=processes)
    pt.run(_two_barriers, 2, faults=pt.delay(1, at_call=2, seconds=0.01), processes=processes)


def _two_barriers(rank: int, world: pt.World) -> None:
    dist.barrier()
    dist.barrier()


def test_check_sees_a_failure_of_the_second_run() -> None:
    num_calls = 0

    def flaky(rank: int, world: pt.World) -> None:
        nonlocal num_calls
        num_calls += 1
        dist.barrier()
        if num_calls > 2:
            raise LookupError("second run")

    with pytest.raises(LookupError, match="second run") as caught:
        pt.run(flaky, 2, check=True)
    assert any("in the second run of two" in note for note in caught.value.__notes__)


def test_check_says_what_is_different() -> None:
    num_runs = 0

    def moody(rank: int, world: pt.World) -> None:
        nonlocal num_runs
        num_runs += 1
        dist.all_reduce(torch.ones(num_runs))

    with pytest.raises(RuntimeError) as caught:
        pt.run(moody, 1, check=True)
    assert (
        "at event 0: rank 0 came to all_reduce in group 'default_pg' (1 elements of torch.float32, reduce op SUM), "
        "then rank 0 came to all_reduce in group 'default_pg' (2 elements of torch.float32, reduce op SUM)"
    ) in str(caught.value)
