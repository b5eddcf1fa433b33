"""Messages from rank to rank on the real backend: every kind of them, then many in flight, also beside collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract_exchanges import (
    exchange_both_ways,
    exchange_huge,
    exchange_in_batches,
    exchange_in_threads,
    exchange_objects,
    exchange_one_by_one,
    exchange_with_oneself,
    receive_from_any_and_one,
    receive_from_anyone,
    receive_in_another_order,
    send_what_can_only_be_read,
)
from contract_misuse import MESSAGE_MISUSES, misuse
from contract_pool import GROUPS
from contract_traffic import run_traffic

Run = Callable[..., list[Any]]
Passes = Callable[..., None]

with_peers = pytest.mark.parametrize(
    "group", [name for name in GROUPS if name != "world of 1"], indirect=True, scope="session"
)
whole_worlds = pytest.mark.parametrize(
    "group", ["world of 2", "world of 3", "world of 4"], indirect=True, scope="session"
)


@with_peers
def test_every_kind_of_message_arrives_as_it_was_sent(passes: Passes) -> None:
    passes(exchange_one_by_one)


@with_peers
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_receives_in_another_order_of_tags(passes: Passes, late: bool) -> None:
    passes(receive_in_another_order, late)


@with_peers
@pytest.mark.parametrize("first", ["isend", "irecv"])
def test_large_messages_both_ways_at_once(passes: Passes, first: str) -> None:
    passes(exchange_both_ways, first)


@pytest.mark.parametrize("first", ["isend", "irecv"])
def test_messages_to_oneself(passes: Passes, first: str) -> None:
    passes(exchange_with_oneself, first)


@with_peers
def test_batches(passes: Passes) -> None:
    passes(exchange_in_batches, 5)


@with_peers
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(("count", "num_each"), [(1, 50), (700, 20), (70_001, 4)])
def test_each_message_for_anyone_arrives_once(passes: Passes, count: int, num_each: int, late: bool) -> None:
    passes(receive_from_anyone, count, num_each, late)


@with_peers
def test_receives_from_anyone_and_from_one_rank_take_turns(passes: Passes) -> None:
    passes(receive_from_any_and_one)


@with_peers
def test_memory_that_can_only_be_read_can_be_sent(passes: Passes, tmp_path: Path) -> None:
    passes(send_what_can_only_be_read, tmp_path)


@with_peers
def test_lists_of_objects(passes: Passes) -> None:
    passes(exchange_objects)


@with_peers
@pytest.mark.parametrize("transport", ["shm"], indirect=True, scope="session")  # elsewhere ranks are threads themselves
def test_messages_of_several_threads(passes: Passes) -> None:
    passes(exchange_in_threads, 4, 25)


@whole_worlds
@pytest.mark.parametrize(
    ("num_collectives", "num_messages"), [(80, 0), (0, 400), (50, 250)], ids=["collectives", "messages", "both"]
)
def test_traffic_on_all_groups(passes: Passes, num_collectives: int, num_messages: int) -> None:
    passes(run_traffic, 2, num_collectives, num_messages)


@with_peers
@pytest.mark.parametrize("name", MESSAGE_MISUSES)
def test_the_group_works_after_a_message_that_was_refused(run: Run, name: str) -> None:
    for problems in run(misuse, name):
        assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("group", ["world of 2"], indirect=True, scope="session")
def test_more_than_two_gibibytes(passes: Passes) -> None:
    passes(exchange_huge)
