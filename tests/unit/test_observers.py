"""Observers are told, advisers are asked; neither breaks a run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import phalanx
from phalanx.transports import advisers
from phalanx.transports.advisers import Adviser, ask, take_advice_of
from phalanx.transports.listing import Listing
from phalanx.transports.observers import Observer, are_calls_observed, observing, tell
from phalanx.types import GroupInfo

INFO = GroupInfo("g", 0, 2)


class _Noting(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def joined(self, transport: Any, info: GroupInfo, folder: str) -> None:
        self.seen.append(f"joined {info.name} {folder}")

    def left(self) -> None:
        self.seen.append("left")


class _Failing(_Noting):
    def joined(self, transport: Any, info: GroupInfo, folder: str) -> None:
        raise ValueError("no room")

    def switched_off(self) -> None:
        self.seen.append("switched off")
        raise RuntimeError("not even this")


def test_all_observers_are_told() -> None:
    first, second = _Noting(), _Noting()
    with observing(first):
        tell.joined(None, INFO, "here")
        with observing(second):
            tell.left()
    tell.left()
    assert first.seen == ["joined g here", "left"]
    assert second.seen == ["left"]


def test_changes_at_the_same_time_are_not_lost() -> None:
    listing: Listing[int] = Listing()

    def add(one: int) -> None:
        listing.change(lambda others: (*others, one))

    def add_during_another(others: tuple[int, ...]) -> tuple[int, ...]:
        # As the garbage collector does in this thread.
        if 2 not in others:
            add(2)
        return (*others, 1)

    listing.change(add_during_another)
    assert list(listing) == [2, 1]
    both = threading.Barrier(2)

    def add_many(first: int) -> None:
        both.wait()
        for number in range(first, first + 1000):
            add(number)

    threads = [threading.Thread(target=add_many, args=(first,)) for first in (1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(listing) == [1, 2, *range(1000, 3000)]
    listing.remove(2)
    assert 2 not in listing


def test_another_thread_waits_for_a_change_that_is_under_way() -> None:
    listing: Listing[str] = Listing()
    begun, ended = threading.Event(), threading.Event()

    def add_second() -> None:
        begun.set()
        listing.change(lambda others: (*others, "second"))
        ended.set()

    other = threading.Thread(target=add_second)

    def add_first(others: tuple[str, ...]) -> tuple[str, ...]:
        if not begun.is_set():
            other.start()
            begun.wait()
        assert not ended.is_set()
        return (*others, "first")

    listing.change(add_first)
    other.join()
    assert list(listing) == ["first", "second"]


def test_an_observer_that_fails_is_switched_off_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    failing, other = _Failing(), _Noting()
    with caplog.at_level(logging.INFO, "phalanx"), observing(failing), observing(other):
        tell.joined(None, INFO, "")
        tell.joined(None, INFO, "")
        tell.left()
    assert failing.seen == ["switched off"]
    assert other.seen == ["joined g ", "joined g ", "left"]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the observer _Failing raised in joined() and is switched off: ValueError('no room')")
    ]


def test_a_group_works_with_an_observer_that_fails() -> None:
    failing = _Failing()
    with observing(failing), phalanx.new_group(store=HashStore(), rank=0, world_size=1) as group:
        tensor = torch.ones(2)
        group.all_reduce(tensor).wait()
    assert failing.seen == ["switched off"]


def test_an_interruption_is_no_failure_of_the_observer() -> None:
    class Interrupted(_Noting):
        def joined(self, transport: Any, info: GroupInfo, folder: str) -> None:
            raise KeyboardInterrupt

    interrupted = Interrupted()
    with observing(interrupted):
        with pytest.raises(KeyboardInterrupt):
            tell.joined(None, INFO, "")
        tell.left()
    assert interrupted.seen == ["left"]


def test_every_event_is_passed_on() -> None:
    """A new event of `Observer` reaches observers without another list of names."""
    events = {name for name in vars(Observer) if not name.startswith("_")} - {"wants_calls", "switched_off"}
    assert events == {name for name in vars(type(tell)) if not name.startswith("_")}


def test_calls_are_observed_while_an_observer_wants_them() -> None:
    class Calls(Observer):
        wants_calls = True

    before = are_calls_observed()
    with observing(_Noting()):
        assert are_calls_observed() == before
        with observing(Calls()):
            assert are_calls_observed()
    assert are_calls_observed() == before


@pytest.fixture
def adviser() -> Iterator[type[Adviser]]:
    before = advisers._adviser
    yield Adviser
    take_advice_of(before)


def test_the_adviser_is_asked(adviser: type[Adviser]) -> None:
    class Knowing(adviser):  # type: ignore[valid-type, misc]
        def absent(self, group: Any, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
            return [f"{op} {seq} {missing}"]

    take_advice_of(Knowing())
    assert ask.absent(None, INFO, "barrier", 1, [1]) == ["barrier 1 [1]"]
    assert ask.lost(None, INFO, 1) == []
    assert ask.offer_folder() == ""


def test_an_adviser_that_fails_has_no_answer(adviser: type[Adviser], caplog: pytest.LogCaptureFixture) -> None:
    class Failing(adviser):  # type: ignore[valid-type, misc]
        def offer_folder(self) -> str:
            raise OSError("disk full")

        def lost(self, group: Any, info: GroupInfo, peer: int) -> list[str]:
            raise ValueError("who?")

    take_advice_of(Failing())
    with caplog.at_level(logging.INFO, "phalanx"):
        assert ask.offer_folder() == ""
        assert ask.lost(None, INFO, 1) == []
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "Failing.offer_folder(): OSError('disk full')" in caplog.records[0].getMessage()
