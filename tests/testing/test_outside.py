"""Threads outside of the turns, as /proc shows them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing.outside import Limits, Outside

FOREVER = float("inf")


@pytest.fixture(params=["with schedstat", "without schedstat", "with an empty schedstat"])
def accounting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may be built without the file, or leave it zero."""
    read_text = Path.read_text

    def read(path: Path, *args: Any, **more: Any) -> str:
        if path.name != "schedstat" or request.param == "with schedstat":
            return read_text(path, *args, **more)
        if request.param == "without schedstat":
            raise FileNotFoundError(path)
        return "0 0 0\n"

    monkeypatch.setattr(Path, "read_text", read)


@contextmanager
def thread_that(does: Callable[[threading.Event], Any]) -> Iterator[int]:
    stopped = threading.Event()
    thread = threading.Thread(target=does, args=(stopped,))
    thread.start()
    try:
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        stopped.set()
        thread.join()


def compute(stopped: threading.Event) -> None:
    while not stopped.is_set():
        pass


def poll(stopped: threading.Event) -> None:
    while not stopped.wait(0.001):
        pass


@pytest.mark.usefixtures("accounting")
@pytest.mark.parametrize(
    ("does", "limits"),
    [(threading.Event.wait, Limits(FOREVER, FOREVER)), (poll, Limits(0.5, 1.0)), (compute, Limits(1.0, 0.5))],
    ids=["sleeps", "polls", "computes"],
)
def test_no_thread_is_waited_for_longer_than_its_limit(does: Callable[..., Any], limits: Limits) -> None:
    with thread_that(does) as thread:
        outside, since = Outside(), time.monotonic()
        outside.add(thread)
        while outside.may_come(since, lambda _: limits):
            pass


def test_a_thread_that_polls_is_not_taken_for_one_that_computes() -> None:
    with thread_that(poll) as thread:
        outside, since = Outside(), time.monotonic()
        outside.add(thread)
        while outside.may_come(since, lambda _: Limits(0.5, FOREVER)):
            pass


@pytest.mark.usefixtures("accounting")
def test_a_thread_that_computes_is_not_asleep() -> None:
    with thread_that(compute) as thread:
        outside, since = Outside(), time.monotonic()
        outside.add(thread)
        assert all(outside.may_come(since, lambda _: Limits(FOREVER, FOREVER)) for _ in range(5))


def test_a_thread_that_computes_is_worth_waiting_for() -> None:
    with thread_that(compute) as thread:
        outside, since = Outside(), time.monotonic()
        outside.add(thread)
        assert all(outside.may_come(since, lambda _: Limits(0.1, FOREVER)) for _ in range(50))


def test_a_thread_that_the_system_wakes_up_naps() -> None:
    reader, writer = os.pipe()
    has_begun = threading.Event()

    def read(_: threading.Event) -> None:
        has_begun.set()
        os.read(reader, 1)

    with thread_that(read) as thread:
        try:
            has_begun.wait()
            outside, since = Outside(), time.monotonic()
            outside.add(thread)
            assert all(outside.may_come(since, lambda _: Limits(FOREVER, FOREVER, FOREVER)) for _ in range(5))
            while outside.may_come(since, lambda _: Limits(0.1, 0.1, 0.1)):
                pass
        finally:
            os.write(writer, b"x")
    os.close(reader)
    os.close(writer)


def test_threads_of_one_rank_are_looked_at() -> None:
    with thread_that(compute) as thread:
        outside, since = Outside(), time.monotonic()
        outside.add(thread, 1)
        limits = Limits(FOREVER, FOREVER)
        assert outside.may_come(since, lambda _: limits, rank=1)
        assert not outside.may_come(since, lambda _: limits, rank=0)
        outside.discard_all_of(1)
        assert not outside
