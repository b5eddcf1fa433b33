"""Calls that another engine carries out: ranks post them, go on, and learn of a difference although they wait for
nothing of ours."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import Here, World, run, until, values
from stand_in import Watched

import phalanx
from phalanx import _native
from phalanx.debug.observing import install
from phalanx.debug.own_box import own_box
from phalanx.log import logger
from phalanx.transports import keeper, posting, shm
from phalanx.transports.observers import Observer, observe
from phalanx.types import GroupInfo

_FLOAT, _DOUBLE = ([dtype.name for dtype in _native.DTYPES].index(name) for name in ("float32", "float64"))


def _sum(count: int = 4) -> _native.Description:
    return _native.Description("all_reduce", reduce_op=0, dtype=_FLOAT, count=count)


def _send(op: str, peer: int, tag: int = 0, count: int = 4, dtype: int = _FLOAT) -> _native.Description:
    return _native.Description(op, peer=peer, tag=tag, dtype=dtype, count=count)


def _facts(watched: Watched) -> dict[str, Any]:
    failure, testimonies = watched.posted.failure(), watched.posted.testimonies()
    return {
        "finder": failure.rank,
        "peer": failure.peer,
        "seq": failure.seq,
        "agreed": failure.agreed,
        "counts": [seen.call and seen.call.description.count for seen in testimonies],
        "places": [seen.call and seen.call.where for seen in testimonies],
    }


def _calls(here: Here, num: int) -> int:
    watched = Watched(here)
    waits = [watched.call(_sum(number % 3)) for number in range(num)]
    for wait in waits:
        wait()
    assert not watched.posted.has_failed
    seq = watched.posted.seq
    watched.close()
    return seq


def test_ranks_that_agree(tmp_path: Path) -> None:
    assert values(_calls, 3, tmp_path, 100) == [100, 100, 100]


def _differ(here: Here, odd: int, how_many: int) -> dict[str, Any]:
    """Rank `odd` makes another call than the others as its third."""
    watched = Watched(here)
    for wait in [watched.call(_sum()), watched.call(_sum())]:
        wait()
    waits = [watched.call(_sum(9 if here.rank == odd and number == 3 else 4)) for number in range(3, how_many + 1)]
    with pytest.raises(phalanx.Mismatch) as caught:
        waits[0]()
    facts = _facts(watched) | {"report": caught.value.message, "code": caught.value.code}
    watched.close()
    return facts


@pytest.mark.parametrize("how_many", [3, 20])
def test_a_difference_ends_the_hang_of_the_engine(how_many: int, tmp_path: Path) -> None:
    told = values(_differ, 3, tmp_path, 1, how_many)
    assert told[0] == told[1] == told[2]
    facts = told[0]
    assert facts["code"] == "MISMATCH:COUNT"
    assert "all_reduce(SUM, 9 elements of float32)  <-- 9 elements" in facts["report"]
    assert 1 in (facts["finder"], facts["peer"])
    assert (facts["agreed"], facts["seq"]) == (2, 3)
    assert facts["counts"] == [4, 9, 4]
    for place in facts["places"]:
        assert "stand_in.py" in place
        assert "in call" in place


def _hear_of_it(here: Here) -> dict[str, Any]:
    """Rank 0 posts its calls and then does nothing: it waits for no call, and calls nothing of ours."""
    watched = Watched(here)
    watched.call(_sum(4 if here.rank == 0 else 5))
    here.tell()
    assert watched.told.wait(30)
    facts = _facts(watched)
    watched.close()
    return facts


def test_a_rank_that_waits_for_nothing_hears_of_the_failure(tmp_path: Path) -> None:
    told = values(_hear_of_it, 2, tmp_path)
    assert told[0] == told[1]
    assert told[0]["seq"] == 1


def _far_ahead(here: Here, num: int, odd_seq: int) -> dict[str, Any]:
    """Rank 0 is ahead by far more calls than are kept."""
    watched = Watched(here)
    if here.rank == 1:
        here.hear()
    for number in range(1, num + 1):
        watched.posted.post(_sum(9 if here.rank == 1 and number == odd_seq else 4))
    here.tell()
    assert watched.told.wait(30)
    facts = _facts(watched)
    watched.close()
    return facts


def test_a_rank_that_is_far_behind(tmp_path: Path) -> None:
    world = World(_far_ahead, 2, tmp_path, 5000, 1234)
    world.told(0)
    world.tell(1)
    world.told(1)
    ends = world.ends()
    for end in ends:
        assert end.error is None, end.trace
        # Words of every 32nd call reach 1024 calls back, those of every 1024th call reach all of them. The thread that
        # tends rank 0 may come in between, and knows it better.
        assert end.value["agreed"] < 1234 <= end.value["seq"] <= end.value["agreed"] + 1024
    assert ends[0].value == ends[1].value


def _messages(here: Here, field: str) -> dict[str, Any]:
    watched = Watched(here)
    wrong = {"tag": 9} if field == "tag" else {"count": 9} if field == "count" else {}
    numbers = [1, 2, 3]
    if field == "order" and here.rank == 1:
        numbers = [1, 3, 2]
    for number in numbers:
        # Three different messages.
        fields: dict[str, Any] = {"tag": number, "count": 4 + number}
        if here.rank == 1 and number == 2:
            fields |= wrong
        watched.posted.post(_send("send" if here.rank == 0 else "recv", 1 - here.rank, **fields))
    assert watched.told.wait(30)
    facts = _facts(watched)
    watched.close()
    return facts


@pytest.mark.parametrize("field", ["tag", "count", "order"])
def test_messages_that_differ(field: str, tmp_path: Path) -> None:
    told = values(_messages, 2, tmp_path, field)
    assert told[0] == told[1]
    assert told[0]["agreed"] < 2 <= told[0]["seq"]
    assert {told[0]["finder"], told[0]["peer"]} == {0, 1}


def _message_report(here: Here, field: str) -> str:
    """Rank 1 receives its second message otherwise than rank 0 has sent it."""
    watched = Watched(here)
    if here.rank == 1:
        here.hear()
    for number in (1, 2, 3):
        fields: dict[str, Any] = {"tag": number, "count": 4 + number}
        if here.rank == 1 and number == 2:
            wrong = {"tag": {"tag": 9}, "count": {"count": 9}, "dtype": {"dtype": _DOUBLE}}
            fields |= {**wrong, "order": {"tag": 3, "count": 7}}[field]
        watched.posted.post(_send("send" if here.rank == 0 else "recv", 1 - here.rank, **fields))
    here.tell()
    assert watched.told.wait(30)
    report = str(watched.posted.explain("recv" if here.rank else "send", 2))
    watched.close()
    return report


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("tag", ["[MISMATCH:TAG]", "disagree about the tag of a message", "tag 2)  <-- tag 2", "tag 9)  <-- tag 9"]),
        (
            "count",
            ["[MISMATCH:COUNT]", "about the number of elements of a message", "<-- 6 elements", "<-- 9 elements"],
        ),
        ("dtype", ["[MISMATCH:DTYPE]", "about the dtype of a message", "<-- float32", "<-- float64"]),
        ("order", ["[MISMATCH:ORDER]", "about the order of their messages", "<-- fits number 3 of the other side"]),
    ],
)
def test_a_report_says_in_what_messages_differ(field: str, expected: list[str], tmp_path: Path) -> None:
    world = World(_message_report, 2, tmp_path, field)
    world.told(0)
    world.tell(1)
    world.told(1)
    for end in world.ends():
        assert end.error is None, end.trace
        for text in [*expected, "rank 0: send(6 elements of float32, to rank 1, tag 2)", "rank 1: recv("]:
            assert text in end.value


def _third_is_absent(here: Here) -> dict[str, Any]:
    """Ranks 0 and 1 differ, and rank 2 is busy elsewhere."""
    watched = Watched(here)
    if here.rank < 2:
        watched.posted.post(_sum(4 + here.rank))
    assert watched.told.wait(30)
    facts = _facts(watched) | {"report": watched.posted.explain("all_reduce", 1).message}
    watched.close()
    return facts


def test_two_ranks_differ_and_a_third_has_not_come(tmp_path: Path) -> None:
    told = values(_third_is_absent, 3, tmp_path)
    assert told[0] == told[1] == told[2]
    assert told[0]["counts"] == [4, 5, None]
    assert "rank 2: had not made this call" in told[0]["report"]


def _stops_behind(here: Here, num: int, recorded: bool) -> dict[str, Any]:
    """Rank 1 stops at the very call that differs, while rank 0 is far ahead."""
    if not recorded:
        os.environ["PHALANX_BLACK_BOX"] = "0"
    install()
    watched = Watched(here)
    if here.rank == 1:
        here.hear()
    calls = num if here.rank == 0 else 2
    for number in range(1, calls + 1):
        watched.posted.post(_sum(9 if here.rank == 1 and number == 2 else 4))
    here.tell()
    assert watched.told.wait(30)
    # The boxes of both are read while both are there.
    facts = _facts(watched) | {"report": watched.posted.explain("all_reduce", 2).message}
    here.tell()
    here.hear()
    watched.close()
    return facts


@pytest.mark.parametrize("recorded", [True, False])
def test_the_rank_behind_stops_at_the_call_that_differs(recorded: bool, tmp_path: Path) -> None:
    world = World(_stops_behind, 2, tmp_path, 1000, recorded)
    world.told(0)
    world.tell(1)
    world.told(1)
    world.all_told(0, 1)
    world.tell_all(0, 1)
    for end in world.ends():
        assert end.error is None, end.trace
        assert (end.value["finder"], end.value["agreed"], end.value["seq"]) == (0, 1, 2)
        assert end.value["counts"] == [None, 9]
        if recorded:
            # The call of rank 0 is in its black box only.
            assert "rank 0: all_reduce(SUM, 4 elements of float32)  <-- 4 elements" in end.value["report"]
        else:
            text = "rank 0: had made this call and 998 more; it is not recorded any more"
            assert text in end.value["report"]


def _finder_dies(here: Here) -> list[int]:
    watched = Watched(here)
    if here.rank == 1:
        here.hear()
    watched.posted.post(_sum(4 + here.rank))
    if here.rank == 1:
        # It has found the difference, and nobody else has.
        os.kill(os.getpid(), signal.SIGKILL)
    here.tell()
    assert watched.told.wait(30)
    counts: list[int] = _facts(watched)["counts"]
    watched.close()
    return counts


def test_the_only_finder_dies_before_it_reports(tmp_path: Path) -> None:
    world = World(_finder_dies, 2, tmp_path)
    world.told(0)
    world.tell(1)
    ends = world.ends()
    assert ends[0].value == [4, 5], ends[0].trace
    assert ends[1].exitcode == -signal.SIGKILL


def _full_level(here: Here, field: str) -> tuple[str, list[Any]]:
    """Rank 1 has a tensor of another shape in its second call, or its first call gave something else."""
    os.environ["PHALANX_CHECK"] = "full"
    watched = Watched(here)
    for number in (1, 2):
        is_odd = here.rank == 1 and number == 2
        sizes = (2, 2) if is_odd and field == "SHAPE" else (4,)
        call = _native.Description("all_reduce", reduce_op=0, dtype=_FLOAT, count=4, sizes=sizes)
        seq = watched.posted.post(call, result=8 if is_odd and field == "RESULT" else 7)
        watched.posted.end(call, seq)
    assert watched.told.wait(30)
    error = watched.posted.explain("all_reduce", 2)
    results = [seen.call and seen.call.result for seen in watched.posted.testimonies()]
    watched.close()
    return f"{error.code} {error.message}", results


@pytest.mark.parametrize(
    ("field", "expected", "results"),
    [
        ("SHAPE", ["MISMATCH:SHAPE", "<-- shape (4,)", "<-- shape (2, 2)"], [7, 7]),
        ("RESULT", ["MISMATCH:RESULT", "all_reduce, seq 1"], [7, 8]),
    ],
)
def test_the_full_level_compares_shapes_and_results(
    field: str, expected: list[str], results: list[int], tmp_path: Path
) -> None:
    told = values(_full_level, 2, tmp_path, field)
    for report, found in told:
        assert found == results
        for text in expected:
            assert text in report


def _records(here: Here) -> list[tuple[Any, ...]]:
    install()
    watched = Watched(here)
    watched.call(_sum(4))()
    watched.posted.post(_sum(5))
    box = own_box().read()
    assert box is not None
    watched.close()
    return [(one.op, one.seq, one.count, one.engine, one.state, one.group.name) for one in box.records]


def test_posted_calls_are_recorded(tmp_path: Path) -> None:
    expected = [
        ("all_reduce", 1, 4, "gloo", "completed", "group"),
        ("all_reduce", 2, 5, "gloo", "scheduled", "group"),
    ]
    assert values(_records, 2, tmp_path) == [expected] * 2


def _shapes(here: Here) -> list[str]:
    install()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    watched = Watched(here)
    shape = (4,) if here.rank == 0 else (2, 2)
    watched.call(_native.Description("all_reduce", reduce_op=0, dtype=_FLOAT, count=4, sizes=shape))()
    watched.call(_sum())()
    watched.close()
    return [text for text in logged if "different shapes" in text]


def test_shapes_that_differ_are_logged_once(tmp_path: Path) -> None:
    logged = [text for texts in values(_shapes, 2, tmp_path) for text in texts]
    assert len(logged) == 1
    assert "rank 0 has shape (4,)" in logged[0]
    assert "rank 1 has shape (2, 2)" in logged[0]


def _ends_without_closing(here: Here) -> None:
    """Rank 1 finds the difference, and its program ends."""
    watched = Watched(here)
    if here.rank == 1:
        here.hear()
    watched.posted.post(_sum(4 + here.rank))
    if here.rank == 0:
        here.tell()
        assert watched.told.wait(30)
        here.tell(_facts(watched)["counts"])
    _left.append(watched)


# Stays until the process ends.
_left: list[Watched] = []


def test_a_process_that_ends_leaves_its_posted_groups(tmp_path: Path) -> None:
    world = World(_ends_without_closing, 2, tmp_path, way="program")
    world.told(0)
    world.tell(1)
    assert world.told(0) == [4, 5]
    assert [end.exitcode for end in world.ends()] == [0, 0], world.output(0) + world.output(1)


def _other_purpose(here: Here) -> str:
    """Rank 1 makes a group that moves bytes."""
    info = GroupInfo("group", here.rank, here.size)
    keeper.begin()
    make: Callable[[], object] = partial(posting.join, here.store(), info, 30, lambda: None)
    if here.rank == 1:
        make = partial(shm.join, here.store(), info, 30)
    with pytest.raises(phalanx.GroupError) as caught:
        make()
    keeper.stop()
    return f"{caught.value.code} {caught.value.message}"


def test_ranks_that_make_different_kinds_of_groups(tmp_path: Path) -> None:
    text = (
        "GROUP:PURPOSE the ranks do not make the same kind of group: rank 1 to move the bytes of calls, "
        "ranks 0, 2 to compare calls that another backend carries out"
    )
    assert values(_other_purpose, 3, tmp_path) == [text] * 3


def _dies(here: Here) -> str:
    watched = Watched(here)
    if here.rank == 1:
        # The difference is there for rank 0 to find; this rank is gone by then.
        watched.posted.post(_sum(5))
        os.kill(os.getpid(), signal.SIGKILL)
    here.hear()
    watched.posted.post(_sum(4))
    assert watched.told.wait(30)
    facts = _facts(watched)
    watched.close()
    return str(facts["counts"])


def test_what_a_dead_rank_had_posted_counts(tmp_path: Path) -> None:
    world = World(_dies, 2, tmp_path)
    world.processes[1].join(30)
    world.tell(0)
    ends = world.ends()
    assert ends[0].value == "[4, 5]", ends[0].trace
    assert ends[1].exitcode == -signal.SIGKILL


def _leaves(here: Here) -> int:
    """No memory stays mapped, and no thread is left."""
    before = set(os.listdir("/proc/self/task"))

    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:phalanx")

    stays = Watched(here, "stays")
    for number in range(3):
        watched = Watched(here, f"group {number}")
        watched.call(_sum())()
        watched.close()
        del watched
        # The thread that watches all groups lets go of one that was left.
        until(lambda: num_mapped() == 1, "a segment is still mapped")
    stays.close()
    del stays
    assert num_mapped() == 0
    until(lambda: set(os.listdir("/proc/self/task")) == before, "threads are left")
    return 0


def test_nothing_is_left_of_groups_that_ranks_have_left(tmp_path: Path) -> None:
    ends = run(_leaves, 1, tmp_path)
    assert ends[0].error is None, ends[0].trace
    assert ends[0].value == 0


def _leaves_at_once(here: Here) -> list[int]:
    """Rank 1 posts last, so it is the only one that finds the difference, and leaves right after that."""
    watched = Watched(here)
    if here.rank == 1:
        here.hear()
    watched.posted.post(_sum(4 + here.rank))
    if here.rank == 0:
        here.tell()
        assert watched.told.wait(30)
    watched.posted.close()
    counts: list[int] = _facts(watched)["counts"]
    watched.close()
    return counts


def test_a_rank_that_leaves_reports_what_it_has_found(tmp_path: Path) -> None:
    world = World(_leaves_at_once, 2, tmp_path)
    world.told(0)
    world.tell(1)
    for end in world.ends():
        assert end.value == [4, 5], end.trace


class _Seen(Observer):
    def __init__(self) -> None:
        self.names: list[str] = []

    def coming(self, info: GroupInfo, venue: str, number: int, timeout: float) -> None:
        self.names.append(f"coming {info.name}")

    def joined(self, transport: Any, info: GroupInfo, folder: str) -> None:
        self.names.append(f"joined {info.name}")


def _is_seen(here: Here) -> list[str]:
    seen = _Seen()
    observe(seen)
    Watched(here, "g").close()
    return seen.names


def test_observers_see_that_the_making_of_the_group_has_ended(tmp_path: Path) -> None:
    assert values(_is_seen, 2, tmp_path) == [["coming g", "joined g"]] * 2


def _segment(*, only_posts: bool, size: int = 2) -> _native.Segment:
    tuning = _native.tuning_for(size, size)
    tuning.only_posts = only_posts
    return _native.Segment.create_memfd(size, tuning, b"n" * 16)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_segment_that_is_only_posted_to_is_small(size: int) -> None:
    assert os.fstat(_segment(only_posts=True, size=size).fd).st_size <= size * 64 * 1024


def test_a_segment_is_used_for_what_it_was_made_for() -> None:
    with pytest.raises(ValueError, match="no room for the bytes of calls"):
        _native.GroupEnd(_segment(only_posts=True), 0)
    with pytest.raises(ValueError, match="is for calls whose bytes are moved"):
        _native.Agreement(_segment(only_posts=False), 0, [(0, 0, 0)] * 2, 1)


@pytest.mark.parametrize("peer", [-1, 2, 5000])
def test_the_peer_of_a_message_is_a_rank_of_the_group(peer: int) -> None:
    agreement = _native.Agreement(_segment(only_posts=True), 0, [(0, 0, 0)] * 2, 1)
    with pytest.raises(ValueError, match="expected a rank of the group"):
        agreement.post(_send("recv", peer))
