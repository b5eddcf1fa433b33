"""Twenty of the soak's worlds in which a rank dies, and tests of the soak's judgement.

tests/soak/judgement.py says what must hold.
The seeds have among them every way to die, every op, large and small, sync and async, groups in the making, rank 0.
`make soak` runs hundreds of others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parents[1] / "soak"
sys.path.insert(0, str(SOAK))

import mixed  # noqa: E402
from judgement import Error, Facts, judge  # noqa: E402
from keeper import Keeper  # noqa: E402
from scenarios import Scenario, covering  # noqa: E402

SEEDS = (249, 67, 48, 0, 55, 365, 38, 177, 13, 1, 5, 16, 25, 28, 29, 31, 46, 80, 210, 2)


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    # `make soak` has whole ends.
    with Keeper(quick_ends=True) as keeper:
        yield keeper


@pytest.mark.parametrize("seed", SEEDS)
def test_survivors_learn_of_a_death(keeper: Keeper, seed: int) -> None:
    outcome = keeper.run("kills.supervise", seed=seed)
    lines = [outcome["scenario"], *outcome["problems"], outcome["detail"], f"again: tests/soak/run.py --world {seed}"]
    assert not outcome["problems"], "\n".join(lines)


def test_the_seeds_have_everything() -> None:
    assert len(SEEDS) == len(set(SEEDS)) == 20
    had = set().union(*(Scenario.of(seed).features() for seed in SEEDS))
    wanted = set().union(*(Scenario.of(seed).features() for seed in range(400)))
    assert had >= wanted, f"{sorted(wanted - had)}: take {covering(20)} instead"


def test_worlds_without_a_death_come_to_the_end(keeper: Keeper) -> None:
    outcome = keeper.run("kills.supervise", seed=SEEDS[0], deadly=False)
    assert not outcome["problems"], outcome["detail"]


def test_mixed_calls_stay_flat(keeper: Keeper) -> None:
    outcome = keeper.run("mixed.supervise", size=2, calls=2_000, seed=1)
    assert not outcome["problems"], outcome["detail"]


def _scenario(death: str) -> Scenario:
    """Of 3 ranks that go on; rank 1 dies."""
    return next(
        scenario
        for scenario in map(Scenario.of, range(10_000))
        if (scenario.death, scenario.size, scenario.victim) == (death, 3, 1)
        and scenario.reaped_late
        and not scenario.stops
    )


def _lost(text: str, *, stage: str = "start", kind: str = "PeerLost", ranks: tuple[int, ...] = (0, 1, 2)) -> Error:
    return Error(3, stage, ranks, kind, True, text)


def _facts(scenario: Scenario, *errors: Error) -> Facts:
    """All is well, and rank 0 met these errors."""
    good = _lost("rank 1 died: killed by SIGKILL")
    return Facts(
        begun=2,
        statuses={0: 0, 1: scenario.status, 2: 0},
        reported={0: 0.1, 2: 0.1},
        errors={0: list(errors) or [good], 2: [good]},
        done={0, 2},
    )


def test_judges_what_is_right_to_be_right() -> None:
    scenario = _scenario("outside")
    assert judge(scenario, _facts(scenario)) == []
    assert judge(scenario, _facts(scenario, _lost("no peer", stage="make", kind="GroupError"))) == []
    # A sub group has ranks of its own.
    assert judge(scenario, _facts(scenario, _lost("rank 0 died: SIGKILL", ranks=(1, 2)))) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_lost("rank 2 died: SIGKILL"), "rank 1 is not named"),
        (_lost("rank 2 died: SIGKILL\n  the last calls of rank 2:\n    send to rank 1"), "rank 1 is not named"),
        (_lost("rank 1 died: SIGSEGV"), "how rank 1 died is not told or wrong"),
        (_lost("rank 1 died: exit code 9"), "how rank 1 died is not told or wrong"),
        (_lost("rank 1 died: SIGKILL", ranks=(0, 2)), "all ranks of the group live"),
        (_lost("rank 1 died: SIGKILL", stage="leaving"), "expected no error"),
        (_lost("rank 1 died: SIGKILL", kind="Aborted"), "expected PeerLost"),
        (_lost("rank 1 died: SIGKILL", kind="Aborted", stage="make"), "but Aborted"),
        (_lost("a few elements", kind="WrongDataError", stage="check"), "wrong data"),
    ],
)
def test_judges_a_wrong_error_to_be_wrong(error: Error, words: str) -> None:
    scenario = _scenario("outside")
    (problem,) = judge(scenario, _facts(scenario, error))
    assert problem.startswith("rank 0: ")
    assert words in problem


@pytest.mark.parametrize(
    ("death", "told"),
    [
        ("SIGKILL", "SIGKILL"),
        ("SIGSEGV", "signal 11"),
        ("_exit", "exit code {0.code}"),
        ("exception", "VictimError: {0.words}"),
        ("sys.exit", "it left"),
    ],
)
def test_knows_each_death(death: str, told: str) -> None:
    scenario = _scenario(death)
    facts = _facts(scenario)
    facts.errors = {rank: [_lost(f"rank 1 died: {told.format(scenario)}")] for rank in (0, 2)}
    assert judge(scenario, facts) == []


def _hang(facts: Facts) -> None:
    facts.stuck[2] = "a stack"
    facts.statuses[2] = -9


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_hang, "rank 2 hung"),
        (lambda facts: facts.done.remove(2), "rank 2 did not come to the end"),
        (lambda facts: facts.statuses.update({2: -6}), "rank 2 ended with -6 instead of 0"),
        (lambda facts: facts.statuses.update({1: 0}), "the victim, rank 1, ended with 0 instead of -9"),
        (lambda facts: facts.errors.pop(2), "rank 2 finished the last barrier, to which the victim never came"),
        (lambda facts: facts.left.update({0: ["thread 7 x"]}), "rank 0 still holds thread 7 x"),
        (lambda facts: facts.files.append("phalanx-1"), "/dev/shm/phalanx-1 was left"),
        (lambda facts: setattr(facts, "processes", True), "a process was left"),
        (lambda facts: facts.texts.update({2: "Traceback (most recent call last):"}), "rank 2 printed a traceback"),
    ],
)
def test_judges_a_bad_end_to_be_bad(spoil: Callable[[Facts], object], words: str) -> None:
    scenario = _scenario("outside")
    facts = _facts(scenario)
    spoil(facts)
    assert judge(scenario, facts) == [words]


def test_a_rank_that_stopped_may_be_named_instead() -> None:
    scenario = _scenario("outside")
    facts = _facts(scenario, _lost("rank 2 left the group"))
    assert len(judge(scenario, facts)) == 1
    facts.stopped.add(2)
    assert judge(scenario, facts) == []


def test_judges_growth() -> None:
    threads = {"ours": 2, "others": 2, "names": ["python", "phalanx"]}
    flat: list[dict[str, Any]] = [
        {"calls": i, "memory": 100 << 20, "threads": threads, "fds": 9} for i in range(mixed.SAMPLES)
    ]
    assert mixed.judge(flat) == []
    for whose, num in (("ours", 5), ("others", 3)):
        late = [sample | {"threads": threads | {whose: num}} for sample in flat[-3:]]
        assert f"threads grew, {whose}" in mixed.judge([*flat[:-3], *late])[0]
    assert mixed.judge([*flat[:-3], *(sample | {"threads": threads | {"ours": 4}} for sample in flat[-3:])]) == []
    leak = [sample | {"memory": sample["memory"] + i * (1 << 20)} for i, sample in enumerate(flat)]
    assert "private memory grew" in mixed.judge(leak)[0]
    assert "fds grew" in mixed.judge([*flat[:-1], flat[-1] | {"fds": 10}])[0]
    assert "took 9 samples" in mixed.judge(flat[1:])[0]
