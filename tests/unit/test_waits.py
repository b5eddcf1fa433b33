"""Who waits for whom: deadlocks found in tables of waits, and threads found in tables of the system."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.debug import thread_looks
from phalanx.debug.deadlocks import Finding, find, still_holds
from phalanx.debug.thread_looks import Sight
from phalanx.debug.waiting import ANYBODY, Acting, GroupState, PeerProcess, Pending, Process, Snapshot, Wait, unpack
from phalanx.transports.waits import Helpers

_SECOND = 1_000_000_000


def _process(rank: int) -> Process:
    return 1000 + rank, 1


class Rank:
    """A process that waits: what it shows after two looks, one second apart."""

    def __init__(self, rank: int, at: int = 10) -> None:
        self.rank, self.at = rank, at
        self.groups: dict[str, GroupState] = {}
        self.waits: list[Wait] = []
        self.acting: list[Acting] = []
        self.told: list[str] = []

    def _state(self, group: str, ranks: Sequence[int]) -> GroupState:
        state = self.groups.setdefault(group, GroupState(group, self.rank, 0, [], {}))
        state.processes.update({rank: PeerProcess(*_process(rank), "") for rank in ranks})
        return state

    def in_flight(self, group: str, seq: int, missing: Sequence[int]) -> Rank:
        """A collective is in flight."""
        state = self._state(group, missing)
        assert state.pending is not None
        state.pending.append(Pending("all_reduce", seq, False, -1, 0, False, list(missing), "call.py:1"))
        self.groups[group] = state._replace(seq=seq)
        return self

    def reduces(self, group: str, seq: int, missing: Sequence[int], **options: bool) -> Rank:
        """A thread waits in a collective."""
        self.in_flight(group, seq, missing)
        return self._waits(group, "all_reduce", seq, **options)

    def has_made(self, group: str, seq: int) -> Rank:
        self.groups[group] = self._state(group, [])._replace(seq=seq)
        return self

    def message(self, op: str, group: str, peer: int, peers: Sequence[int] = (), *, matched: bool = False) -> Rank:
        """A message is in flight. `peers` are the possible senders of one from any rank."""
        missing = list(peers) or [peer]
        state = self._state(group, missing)
        assert state.pending is not None
        state.pending.append(Pending(op, 1, True, peer, 5, matched, missing, "call.py:1"))
        return self

    def waits_for_message(self, op: str, group: str, peer: int, peers: Sequence[int] = (), **options: bool) -> Rank:
        self.message(op, group, peer, peers, **options)
        return self._waits(group, op, 1, peer)

    def waits_for_engine(self, group: str, absent: Sequence[int], *, is_any: bool = False) -> Rank:
        """A thread waits for a call of another engine."""
        self._state(group, absent)
        wait = Wait(-1, 1, "", group, "all_reduce", 1, False, -1, 0, False, "call.py:1", list(absent), is_any)
        self.waits.append(wait)
        return self

    def _waits(self, group: str, op: str, seq: int, peer: int = -1, *, is_bounded: bool = False) -> Rank:
        number = len(self.waits) + 1
        is_message = op != "all_reduce"
        self.waits.append(
            Wait(number, 1, "", group, op, seq, is_message, peer, 5, is_bounded, "call.py:1", None, False)
        )
        return self

    def acts(self, *, is_main: bool = False) -> Rank:
        self.acting.append(Acting(7, is_main, "the thread 'helper', that sleeps"))
        return self

    def snapshot(self, last: int = 1) -> Snapshot:
        same = self.at * _SECOND
        began = same + last * _SECOND
        quiet = 0 if self.acting else same
        return Snapshot(
            _process(self.rank),
            self.rank,
            began,
            began + 1,
            same,
            quiet,
            self.groups,
            self.waits,
            self.acting,
            self.told,
        )


def _find(*ranks: Rank, own: int = 0, last: int = 1) -> Finding | None:
    return find(_process(own), {_process(rank.rank): rank.snapshot(last) for rank in ranks})


def _sure(*ranks: Rank, own: int = 0) -> Finding:
    finding = _find(*ranks, own=own)
    assert finding is not None
    assert finding.cycle.is_sure
    return finding


def test_two_groups_in_different_orders() -> None:
    ranks = [Rank(0).reduces("a", 1, [1]), Rank(1).reduces("b", 1, [0])]
    # Each has made none of the other one's calls.
    ranks[0].has_made("b", 0)
    ranks[1].has_made("a", 0)
    findings = [_sure(*ranks, own=own) for own in (0, 1)]
    assert findings[0].cycle == findings[1].cycle
    assert findings[0].name == findings[1].name
    assert findings[0].cycle.kind == "ORDER"
    assert findings[0].cycle.lines == [
        "  rank 0 waits for rank 1 in all_reduce, seq 1, group 'a', at call.py:1",
        "  rank 1 waits for rank 0 in all_reduce, seq 1, group 'b', at call.py:1",
    ]


def test_a_call_that_was_made_asynchronously_is_carried_on() -> None:
    ranks = [
        Rank(0).reduces("a", 1, [1]).has_made("b", 0),
        Rank(1).reduces("b", 1, [0]).in_flight("a", 1, []),
    ]
    assert _find(*ranks) is None


def test_a_call_in_flight_waits_for_whom_its_rank_waits() -> None:
    """Rank 1 has made the call, in which rank 2 is missing, and rank 2 waits for rank 0."""
    ranks = [
        Rank(0).reduces("a", 1, [1]).has_made("b", 0),
        Rank(1).reduces("a", 1, [2]),
        Rank(2).reduces("b", 1, [0]).has_made("a", 0),
    ]
    cycle = _sure(*ranks).cycle
    assert cycle.lines[0] == "  rank 0 waits for rank 2 in all_reduce, seq 1, group 'a', at call.py:1"
    assert len(cycle.lines) == 2
    assert _sure(*ranks, own=1).cycle.lines[2].endswith("group 'a', at call.py:1, behind the cycle")


def test_ranks_that_wait_for_each_other_s_bytes_are_no_deadlock() -> None:
    """Both have made the call: their progress threads are about to go on with it."""
    assert _find(Rank(0).reduces("a", 1, [1]), Rank(1).reduces("a", 1, [0])) is None


def test_a_rank_that_shows_nothing_can_act() -> None:
    ranks = [Rank(0).reduces("a", 1, [1]), Rank(1).reduces("b", 1, [2]).has_made("a", 0)]
    assert _find(*ranks) is None


def test_a_rank_without_a_wait_can_act() -> None:
    assert _find(Rank(0).reduces("a", 1, [1]), Rank(1).has_made("a", 0)) is None


def test_one_that_can_not_come_is_enough_for_a_collective() -> None:
    ranks = [
        Rank(0).reduces("a", 1, [1, 2]).has_made("b", 0),
        Rank(1).reduces("b", 1, [0]).has_made("a", 0),
    ]
    assert _sure(*ranks).cycle.kind == "ORDER"


def test_a_receive_from_any_rank_needs_all_of_them_to_be_stuck() -> None:
    ranks = [
        Rank(0).waits_for_message("recv", "a", ANYBODY, [1, 2]),
        Rank(1).waits_for_message("recv", "a", 0),
        Rank(2).waits_for_message("recv", "a", 0),
    ]
    cycle = _sure(*ranks).cycle
    assert cycle.kind == "P2P"
    assert len(cycle.lines) == 3
    assert _find(*ranks[:2]) is None


def test_a_message_that_moves_is_no_deadlock() -> None:
    assert (
        _find(Rank(0).waits_for_message("recv", "a", 1, matched=True), Rank(1).waits_for_message("recv", "a", 0))
        is None
    )


@pytest.mark.parametrize("own", [0, 1])
def test_a_message_of_which_both_sides_were_made_is_no_deadlock(own: int) -> None:
    ranks = [
        Rank(0).waits_for_message("recv", "a", 1),
        Rank(1).waits_for_message("recv", "a", 0).message("send", "a", 0),
    ]
    assert _find(*ranks, own=own) is None


def test_a_rank_that_waits_for_itself() -> None:
    cycle = _sure(Rank(0).waits_for_message("recv", "a", 0)).cycle
    assert cycle.head == "rank 0 waits for itself, and no other thread of its process can make the missing calls"


def test_a_call_in_flight_may_let_a_thread_go_on() -> None:
    """Rank 1 also has a call in flight for which rank 2 may come at any time."""
    ranks = [
        Rank(0).reduces("a", 1, [1]).has_made("b", 0),
        Rank(1).reduces("b", 1, [0]).has_made("a", 0).in_flight("c", 1, [2]),
    ]
    assert _find(*ranks) is None


def test_looks_that_have_no_moment_in_common_say_nothing() -> None:
    ranks = [
        Rank(0, at=10).reduces("a", 1, [1]).has_made("b", 0),
        Rank(1, at=12).reduces("b", 1, [0]).has_made("a", 0),
    ]
    assert _find(*ranks, last=1) is None
    assert _find(*ranks, last=2) is not None


def test_a_thread_that_can_act_makes_it_probable_after_a_while() -> None:
    ranks = [
        Rank(0).reduces("a", 1, [1]).has_made("b", 0),
        Rank(1).reduces("b", 1, [0]).has_made("a", 0).acts(),
    ]
    assert _find(*ranks) is None
    finding = _find(*ranks, last=6)
    assert finding is not None
    assert not finding.cycle.is_sure
    assert finding.cycle.head == "probably a deadlock: ranks 0, 1 wait for each other"
    assert "  rank 1 also has the thread 'helper', that sleeps, which could still act" in finding.cycle.lines


def test_a_main_thread_that_can_act_is_not_even_probable() -> None:
    ranks = [
        Rank(0).reduces("a", 1, [1]).has_made("b", 0),
        Rank(1).reduces("b", 1, [0]).has_made("a", 0).acts(is_main=True),
    ]
    assert _find(*ranks, last=60) is None


def test_a_wait_that_is_given_up_makes_it_probable() -> None:
    ranks = [
        Rank(0).reduces("a", 1, [1], is_bounded=True).has_made("b", 0),
        Rank(1).reduces("b", 1, [0]).has_made("a", 0),
    ]
    assert _find(*ranks) is None
    finding = _find(*ranks, last=6)
    assert finding is not None
    assert "  the thread of rank 0 that waits at call.py:1 gives up after a while" in finding.cycle.lines


def test_calls_of_another_engine() -> None:
    ranks = [Rank(0).waits_for_engine("a", [1]), Rank(1).reduces("b", 1, [0])]
    ranks[0].has_made("b", 0)
    assert _sure(*ranks).cycle.kind == "ORDER"
    ranks[0].waits[0] = ranks[0].waits[0]._replace(absent=[])
    assert _find(*ranks) is None


def test_a_deadlock_holds_while_members_wait_or_have_told_of_it() -> None:
    ranks = [
        Rank(0).reduces("a", 1, [1]).has_made("b", 0),
        Rank(1).reduces("b", 1, [0]).has_made("a", 0),
    ]
    finding = _sure(*ranks)
    shown = {_process(rank.rank): rank.snapshot() for rank in ranks}
    assert still_holds(finding, shown)
    ranks[1].waits.clear()
    shown[_process(1)] = ranks[1].snapshot()
    assert not still_holds(finding, shown)
    ranks[1].told.append(finding.name)
    assert still_holds(finding, shown)
    assert not still_holds(finding, {_process(0): ranks[0].snapshot()})


def test_a_snapshot_as_a_file() -> None:
    rank = Rank(3).reduces("a", 4, [1, 2]).waits_for_message("recv", "b", ANYBODY, [0, 1]).acts()
    rank.waits_for_engine("c", [1])
    rank.told.append("one")
    assert unpack(rank.snapshot().pack()) == rank.snapshot()


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1, 2]", '["a", 0, 0, 0, 0, 0, {}, [], [], []]'])
def test_a_file_that_is_no_snapshot(text: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        unpack(text.encode())


_PARKED = Sight("python", "S", (3, 4), f"{thread_looks._FUTEX} 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7f 0x7f")


def _acts(sight: Sight, before: Sight | None = None) -> bool:
    found = thread_looks.acting({5: before or sight}, {5: sight}, set(), set(), 1)
    return bool(found)


def test_a_thread_that_waits_for_a_lock_without_a_timeout_is_parked() -> None:
    assert not _acts(_PARKED)


def test_a_thread_that_was_not_there_before_can_act() -> None:
    assert thread_looks.acting({}, {5: _PARKED}, set(), set(), 1)


@pytest.mark.parametrize(
    "sight",
    [
        _PARKED._replace(syscall="running"),
        _PARKED._replace(syscall=""),
        # With a timeout, of another process, and another command.
        _PARKED._replace(syscall=_PARKED.syscall.replace("0x189 0x0 0x0", "0x189 0x0 0x7f")),
        _PARKED._replace(syscall=_PARKED.syscall.replace("0x189", "0x109")),
        _PARKED._replace(syscall=_PARKED.syscall.replace("0x189", "0x81")),
        _PARKED._replace(syscall="7 0x0 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f"),
    ],
)
def test_other_sleepers_can_act(sight: Sight) -> None:
    assert _acts(sight)


def test_a_thread_that_has_run_in_between_can_act() -> None:
    assert _acts(_PARKED, before=_PARKED._replace(switches=(2, 4)))


def test_helpers_of_torch_and_ours_can_not_act_but_those_of_autograd_can() -> None:
    running = Sight("pt_tcpstore_uv", "R", (1, 1), "running")
    assert not _acts(running)
    assert not _acts(running._replace(name="phalanx"))
    assert _acts(running._replace(name="pt_autograd_0"))
    assert _acts(running._replace(name="python"))


def test_threads_of_an_engine_can_act_unless_all_their_calls_are_known() -> None:
    sights = {5: Sight("pt_gloo_runloop", "S", (1, 1), "running"), 6: Sight("python", "S", (1, 1), "running")}
    assert len(thread_looks.acting(sights, sights, set(), set(), 1)) == 2
    assert not thread_looks.acting(sights, sights, set(), set(), 1, Helpers(("pt_gloo",), frozenset({6})))


def test_a_thread_with_the_name_of_the_program_is_no_helper() -> None:
    """The console command is called as our threads are, and its threads inherit the name."""
    running = Sight("phalanx", "R", (1, 1), "running")
    found = thread_looks.acting({}, {1: running, 5: running}, set(), set(), 1)
    assert [thread.thread for thread in found] == [1, 5]


def test_threads_of_this_process() -> None:
    lock = threading.Lock()
    waiting = threading.Thread(target=lock.acquire)
    with lock:
        waiting.start()
        while not thread_looks.look()[waiting.native_id or 0].is_parked:
            pass
        assert threading.get_native_id() in thread_looks.look()
    waiting.join()
    # The system may take a moment to forget it.
    while waiting.native_id in thread_looks.look():
        pass


def test_a_task_that_ends_meanwhile_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "17").mkdir()
    assert thread_looks.look(tmp_path) == {}
