"""What a report calls the earliest cause."""

from __future__ import annotations

from typing import Any

import pytest
from boxes import Call, collective, message
from jobs import ALL_IS_WELL, SIX, process, report, seventh

from phalanx.debug.job import Process
from phalanx.debug.records import DIED, ENDED_WELL, FAILED


def test_a_job_that_was_killed_while_it_hung() -> None:
    """All died, and one had kept the others waiting."""
    lines = report(
        process(0, *SIX, seventh(), size=3, ending=DIED),
        process(1, *SIX, size=3, ending=DIED),
        process(2, *SIX, seventh(at=3.0), size=3, ending=DIED),
    )
    assert lines[0] == "job: 3 ranks, all died without recording an exit"
    assert lines[2].endswith("for at least 1.0 s, at train.py:20, in step")
    assert lines[-1] == (
        "Earliest cause: rank 1 (pid 101) died without recording an exit; it had not begun all_reduce, seq 7, of group "
        "'default_pg', for which ranks 0, 2 waited"
    )


def test_a_rank_that_is_elsewhere() -> None:
    assert report(process(0, *SIX, seventh()), process(1, *SIX))[-2:] == [
        "  rank 1: behind; last completed: all_reduce, seq 6, at train.py:20, in step, 12.4 s ago",
        "Earliest cause: rank 1 (pid 101) is running; it has not begun all_reduce, seq 7, of group 'default_pg', for "
        "which rank 0 waits; its last completed call is all_reduce, seq 6, of group 'default_pg', at train.py:20, in "
        "step, 12.4 s ago",
    ]


def test_a_rank_that_ended_well_too_early() -> None:
    assert report(process(0, *SIX, seventh()), process(1, *SIX, ending=ENDED_WELL))[-1] == (
        "Earliest cause: rank 1 (pid 101) ended well; it had not begun all_reduce, seq 7, of group 'default_pg', for "
        "which rank 0 waits"
    )


def test_a_rank_that_came_too_late() -> None:
    timed_out = seventh(state="failed", took=5.0, timeout_ms=5000)
    late = seventh(state="failed", began=False, at=9.0, took=0.0)
    assert report(
        process(0, *SIX, timed_out, ending=FAILED),
        process(1, *SIX, late, ending=FAILED),
    ) == [
        "job: 2 ranks, all failed",
        "group 'default_pg', ranks 0, 1",
        "  rank 0: failed in all_reduce, seq 7 (SUM, 4 elements of float32), after 5.0 s, at train.py:20, in step",
        "  rank 1: behind; came to all_reduce, seq 7 (SUM, 4 elements of float32), when the group was broken already, "
        "at the end, at train.py:20, in step",
        "Earliest cause: rank 1 (pid 101) failed; it had not begun all_reduce, seq 7, of group 'default_pg', for which "
        "rank 0 waited; it came when the group was broken already, at the end",
    ]


def test_a_rank_that_died_in_the_call_is_to_blame_and_not_the_slow_one() -> None:
    assert report(
        process(0, *SIX, seventh(state="failed", took=1.0), size=3, ending=FAILED),
        process(1, *SIX, seventh(), size=3, ending=DIED),
        process(2, *SIX, seventh(state="failed", began=False, at=6.0), size=3, ending=FAILED),
    )[-1] == (
        "Earliest cause: rank 1 (pid 101) died without recording an exit in all_reduce, seq 7, of group 'default_pg', "
        "which then failed on rank 0"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"count": 5}, "all_reduce (SUM, 5 elements of float32)"),
        ({"dtype": "int64"}, "all_reduce (SUM, 4 elements of int64)"),
        ({"dtype": None}, "all_reduce (SUM, 4 elements)"),
        ({"reduce_op": "MAX"}, "all_reduce (MAX, 4 elements of float32)"),
        ({"listed": True, "sizes": (3, 1)}, "all_reduce (SUM, 4 elements of float32, sizes 3, 1)"),
    ],
)
def test_every_part_of_a_signature_counts(fields: dict[str, object], said: str) -> None:
    one, other = seventh(state="failed"), seventh(state="failed", **fields)
    lines = report(process(0, *SIX, one, ending=FAILED), process(1, *SIX, other, ending=FAILED))
    assert lines[-1] == f"  rank 1 made {said}"
    # A root that leaves at once has completed its call; where all have, they did not disagree.
    one.state = "completed"
    assert report(process(0, *SIX, one), process(1, *SIX, other))[-1] == f"  rank 1 made {said}"
    other.state = "completed"
    assert report(process(0, *SIX, one), process(1, *SIX, other))[-1] == ALL_IS_WELL


def test_a_disagreement_is_not_put_down_to_those_who_had_not_come_yet() -> None:
    lines = report(
        process(0, *SIX, seventh(state="failed"), size=3, ending=FAILED),
        process(1, *SIX, seventh(state="failed", count=9), size=3, ending=FAILED),
        process(2, *SIX, size=3, ending=DIED),
    )
    assert lines[-3] == "Earliest cause: ranks disagree about seq 7 of group 'default_pg'"


def test_what_came_first_is_the_cause() -> None:
    """A rank died in one group, and later others disagreed in another one."""
    failed = seventh(state="failed", at=2.0, took=0.5)
    first = collective("all_reduce", 1, group="b", ranks=(0, 1), state="failed", at=5.0)
    second = collective("barrier", 1, group="b", ranks=(0, 1), state="failed", at=5.0)
    processes = [
        process(0, *SIX, failed, first, size=3, ending=FAILED),
        process(1, *SIX, failed, second, size=3, ending=FAILED),
        process(2, *SIX, size=3, ending=DIED),
    ]
    assert report(*processes)[-1].startswith("Earliest cause: rank 2 (pid 102) died without recording an exit")


def test_groups_in_different_orders() -> None:
    other = collective("all_reduce", 1, group="b", state="started", at=2.0)
    assert report(process(0, *SIX, other), process(1, *SIX, seventh(line=30))) == [
        "job: 2 ranks, all running",
        "group 'default_pg', ranks 0, 1",
        "  rank 0: behind; last completed: all_reduce, seq 6, at train.py:20, in step, 12.4 s ago",
        "  rank 1: in all_reduce, seq 7 (SUM, 4 elements of float32), for 12.3 s, at train.py:30, in step",
        "group 'b', ranks 0, 1",
        "  rank 0: in all_reduce, seq 1 (SUM, 4 elements of float32), for 12.3 s, at train.py:20, in step",
        "  rank 1: behind; no collective of this group yet",
        "Earliest cause: ranks 0, 1 wait for each other",
        "  rank 0 for rank 1 in all_reduce, seq 1, of group 'b', at train.py:20, in step",
        "  rank 1 for rank 0 in all_reduce, seq 7, of group 'default_pg', at train.py:30, in step",
    ]


def test_who_keeps_a_chain_of_ranks_waiting() -> None:
    """Rank 0 waits for 1 in one group, 1 for 2 in another; 2 does not wait."""
    first = collective("barrier", 1, group="a", ranks=(0, 1), count=0, dtype=None, state="started", at=2.0)
    second = collective("barrier", 1, group="b", ranks=(1, 2), rank=0, count=0, dtype=None, state="started", at=2.0)
    lines = report(process(0, first, size=3), process(1, second, size=3), process(2, size=3))
    assert lines == [
        "job: 3 ranks, all running",
        "group 'a', ranks 0, 1",
        "  rank 0: in barrier, seq 1, for 12.3 s, at train.py:20, in step",
        "  rank 1: behind; no collective of this group yet",
        "group 'b', ranks 1, 2",
        "  rank 1: in barrier, seq 1, for 12.3 s, at train.py:20, in step",
        "  rank 2: behind; no collective of this group yet",
        "Earliest cause: rank 2 (pid 102) is running; it has not begun barrier, seq 1, of group 'b', for which rank 1 "
        "waits",
    ]


def test_a_receive_that_was_asked_for_in_time_is_no_wait() -> None:
    """Rank 0 has a receive under way, and may do something else; rank 1 is in its call."""
    ahead = message("recv", 1, state="started", flags=1)
    assert report(process(0, *SIX, ahead), process(1, *SIX, seventh()))[-1] == (
        "Earliest cause: rank 0 (pid 100) is running; it has not begun all_reduce, seq 7, of group 'default_pg', for "
        "which rank 1 waits; it is in recv from rank 1, seq 1, of group 'default_pg', at train.py:20, in step"
    )


def test_messages_that_cross() -> None:
    sends = [process(rank, message("send", 1 - rank, state="started", count=10**6)) for rank in (0, 1)]
    assert report(*sends)[-3:] == [
        "Earliest cause: ranks 0, 1 wait for each other",
        "  rank 0 for rank 1 in send to rank 1, seq 1, of group 'default_pg', at train.py:20, in step",
        "  rank 1 for rank 0 in send to rank 0, seq 1, of group 'default_pg', at train.py:20, in step",
    ]


@pytest.mark.parametrize("source", [0, -1])
def test_two_sides_of_a_message_do_not_wait_for_each_other(source: int) -> None:
    sender = process(0, message("send", 1, tag=2, state="started"))
    receiver = process(1, message("recv", source, tag=2, state="started"))
    assert report(sender, receiver)[-1] == ALL_IS_WELL


def test_of_a_broadcast_the_root_is_missed() -> None:
    call = collective("broadcast", 1, peer=1, state="started")
    lines = report(process(0, call, size=3), process(1, size=3), process(2, size=3))
    assert lines[-1].startswith("Earliest cause: rank 1 (pid 101) is running")


def test_a_ring_of_hundreds_that_wait_for_each_other() -> None:
    ring = [process(rank, message("recv", (rank - 1) % 200, state="started"), size=200) for rank in range(200)]
    lines = report(*ring)
    assert len(lines) == 2 + 20 + 1 + 1 + 8 + 1
    assert lines[22] == "  and 180 more lines, of ranks 20-199"
    assert lines[23] == "Earliest cause: ranks 0-199 wait for each other"
    assert lines[-1] == "  and 192 more lines like these"


def test_a_running_job_that_has_just_begun_a_call() -> None:
    lines = report(process(0, *SIX, seventh(at=14.29)), process(1, *SIX))
    assert lines[2].endswith("for 10 ms, at train.py:20, in step")
    assert lines[-1] == ALL_IS_WELL


def test_a_process_that_failed_by_itself() -> None:
    lines = report(process(0, *SIX, ending=ENDED_WELL), process(1, *SIX, ending=FAILED))
    assert lines[-1] == (
        "Earliest cause: rank 1 (pid 101) failed; its last completed call is all_reduce, seq 6, of group "
        "'default_pg', at train.py:20, in step, at the end"
    )
    assert report(process(0, ending=FAILED), process(1))[-1] == (
        "Earliest cause: rank 0 (pid 100) failed before it had completed a call"
    )


def test_a_call_that_failed_and_nobody_knows_why() -> None:
    failed = [process(rank, *SIX, seventh(state="failed", at=2.0 + rank), ending=FAILED) for rank in (0, 1)]
    assert report(*failed)[-1] == (
        "Earliest cause: all_reduce, seq 7, of group 'default_pg', at train.py:20, in step, failed first, on rank 0; "
        "the boxes do not tell why"
    )


# What follows has the dates of boxes of version 2. Ranks are processes 100, 101, 102; signals are statuses of waitpid.

LOST = {"state": "failed", "failure": "lost"}
LEFT = {"state": "failed", "failure": "left"}
GAVE_UP = {"state": "failed", "failure": "timeout", "took": 5.0, "timeout_ms": 5000}
NOT_BEGUN = "it had not begun all_reduce, seq 7, of group 'default_pg', for which"
SIGKILL, SIGSEGV, SIGTERM = 9, 11, 15


def _cause(*processes: Process) -> str:
    return next(line for line in report(*processes) if line.startswith("Earliest cause: ")).partition(": ")[2]


def test_a_rank_that_a_launcher_ended_after_others_gave_up() -> None:
    gave_up = seventh(**GAVE_UP)
    ended: dict[str, Any] = {
        "size": 3,
        "ending": FAILED,
        "ended_at": 7.1,
        "how": 3,
        "exception": "CallTimeout: …",
        "status": 1 << 8,
    }
    assert _cause(
        process(0, *SIX, gave_up, **ended, deaths=[(8.0, 102, 1, SIGTERM)]),
        process(1, *SIX, gave_up, **ended),
        process(2, *SIX, size=3, ending=DIED),
    ) == (f"rank 2 (pid 102) was still running; {NOT_BEGUN} ranks 0, 1 waited until their timeout")


def test_a_rank_that_hangs_and_one_that_crashes_before_anybody_gives_up() -> None:
    assert _cause(
        process(0, *SIX, seventh(**LOST, blamed=1, took=1.0), size=3, ending=DIED, deaths=[(2.9, 101, 1, SIGSEGV)]),
        process(1, *SIX, size=3, ending=DIED),
        process(2, *SIX, size=3, ending=DIED),
    ) == (f"rank 1 (pid 101) was killed by SIGSEGV; {NOT_BEGUN} rank 0 waited")


def test_survivors_that_a_launcher_ended_in_their_own_code() -> None:
    assert _cause(
        process(0, *SIX, size=3, ending=DIED, deaths=[(3.0, 101, 1, SIGKILL), (3.1, 102, 1, SIGTERM)]),
        process(1, *SIX, size=3, ending=DIED),
        process(2, *SIX, size=3, ending=DIED, deaths=[(3.0, 101, 1, SIGKILL)]),
    ).startswith("rank 1 (pid 101) was killed by SIGKILL; its last completed call is all_reduce, seq 6")


def test_an_exception_is_to_blame_and_not_the_rank_that_waits_elsewhere() -> None:
    """Ranks 0 and 1 wait in different groups; rank 2 raises; rank 0 fails and leaves rank 1 alone."""
    inner = collective(
        "all_reduce", 1, group="b", identity="b", ranks=(0, 1), rank=1, **LEFT, blamed=0, at=2.0, took=2.0
    )
    assert _cause(
        process(
            0, *SIX, seventh(**LEFT, blamed=2, took=1.5), size=3, ending=FAILED, ended_at=3.6, how=3, exception="P"
        ),
        process(1, *SIX, inner, size=3, ending=FAILED, ended_at=4.1, how=3, exception="PeerLost"),
        process(2, *SIX, size=3, ending=FAILED, ended_at=3.4, how=2, exception="LookupError: no shard"),
    ) == (f"rank 2 (pid 102) raised LookupError: no shard; {NOT_BEGUN} rank 0 waited")


@pytest.mark.parametrize(("code", "ending"), [(0, ENDED_WELL), (3, ENDED_WELL)])
def test_an_early_exit(code: int, ending: str) -> None:
    assert _cause(
        process(0, *SIX, seventh(**LEFT, blamed=1, took=1.0), ending=FAILED, ended_at=3.1, how=3, exception="PeerLost"),
        process(1, *SIX, ending=ending, ended_at=2.9, how=1, status=code << 8),
    ) == (f"rank 1 (pid 101) left early with exit code {code}; {NOT_BEGUN} rank 0 waited")


def test_an_exit_with_code_0_that_nobody_minded() -> None:
    assert (
        report(process(0, *SIX, ending=ENDED_WELL, ended_at=3.0, how=1, status=0), process(1, *SIX))[-1] == ALL_IS_WELL
    )


def test_a_rank_that_leaves_the_group_and_goes_on() -> None:
    assert _cause(
        process(0, *SIX, seventh(**LEFT, blamed=1, took=1.0), ending=FAILED, ended_at=3.1, how=3, exception="PeerLost"),
        process(1, *SIX),
    ).startswith(f"rank 1 (pid 101) left the group early; {NOT_BEGUN} rank 0 waited")


def test_a_crash_of_a_rank_that_had_seen_a_failure_before() -> None:
    """However late the first death is noted: who died with a failed call in its box is not the cause."""
    assert _cause(
        process(0, *SIX, seventh(**LOST, blamed=2, took=0.1), size=3, ending=DIED),
        process(1, *SIX, size=3, ending=DIED, deaths=[(4.0, 100, 1, SIGKILL), (4.0, 102, 1, SIGKILL)]),
        process(2, *SIX, size=3, ending=DIED),
    ) == (f"rank 2 (pid 102) was killed by SIGKILL; {NOT_BEGUN} rank 0 waited")


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_a_death_that_ranks_of_two_groups_saw_before_it_was_noted(first: str, second: str) -> None:
    """The sooner of the two failures is not the cause: the death is."""
    seen = collective("barrier", 1, group=first, identity=first, **LOST, blamed=2, at=2.0, took=0.1)
    seen_later = collective("barrier", 1, group=second, identity=second, **LOST, blamed=2, at=2.0, took=0.2)
    assert _cause(
        process(0, *SIX, seen, size=3, ending=FAILED, ended_at=3.0, how=3, exception="PeerLost"),
        process(1, *SIX, seen_later, size=3, ending=FAILED, ended_at=3.0, how=3, exception="PeerLost"),
        process(2, *SIX, size=3, ending=DIED),
    ).startswith("rank 2 (pid 102) died without recording an exit; ")


def test_ranks_that_waited_for_each_other_until_one_gave_up() -> None:
    first = collective("all_reduce", 1, group="a", identity="a", **GAVE_UP, at=2.0)
    second = collective("all_reduce", 1, group="b", identity="b", **GAVE_UP, at=2.1)
    lines = report(
        process(0, *SIX, first, ending=FAILED, ended_at=7.2, how=3, exception="CallTimeout"),
        process(1, *SIX, second, ending=FAILED, ended_at=7.3, how=3, exception="CallTimeout"),
    )
    assert lines[-3:] == [
        "Earliest cause: ranks 0, 1 waited for each other",
        "  rank 0 for rank 1 in all_reduce, seq 1, of group 'a', at train.py:20, in step",
        "  rank 1 for rank 0 in all_reduce, seq 1, of group 'b', at train.py:20, in step",
    ]


def test_a_job_that_hung_and_was_ended_from_outside() -> None:
    assert _cause(
        process(0, *SIX, seventh(), size=3, ending=DIED),
        process(1, *SIX, seventh(), size=3, ending=DIED, deaths=[(13.0, 100, 1, SIGTERM)]),
        process(2, *SIX, size=3, ending=DIED, deaths=[(13.0, 100, 1, SIGTERM), (13.1, 101, 1, SIGTERM)]),
    ) == (f"rank 2 (pid 102) was still running; {NOT_BEGUN} ranks 0, 1 waited")


def test_a_healthy_job_that_was_ended_from_outside() -> None:
    assert _cause(
        process(0, *SIX, ending=DIED),
        process(1, *SIX, ending=DIED, deaths=[(13.0, 100, 1, SIGTERM)]),
    ).startswith("rank 0 (pid 100) was killed by SIGTERM, and rank 1 (pid 101) after it; no rank had failed before")


def test_an_abort() -> None:
    aborted = seventh(state="failed", failure="aborted", blamed=1, took=1.0)
    assert _cause(
        process(0, *SIX, aborted, ending=FAILED, ended_at=3.1, how=3, exception="Aborted"),
        process(1, *SIX),
    ).startswith("rank 1 aborted group 'default_pg'; first to fail was all_reduce, seq 7")


def test_more_calls_in_flight_than_a_box_keeps() -> None:
    """Rank 0 has made all of them, and waits in the first, whose record is gone; rank 1 has made the first."""
    queued = [Call(seq=seq, state="scheduled", at=1.0, flags=1) for seq in range(1, 25)]
    slow = Call(seq=1, state="started", at=1.0)
    lines = report(
        process(0, *queued, capacity=16, num_hidden=8),
        process(1, slow, capacity=16),
    )
    assert lines[1:] == [
        "group 'default_pg', ranks 0, 1",
        "  rank 0: in a call whose record was overwritten: the black box keeps 16 calls, more are in flight; seq 9 to "
        "24 are queued",
        "  rank 1: in all_reduce, seq 1 (SUM, 4 elements of float32), for 13.3 s, at train.py:20, in step",
        "Earliest cause: unknown: rank 0 had more calls in flight than a black box keeps (16), and who is behind in "
        "group 'default_pg' can't be told; set PHALANX_BLACK_BOX to a larger number",
    ]


def test_two_groups_of_the_same_name_and_ranks() -> None:
    """Two meshes with a dimension "dp": what ranks do in one of them says nothing of the other."""
    one = [collective("all_reduce", seq, group="dp", identity="1", at=1.0 + seq) for seq in (1, 2)]
    other = [collective("barrier", 1, group="dp", identity="2", at=2.5)]
    assert report(process(0, *one, *other), process(1, *one, *other)) == [
        "job: 2 ranks, all running",
        "group 'dp', ranks 0, 1",
        "  ranks 0, 1: done with all_reduce, seq 2, at train.py:20, in step, 11.3 s ago",
        "group 'dp' (second of this name), ranks 0, 1",
        "  ranks 0, 1: done with barrier, seq 1, at train.py:20, in step, 11.8 s ago",
        ALL_IS_WELL,
    ]


def test_a_rank_that_ended_by_itself_was_not_killed_by_the_signal_of_another() -> None:
    lost = seventh(state="failed", failure="lost", blamed=1, at=3.0)
    cause = _cause(
        process(0, *SIX, lost, ending=FAILED, how=1, status=0, ended_at=4.0, deaths=[(3.0, 101, 1, SIGTERM)]),
        process(1, *SIX, ending=DIED),
    )
    assert cause.startswith("rank 1 (pid 101) was killed by SIGTERM; it had not begun ")
