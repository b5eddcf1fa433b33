"""Reports, line by line."""

from __future__ import annotations

from boxes import Call, collective, message
from jobs import ALL_IS_WELL, NOW, SIX, process, report, seventh

from phalanx.debug.evidence import Written
from phalanx.debug.records import DIED, ENDED_WELL, FAILED
from phalanx.reporters.text import report_lines
from phalanx.reporters.wording import ranks_text


def test_a_rank_that_died_while_others_wait() -> None:
    waiting = [process(rank, *SIX, seventh(at=2.0 + rank / 1000), size=4) for rank in (0, 1, 3)]
    assert report(*waiting, process(2, *SIX, size=4, ending=DIED)) == [
        "job: 4 ranks, 1 died without recording an exit, 3 running",
        "  rank 2 (pid 102): died without recording an exit",
        "  ranks 0, 1, 3 (pids 100, 101, 103): running",
        "group 'default_pg', ranks 0, 1, 2, 3",
        "  ranks 0, 1, 3: in all_reduce, seq 7 (SUM, 4 elements of float32), for 12.3 s, at train.py:20, in step",
        "  rank 2: behind; last completed: all_reduce, seq 6, at train.py:20, in step, 12.4 s ago",
        "Earliest cause: rank 2 (pid 102) died without recording an exit; it had not begun all_reduce, seq 7, of group "
        "'default_pg', for which ranks 0, 1, 3 wait",
    ]


def test_a_rank_that_died_and_the_job_is_over() -> None:
    failed = [process(rank, *SIX, seventh(state="failed", took=0.8), size=3, ending=FAILED) for rank in (0, 1)]
    assert report(*failed, process(2, *SIX, size=3, ending=DIED)) == [
        "job: 3 ranks, 1 died without recording an exit, 2 failed",
        "  rank 2 (pid 102): died without recording an exit",
        "  ranks 0, 1 (pids 100, 101): failed",
        "group 'default_pg', ranks 0, 1, 2",
        "  ranks 0, 1: failed in all_reduce, seq 7 (SUM, 4 elements of float32), after 800 ms, at train.py:20, in step",
        "  rank 2: behind; last completed: all_reduce, seq 6, at train.py:20, in step, 900 ms before the end",
        "Earliest cause: rank 2 (pid 102) died without recording an exit; it had not begun all_reduce, seq 7, of group "
        "'default_pg', for which ranks 0, 1 waited",
    ]


def test_times_before_the_end_of_a_job_in_which_the_last_event_is_a_death() -> None:
    """The calls were over 8 seconds before rank 1 crashed; rank 0 exited 2 seconds later."""
    crash = (10.0, 101, 1, 11)
    assert report(
        process(0, Call(op="barrier", at=1.999, reduce_op=None), ending=ENDED_WELL, ended_at=12.0, deaths=[crash]),
        process(1, Call(op="barrier", at=1.999, reduce_op=None), ending=DIED),
    ) == [
        "job: 2 ranks, 1 killed by SIGSEGV, 1 ended well",
        "  rank 1 (pid 101): killed by SIGSEGV",
        "  rank 0 (pid 100): ended well",
        "group 'default_pg', ranks 0, 1",
        "  ranks 0, 1: done with barrier, seq 1, at train.py:20, in step, 10.0 s before the end",
        "Earliest cause: rank 1 (pid 101) was killed by SIGSEGV; its last completed call is barrier, seq 1, of group "
        "'default_pg', at train.py:20, in step, 10.0 s before the end",
    ]


def test_how_long_a_rank_was_in_a_call_when_it_died() -> None:
    """By the time of its death, if somebody saw that; else it lived at least as long as the others."""
    lines = report(
        process(0, *SIX, size=3, ending=FAILED, ended_at=12.0, deaths=[(5.0, 101, 1, 9)]),
        process(1, *SIX, seventh(), size=3, ending=DIED),
        process(2, *SIX, seventh(line=21), size=3, ending=DIED),
    )
    assert [line for line in lines if line.startswith(("  rank 1: in", "  rank 2: in"))] == [
        "  rank 1: in all_reduce, seq 7 (SUM, 4 elements of float32), for 3.0 s, at train.py:20, in step",
        "  rank 2: in all_reduce, seq 7 (SUM, 4 elements of float32), for at least 10.0 s, at train.py:21, in step",
    ]


def test_one_end_has_one_name() -> None:
    """In the headline and in the last line; a launcher's SIGTERM is no early exit."""
    deaths = [(5.0, 101, 1, 7 << 8), (6.0, 102, 1, 15)]
    lines = report(
        process(0, *SIX, size=3, ending=ENDED_WELL, ended_at=12.0, deaths=deaths),
        process(1, *SIX, size=3, ending=DIED),
        process(2, *SIX, size=3, ending=DIED),
    )
    assert lines[:4] == [
        "job: 3 ranks, 1 left early with exit code 7, 1 killed by SIGTERM, 1 ended well",
        "  rank 1 (pid 101): left early with exit code 7",
        "  rank 2 (pid 102): killed by SIGTERM",
        "  rank 0 (pid 100): ended well",
    ]
    assert lines[-1].startswith("Earliest cause: rank 1 (pid 101) left early with exit code 7; ")


def test_ranks_that_disagree() -> None:
    other = collective("broadcast", 7, peer=0, state="failed", at=2.1, line=33)
    assert report(
        process(0, *SIX, seventh(state="failed"), size=3, ending=FAILED),
        process(1, *SIX, seventh(state="failed"), size=3, ending=FAILED),
        process(2, *SIX, other, size=3, ending=FAILED),
    ) == [
        "job: 3 ranks, all failed",
        "group 'default_pg', ranks 0, 1, 2",
        "  ranks 0, 1: failed in all_reduce, seq 7 (SUM, 4 elements of float32), after 1 ms, at train.py:20, in step",
        "  rank 2: failed in broadcast, seq 7 (root 0, 4 elements of float32), after 1 ms, at train.py:33, in step",
        "  seq 7 is not the same call on all ranks:",
        "    ranks 0, 1: all_reduce (SUM, 4 elements of float32), at train.py:20, in step",
        "    rank 2: broadcast (root 0, 4 elements of float32), at train.py:33, in step",
        "Earliest cause: ranks disagree about seq 7 of group 'default_pg'",
        "  ranks 0, 1 made all_reduce (SUM, 4 elements of float32)",
        "  rank 2 made broadcast (root 0, 4 elements of float32)",
    ]


def test_a_program_of_messages_only() -> None:
    assert report(
        process(0, message("send", 1), message("recv", 1, tag=5, state="started"), size=3),
        process(1, message("recv", 0), size=3, ending=DIED),
        process(2, size=3, ending=ENDED_WELL),
    ) == [
        "job: 3 ranks, 1 died without recording an exit, 1 running, 1 ended well",
        "  rank 1 (pid 101): died without recording an exit",
        "  rank 0 (pid 100): running",
        "  rank 2 (pid 102): ended well",
        "group 'default_pg', ranks 0, 1, 2",
        "  rank 0: in recv from rank 1, seq 1 (tag 5, 4 elements of float32), for 13.3 s, at train.py:20, in step",
        "  rank 1: done with recv from rank 0, seq 1, at train.py:20, in step, 13.3 s ago",
        "  rank 2: no call of this group yet",
        "Earliest cause: rank 1 (pid 101) died without recording an exit; rank 0 waits for it in recv from rank 1, "
        "seq 1, of group 'default_pg'",
    ]


def test_a_receive_from_any_rank_and_more_of_them() -> None:
    calls = [message("recv", -1, seq=seq, state="started", count=1, flags=1) for seq in (1, 2, 3)]
    assert report(process(0, *calls), process(1))[2] == (
        "  rank 0: in recv from any rank, seq 1 (tag 0, 1 element of float32), for 13.3 s, at train.py:20, in step, "
        "2 more under way"
    )


def test_ranks_of_a_group_are_told_as_those_of_the_job() -> None:
    """Rank 1 of the group is rank 5 of the job, and the root."""
    call = collective("broadcast", 1, group="tp", desc="mesh_tp", ranks=(3, 5), rank=0, peer=1, state="started")
    lines = report(process(3, call, size=8), process(5, size=8))
    assert lines == [
        "job: 2 of 8 ranks, all running",
        "group 'tp' (mesh_tp), ranks 3, 5",
        "  rank 3: in broadcast, seq 1 (root 5, 4 elements of float32), for 13.3 s, at train.py:20, in step",
        "  rank 5: behind; no collective of this group yet",
        "Earliest cause: rank 5 (pid 105) is running; it has not begun broadcast, seq 1, of group 'tp' (mesh_tp), for "
        "which rank 3 waits",
    ]


def test_a_rank_without_a_box() -> None:
    lines = report(process(0, *SIX, seventh()))
    assert lines == [
        "job: 1 of 2 ranks, running",
        "group 'default_pg', ranks 0, 1",
        "  rank 0: in all_reduce, seq 7 (SUM, 4 elements of float32), for 12.3 s, at train.py:20, in step",
        "  rank 1: no black box here",
        "Earliest cause: rank 1 has no black box here; it had not begun all_reduce, seq 7, of group 'default_pg', for "
        "which rank 0 waits",
    ]


def test_calls_of_the_backward_pass_and_those_behind_them() -> None:
    calls = [seventh(flags=1 | 2 | 4, line=0)]
    calls += [seventh(seq=seq, state="scheduled", flags=1) for seq in (8, 9)]
    assert report(process(0, *SIX, *calls), process(1, *SIX))[2] == (
        "  rank 0: in all_reduce, seq 7 (SUM, 4 elements of float32), for 12.3 s (in the backward pass, by DDP's "
        "reducer), 2 more queued"
    )


def test_hundreds_of_ranks_in_a_few_lines() -> None:
    waiting = [process(rank, *SIX, seventh(), size=256) for rank in range(256) if rank not in (17, 18, 200)]
    lines = report(*waiting, process(17, *SIX, size=256, ending=FAILED), process(18, *SIX, size=256, ending=DIED))
    assert lines == [
        "job: 255 of 256 ranks, 1 died without recording an exit, 1 failed, 253 running",
        "  rank 18 (pid 118): died without recording an exit",
        "  rank 17 (pid 117): failed",
        "  ranks 0-16, 19-199, 201-255: running",
        "group 'default_pg', ranks 0-255",
        "  ranks 0-16, 19-199, 201-255: in all_reduce, seq 7 (SUM, 4 elements of float32), for 12.3 s, at "
        "train.py:20, in step",
        "  ranks 17, 18: behind; last completed: all_reduce, seq 6, at train.py:20, in step, 12.4 s ago",
        "  rank 200: no black box here",
        "Earliest cause: rank 17 (pid 117) failed and rank 18 (pid 118) died without recording an exit; they had not "
        "begun all_reduce, seq 7, of group 'default_pg', for which ranks 0-16, 19-199, 201-255 wait",
    ]


def test_ranges_of_ranks() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 3]) == "ranks 0, 1, 2, 3"
    assert ranks_text([0, 1, 2, 3, 5]) == "ranks 0-3, 5"
    assert ranks_text([9, 8, 5, 2, 1, 0]) == "ranks 0-2, 5, 8, 9"


def test_many_groups_of_which_most_are_done() -> None:
    done = [Call(group=f"g{number}", at=3.0 + number) for number in range(6)]
    assert report(process(0, *SIX, *done), process(1, *SIX, *done)) == [
        "job: 2 ranks, all running",
        "group 'g5', ranks 0, 1",
        "  ranks 0, 1: done with all_reduce, seq 1, at train.py:20, in step, 6.3 s ago",
        "group 'g4', ranks 0, 1",
        "  ranks 0, 1: done with all_reduce, seq 1, at train.py:20, in step, 7.3 s ago",
        "group 'g3', ranks 0, 1",
        "  ranks 0, 1: done with all_reduce, seq 1, at train.py:20, in step, 8.3 s ago",
        "4 more groups: all done",
        ALL_IS_WELL,
    ]


def test_groups_that_came_one_after_another_under_one_name() -> None:
    """In the second one rank 1 has made no call: its six are those of the first."""
    assert report(process(0, *SIX, Call(seq=1, state="started", at=4.0)), process(1, *SIX))[1:4] == [
        "group 'default_pg', ranks 0, 1",
        "  rank 0: in all_reduce, seq 1 (SUM, 4 elements of float32), for 10.3 s, at train.py:20, in step",
        "  rank 1: behind; no collective of this group yet",
    ]


def test_a_rank_that_was_started_again() -> None:
    lines = report(process(0, *SIX, ending=DIED), process(0, Call(at=9.0), start=2), process(1, Call(at=9.0)))
    assert lines == [
        "job: 2 ranks, all running",
        "  left out: rank 0 (pid 100), of which there are newer processes",
        "group 'default_pg', ranks 0, 1",
        "  ranks 0, 1: done with all_reduce, seq 1, at train.py:20, in step, 5.3 s ago",
        ALL_IS_WELL,
    ]


def test_boxes_without_a_call() -> None:
    assert report(process(0), process(-1, size=0)) == [
        "job: 1 of 2 ranks, 1 process without a rank, all running",
        ALL_IS_WELL,
    ]


def test_what_processes_wrote_and_what_is_no_box() -> None:
    written = Written("report-1.txt", "\n".join(f"line {number}" for number in range(50)), 1)
    lines = report_lines("job", [process(0, size=1)], NOW, written, ["x.box: expected a black box, got something else"])
    assert lines[:4] == [
        "job: 1 rank, running",
        "  left out: x.box: expected a black box, got something else",
        "report-1.txt says (1 more report in the folder):",
        "  line 0",
    ]
    assert lines[-2:] == ["  and 10 more lines", ALL_IS_WELL]
