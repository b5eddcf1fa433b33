"""How long a rank waits for its peers when it leaves several groups."""

from __future__ import annotations

from phalanx.transports.leaving import Leaving


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_groups_that_are_left_one_after_another_share_their_patience() -> None:
    clock = _Clock()
    leaving = Leaving(clock)
    assert leaving.begin(1.0) == 101.0
    clock.now = 101.0
    leaving.end()
    clock.now = 101.05
    assert leaving.begin(1.0) == 101.0


def test_a_group_that_is_left_later_has_a_patience_of_its_own() -> None:
    clock = _Clock()
    leaving = Leaving(clock)
    leaving.begin(1.0)
    leaving.end()
    clock.now = 100.5
    assert leaving.begin(1.0) == 101.5


def test_a_rank_that_does_not_wait_takes_nothing_from_the_next_group() -> None:
    clock = _Clock()
    leaving = Leaving(clock)
    assert leaving.begin(0.0) == 100.0
    leaving.end()
    clock.now = 101.0
    assert leaving.begin(1.0) == 102.0
