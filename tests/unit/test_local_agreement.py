"""Ranks that are threads of one process agree: their world has the clock, and tells who is gone."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx import _native

_FLOAT = [dtype.name for dtype in _native.DTYPES].index("float32")


def _sum(count: int = 4, **fields: Any) -> _native.Description:
    return _native.Description("all_reduce", reduce_op=0, dtype=_FLOAT, count=count, **fields)


def _message(op: str, peer: int, tag: int = 0) -> _native.Description:
    return _native.Description(op, peer=peer, tag=tag, dtype=_FLOAT, count=4)


def _has_found(rank: _native.LocalAgreement) -> bool:
    """Whether the group has failed because of what the rank, or another one, has found."""
    return rank.report_now(0.0)


def _ranks(size: int, check: int = _native.CHECK_ON) -> list[_native.LocalAgreement]:
    tuning = _native.tuning_for(size, size)
    tuning.only_posts, tuning.level = True, check
    segment = _native.Segment.create_private(size, tuning)
    return [_native.LocalAgreement(segment, rank) for rank in range(size)]


def _counts(rank: _native.LocalAgreement) -> list[int | None]:
    return [None if seen.call is None else seen.call.description.count for seen in rank.testimonies()]


def test_ranks_that_agree() -> None:
    ranks = _ranks(3)
    for seq in range(1, 100):
        for rank in ranks:
            assert rank.post(_sum(seq)) == seq
            assert not any(rank.compare_with(peer) for peer in range(3))
            assert not rank.report_now(0.0)
    assert [rank.failure() for rank in ranks] == [None] * 3


def test_all_come_and_one_of_them_reports() -> None:
    ranks = _ranks(3)
    for number, rank in enumerate(ranks):
        rank.post(_sum(5 if number == 1 else 4), where=f"line {number}")
    assert any(rank.report_now(7.0) for rank in ranks)
    for rank in ranks:
        failure = rank.failure()
        assert failure is not None
        assert (failure.kind, failure.seq, failure.agreed) == (_native.FAILURE_MISMATCH, 1, 0)
        assert 1 in (failure.rank, failure.peer)
        assert _counts(rank) == [4, 5, 4]
        assert [seen.call and seen.call.where for seen in rank.testimonies()] == ["line 0", "line 1", "line 2"]


def test_two_differ_and_the_third_does_not_come() -> None:
    first, second, third = _ranks(3)
    first.post(_sum(4))
    second.post(_sum(5))
    assert not second.report_now(0.0)
    assert second.compare_with(0)
    assert second.report_now(0.0)
    assert first.failure() is not None
    assert _counts(third) == [4, 5, None]


def test_the_rank_behind_stops_at_the_call_that_differs() -> None:
    first, second = _ranks(2)
    for _ in range(1000):
        first.post(_sum(4))
    second.post(_sum(4))
    second.post(_sum(5))
    # It can't read the words of a rank so far ahead. That one keeps its own.
    assert not second.compare_with(0)
    assert first.compare_with(1)
    assert first.report_now(0.0)
    failure = second.failure()
    assert failure is not None
    assert (failure.agreed, failure.seq) == (1, 2)
    assert [seen.posted for seen in second.testimonies()] == [1000, 2]
    assert _counts(second) == [None, 5]
    assert failure.call.op == "all_reduce"


def test_another_rank_finds_what_a_dead_finder_had_found() -> None:
    first, second = _ranks(2)
    first.post(_sum(4))
    second.post(_sum(5))
    # The second rank, which has found it, dies before it reports.
    del second
    assert first.compare_with(1)
    assert first.report_now(0.0)
    assert _counts(first) == [4, 5]


def test_shapes_are_noted_once() -> None:
    first, second = _ranks(2)
    for number in (1, 2):
        first.post(_sum(4, sizes=(4,)), where=f"a {number}")
        second.post(_sum(4, sizes=(2, 2)), where=f"b {number}")
    notes = [note for rank in (first, second) if (note := rank.take_note()) is not None]
    assert [(note.op, note.seq) for note in notes] == [("all_reduce", 1)]
    assert [(side.rank, side.shape.sizes, side.where) for side in notes[0].sides] == [
        (0, (4,), "a 1"),
        (1, (2, 2), "b 1"),
    ]
    assert not _has_found(first)
    assert not _has_found(second)
    assert first.take_note() is second.take_note() is None


def test_shapes_must_agree_at_the_full_level() -> None:
    first, second = _ranks(2, _native.CHECK_FULL)
    first.post(_sum(4, sizes=(4,)))
    second.post(_sum(4, sizes=(2, 2)))
    assert _has_found(second)


def test_results_are_compared_at_the_full_level() -> None:
    first, second = _ranks(2, _native.CHECK_FULL)
    for rank, result in ((first, 7), (second, 8)):
        rank.post(_sum())
        rank.set_completed(1)
        rank.post(_sum(), result=result)
    assert second.report_now(0.0)
    testimonies = first.testimonies()
    assert [seen.call and seen.call.result for seen in testimonies] == [7, 8]
    assert [seen.completed and seen.completed.seq for seen in testimonies] == [1, 1]


def test_results_do_not_count_at_the_usual_level() -> None:
    first, second = _ranks(2)
    first.post(_sum(), result=7)
    second.post(_sum(), result=8)
    assert not _has_found(second)


def test_another_failure() -> None:
    first, second = _ranks(2)
    first.post(_sum())
    first.fail(_native.Failure(kind=_native.FAILURE_TIMEOUT, rank=0, call=_sum(), seq=1, missing=[1]), 0.0)
    failure = second.failure()
    assert failure is not None
    assert (failure.kind, failure.missing) == (_native.FAILURE_TIMEOUT, [1])
    assert second.report_now(0.0)


def test_a_difference_comes_before_another_failure() -> None:
    first, second, _ = _ranks(3)
    first.post(_sum(4))
    second.post(_sum(5))
    assert second.compare_with(0)
    second.fail(_native.Failure(kind=_native.FAILURE_TIMEOUT, rank=1, call=_sum(), seq=1, missing=[2]), 0.0)
    failure = first.failure()
    assert failure is not None
    assert failure.kind == _native.FAILURE_MISMATCH


@pytest.mark.parametrize("op", ["send", "recv"])
def test_messages_are_for_the_world_to_match(op: str) -> None:
    first, _ = _ranks(2)
    with pytest.raises(ValueError, match="expected a collective"):
        first.post(_message(op, 1))


def test_calls_that_were_refused() -> None:
    first, second = _ranks(2)
    first.refuse_call("why")
    assert second.refusals(0) == ["why"]
    first.close_note(_sum(4))
    assert second.refusals(0) == []
    first.post(_sum(4))
    second.post(_sum(5))
    assert second.report_now(0.0)
    assert [seen.refused for seen in first.testimonies()] == ["why", ""]


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_of_the_group(rank: int) -> None:
    first, _ = _ranks(2)
    with pytest.raises(ValueError, match="expected a rank of the group"):
        first.has_left(rank)
    with pytest.raises(ValueError, match="expected a rank of the group"):
        first.compare_with(rank)


@pytest.mark.parametrize("now", [-1.0, float("inf"), float("nan")])
def test_times(now: float) -> None:
    first, _ = _ranks(2)
    with pytest.raises(ValueError, match="expected a time"):
        first.report_now(now)


def test_a_rank_that_leaves_or_dies_while_others_wait() -> None:
    ranks = _ranks(3)
    assert not any(ranks[0].is_gone(rank) for rank in range(3))
    ranks[1].say_last_words("ValueError: no")
    ranks[1].say_last_words("and then")
    ranks[1].leave(_native.LEAVING_EXITING)
    ranks[2].die(9)
    assert [ranks[0].has_left(rank) for rank in range(3)] == [False, True, True]
    assert ranks[2].last_words(1) == "ValueError: no"
    ranks[0].lose(2, _sum(4), 7, "line 1", 0.0)
    # The first failure stays.
    ranks[0].lose(1, _sum(4), 7, "line 1", 0.0)
    failure = ranks[1].failure()
    assert failure is not None
    assert (failure.kind, failure.rank, failure.peer, failure.status) == (_native.FAILURE_LOST, 0, 2, 9)
    assert (failure.call.op, failure.seq, failure.where) == ("all_reduce", 7, "line 1")
    ranks[0].give_up()
    assert ranks[1].is_gone(0)
    assert not ranks[1].has_left(0)


def test_the_time_of_a_call_is_up() -> None:
    ranks = _ranks(3)
    ranks[1].expire(_message("recv", peer=0, tag=5), 3, "line 1", [0, 2], [9, 7], 1.0)
    failure = ranks[0].failure()
    assert failure is not None
    assert (failure.kind, failure.rank, failure.missing) == (_native.FAILURE_TIMEOUT, 1, [0, 2])
    assert (failure.call.tag, failure.seq, failure.where, failure.other_tags) == (5, 3, "line 1", [7, 9])


def test_comparing_with_one_rank() -> None:
    first, second, third = _ranks(3)
    first.post(_sum(4))
    second.post(_sum(5))
    assert not second.compare_with(2)
    assert not second.compare_with(1)
    assert not third.compare_with(0)
    assert second.compare_with(0)
    assert second.report_now(0.0)
    assert _counts(third) == [4, 5, None]
    with pytest.raises(ValueError, match="a rank of the group"):
        first.compare_with(3)


def test_more_ranks_than_there_is_room_for() -> None:
    tuning = _native.tuning_for(2, 2)
    tuning.only_posts = True
    with pytest.raises(ValueError, match=f"expected 1 to {_native.MAX_RANKS} ranks"):
        _native.Segment.create_private(_native.MAX_RANKS + 1, tuning)


def test_what_was_compared_at_rest_narrows_the_range_of_a_report() -> None:
    first, second = _ranks(2)
    for _ in range(1000):
        first.post(_sum())
        second.post(_sum())
    # `first` never came last, so it has compared none of its calls when it posted them.
    assert not first.compare_with(1)
    for _ in range(60):
        second.post(_sum())
    number = 0
    while not _has_found(first):
        number += 1
        first.post(_sum(5 if number == 10 else 4))
    failure = first.failure()
    assert failure is not None
    assert failure.agreed == 1000
    assert failure.agreed < 1010 <= failure.seq
