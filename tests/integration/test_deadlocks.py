"""Ranks that wait for each other are told so while they wait, and at their timeouts. Ranks that take long never are."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import End, Gate, Here, World, place, run, until

import phalanx
from phalanx.debug.observing import wait_watch
from phalanx.debug.own_box import own_box
from phalanx.log import logger
from phalanx.transports import posting, waits
from phalanx.types import GroupInfo

# Seconds: long enough for a deadlock to be found on a machine that is busy.
_TIMEOUT = 7.0
# Seconds, of tests in which nothing is to run into a timeout.
_PATIENCE = 40.0
# Looks of the rank that waits, in which a deadlock would have been found.
_LOOKS = 6
_NEXT = "  Next: make all ranks issue the calls of these groups in the same order, or asynchronously"
_NEXT_P2P = "  Next: let one side receive first, or use isend and irecv, or batch_isend_irecv"


class Outcome(NamedTuple):
    """What became of the calls of a rank, and what was logged meanwhile."""

    error: phalanx.PhalanxError | None
    warnings: list[str]


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Groups:
    """The groups of a rank, by name, and what the job's folder shows."""

    def __init__(self, here: Here, timeout: float = _TIMEOUT) -> None:
        self.here = here
        self.rank = here.rank
        self.gate = Gate(here)
        self.warnings = Warnings()
        logger.addHandler(self.warnings)
        here.init(timeout=timeout)
        self.a, self.b, self.c = (dist.new_group(timeout=timedelta(seconds=timeout)) for _ in range(3))
        dist.barrier()

    def reduce(self, group: dist.ProcessGroup, **options: Any) -> Any:
        return dist.all_reduce(torch.ones(2), group=group, **options)

    def looks_of_peers(self) -> int:
        """How often peers that wait have looked around, summed up over all calls of this."""
        folder = own_box().folder
        assert folder is not None
        for path in folder.glob("*.waits"):
            with contextlib.suppress(OSError):
                self._seen.add((path.name, json.loads(path.read_bytes())[2]))
        return len(self._seen)

    @functools.cached_property
    def _seen(self) -> set[tuple[str, int]]:
        return set()

    def are_looking(self) -> bool:
        return self.looks_of_peers() < _LOOKS

    def is_told(self, text: str) -> bool:
        return any(text in warning for warning in self.warnings.texts)


Steps = Callable[[Groups], object]


def _carry_out(here: Here, steps: Steps, timeout: float = _TIMEOUT) -> Outcome:
    groups = Groups(here, timeout)
    error = None
    try:
        steps(groups)
    except phalanx.PhalanxError as raised:
        error = raised
    # Who leaves first would end the calls of the others.
    groups.gate.open(f"done {here.rank}")
    groups.gate.wait(*(f"done {rank}" for rank in range(here.size)))
    return Outcome(error, [text for text in groups.warnings.texts if "deadlock" in text])


def _outcomes(ends: list[End]) -> list[Outcome]:
    assert [end.error for end in ends] == [None] * len(ends), [end.trace for end in ends]
    return [end.value for end in ends]


def _check_deadlock(outcomes: list[Outcome], kind: str, lines: list[str], hint: str = _NEXT) -> None:
    """All ranks have been told of the same cycle, once while they waited, and at their timeouts."""
    for rank, outcome in enumerate(outcomes):
        (warning,) = outcome.warnings
        first, *rest = warning.splitlines()
        ranks = ", ".join(str(rank) for rank in range(len(lines)))
        verdict = f"ranks {ranks} wait for each other, and no other thread of theirs can make the missing calls"
        assert first == f"rank {rank}: deadlock: {verdict}"
        assert rest == [*lines, hint]
        error = outcome.error
        assert isinstance(error, phalanx.Deadlock)
        assert isinstance(error, phalanx.CallTimeout)
        assert isinstance(error, TimeoutError)
        assert error.code == f"DEADLOCK:{kind}"
        first, *rest = str(error).splitlines()
        assert f"because {verdict}" in first
        assert rest == [*lines, f"{hint}; this group can't be used any more"]


def _check_no_deadlock(outcomes: list[Outcome]) -> None:
    assert outcomes == [Outcome(None, [])] * len(outcomes)


def _in_turns(groups: Groups) -> None:
    for group in (groups.a, groups.b) if groups.rank == 0 else (groups.b, groups.a):
        groups.reduce(group)


def _at(function: Callable[..., Any], text: str) -> str:
    return place(function, text)


def test_two_groups_in_different_orders(tmp_path: Path) -> None:
    at = _at(Groups.reduce, "return dist.all_reduce")
    lines = [
        f"  rank 0 waits for rank 1 in all_reduce, seq 1, group '1', at {at}",
        f"  rank 1 waits for rank 0 in all_reduce, seq 1, group '2', at {at}",
    ]
    _check_deadlock(_outcomes(run(_carry_out, 2, tmp_path, _in_turns)), "ORDER", lines)


def _in_three_groups(groups: Groups) -> None:
    pairs = [dist.new_group(ranks, timeout=timedelta(seconds=_TIMEOUT)) for ranks in ([0, 1], [1, 2], [2, 0])]
    dist.barrier()
    dist.barrier(group=pairs[groups.rank])


def test_three_groups_in_a_cycle(tmp_path: Path) -> None:
    at = _at(_in_three_groups, "dist.barrier(group")
    lines = [
        f"  rank 0 waits for rank 1 in barrier, seq 1, group '4', at {at}",
        f"  rank 1 waits for rank 2 in barrier, seq 1, group '5', at {at}",
        f"  rank 2 waits for rank 0 in barrier, seq 1, group '6', at {at}",
    ]
    _check_deadlock(_outcomes(run(_carry_out, 3, tmp_path, _in_three_groups)), "ORDER", lines)


def _ring(groups: Groups) -> None:
    dist.recv(torch.ones(2), (groups.rank + 1) % groups.here.size, tag=3)


def test_a_ring_of_receives(tmp_path: Path) -> None:
    at = _at(_ring, "dist.recv")
    lines = [
        f"  rank {rank} waits for rank {(rank + 1) % 3} in recv, tag 3, seq 1, group 'default_pg', at {at}"
        for rank in range(3)
    ]
    _check_deadlock(_outcomes(run(_carry_out, 3, tmp_path, _ring)), "P2P", lines, _NEXT_P2P)


def _long_sends(groups: Groups) -> None:
    dist.send(torch.ones(100_000), 1 - groups.rank)


def test_sends_that_nobody_receives(tmp_path: Path) -> None:
    at = _at(_long_sends, "dist.send")
    lines = [
        f"  rank {rank} waits for rank {1 - rank} in send, tag 0, seq 1, group 'default_pg', at {at}"
        for rank in range(2)
    ]
    _check_deadlock(_outcomes(run(_carry_out, 2, tmp_path, _long_sends)), "P2P", lines, _NEXT_P2P)


def _message_or_collective(groups: Groups) -> None:
    if groups.rank == 0:
        dist.recv(torch.ones(2), 1)
    groups.reduce(groups.a)
    if groups.rank == 1:
        dist.send(torch.ones(2), 0)


def test_a_message_against_a_collective(tmp_path: Path) -> None:
    lines = [
        "  rank 0 waits for rank 1 in recv, tag 0, seq 1, group 'default_pg', "
        f"at {_at(_message_or_collective, 'dist.recv')}",
        f"  rank 1 waits for rank 0 in all_reduce, seq 1, group '1', at {_at(Groups.reduce, 'return dist.all_reduce')}",
    ]
    _check_deadlock(_outcomes(run(_carry_out, 2, tmp_path, _message_or_collective)), "ORDER", lines)


def _from_anybody(groups: Groups) -> None:
    if groups.rank == 0:
        dist.recv(torch.ones(2))
    else:
        dist.recv(torch.ones(2), 0)


def test_a_receive_from_any_rank(tmp_path: Path) -> None:
    places = _at(_from_anybody, "dist.recv(torch.ones(2))"), _at(_from_anybody, "dist.recv(torch.ones(2), 0)")
    lines = [
        f"  rank 0 waits for ranks 1, 2 in recv from any rank, tag 0, seq 1, group 'default_pg', at {places[0]}",
        f"  rank 1 waits for rank 0 in recv, tag 0, seq 1, group 'default_pg', at {places[1]}",
        f"  rank 2 waits for rank 0 in recv, tag 0, seq 1, group 'default_pg', at {places[1]}",
    ]
    _check_deadlock(_outcomes(run(_carry_out, 3, tmp_path, _from_anybody)), "P2P", lines, _NEXT_P2P)


def _from_anybody_alive(groups: Groups) -> None:
    if groups.rank == 0:
        dist.recv(torch.ones(2))
        dist.send(torch.ones(2), 1)
    elif groups.rank == 1:
        dist.recv(torch.ones(2), 0)
    else:
        while groups.are_looking():
            time.sleep(0.05)
        dist.send(torch.ones(2), 0)


def test_a_receive_from_any_rank_of_which_one_can_send(tmp_path: Path) -> None:
    _check_no_deadlock(_outcomes(run(_carry_out, 3, tmp_path, _from_anybody_alive, _PATIENCE)))


def _behind(groups: Groups) -> None:
    if groups.rank == 2:
        groups.reduce(groups.c)
    else:
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=_TIMEOUT), use_local_synchronization=True)
        if groups.rank == 0:
            dist.recv(torch.ones(2), 1)
        else:
            dist.barrier(group=pair)


def test_a_rank_that_waits_for_the_cycle(tmp_path: Path) -> None:
    outcomes = _outcomes(run(_carry_out, 3, tmp_path, _behind))
    for outcome in outcomes:
        assert isinstance(outcome.error, phalanx.Deadlock)
        (warning,) = outcome.warnings
        assert "deadlock: ranks 0, 1 wait for each other" in warning
    at = _at(Groups.reduce, "return dist.all_reduce")
    behind = f"  rank 2 waits for ranks 0, 1 in all_reduce, seq 1, group '3', at {at}, behind the cycle"
    assert outcomes[2].warnings[0].splitlines()[3] == behind


def _async_in_turns(groups: Groups) -> None:
    order = (groups.a, groups.b) if groups.rank == 0 else (groups.b, groups.a)
    if groups.rank == 0:
        works = [groups.reduce(group, async_op=True) for group in order]
    else:
        works = [groups.reduce(order[0], async_op=True)]
        while groups.are_looking():
            time.sleep(0.05)
        works.append(groups.reduce(order[1], async_op=True))
    for work in works:
        work.wait()


def test_async_calls_that_are_waited_for_in_different_orders(tmp_path: Path) -> None:
    _check_no_deadlock(_outcomes(run(_carry_out, 2, tmp_path, _async_in_turns, _PATIENCE)))


def _future_of_other_group(groups: Groups) -> None:
    """Rank 1 waits in a future of torch's, of a call that goes on as soon as rank 2 comes."""
    pair = dist.new_group([1, 2], timeout=timedelta(seconds=_PATIENCE))
    if groups.rank == 0:
        groups.reduce(groups.a)
    elif groups.rank == 1:
        helper = threading.Thread(target=groups.reduce, args=(groups.b,))
        helper.start()
        groups.reduce(pair, async_op=True).get_future().wait()
        groups.reduce(groups.a)
        helper.join()
    else:
        while groups.are_looking():
            time.sleep(0.05)
        groups.reduce(pair)
        groups.reduce(groups.a)
    if groups.rank != 1:
        groups.reduce(groups.b)


def test_a_thread_that_a_call_in_flight_lets_go_on(tmp_path: Path) -> None:
    _check_no_deadlock(_outcomes(run(_carry_out, 3, tmp_path, _future_of_other_group, _PATIENCE)))


def _sleep(groups: Groups) -> None:
    time.sleep(0.05)


def _compute(groups: Groups) -> None:
    sum(range(100_000))


def _multiply(groups: Groups) -> None:
    torch.ones(500, 500) @ torch.ones(500, 500)


def _wait_for_a_child(groups: Groups) -> None:
    subprocess.run(["sleep", "0.2"], check=True)


def _wait_in_another_thread(groups: Groups) -> None:
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    thread.join()


_OWN_CODE: dict[str, Steps] = {
    "sleeps": _sleep,
    "computes": _compute,
    "runs a long op": _multiply,
    "waits for a child process": _wait_for_a_child,
    "joins a thread": _wait_in_another_thread,
}


def _be_late(groups: Groups, what: str) -> None:
    """Rank 1 takes long, while rank 2 waits for rank 0, and rank 0 for rank 1."""
    if groups.rank == 1:
        while groups.are_looking():
            _OWN_CODE[what](groups)
    if groups.rank != 2:
        groups.reduce(groups.a, async_op=groups.rank == 2)
        groups.reduce(groups.b)
    else:
        work = groups.reduce(groups.a, async_op=True)
        groups.reduce(groups.b)
        work.wait()


@pytest.mark.parametrize("what", _OWN_CODE)
def test_a_rank_in_its_own_code(what: str, tmp_path: Path) -> None:
    _check_no_deadlock(_outcomes(run(_carry_out, 3, tmp_path, functools.partial(_be_late, what=what), _PATIENCE)))


def _second_thread(groups: Groups, is_enough: Callable[[Groups], bool]) -> None:
    """Both ranks wait for each other, until a second thread of rank 1 makes the missing call."""

    is_over = threading.Event()

    def help_out() -> None:
        while not is_enough(groups) and not is_over.is_set():
            time.sleep(0.05)
        groups.reduce(groups.a)

    if groups.rank == 0:
        groups.reduce(groups.a)
        groups.reduce(groups.b)
    else:
        helper = threading.Thread(target=help_out, name="helper")
        helper.start()
        try:
            groups.reduce(groups.b)
        finally:
            is_over.set()
            helper.join()


def _has_looked(groups: Groups) -> bool:
    return not groups.are_looking()


def test_a_second_thread_that_makes_the_missing_call(tmp_path: Path) -> None:
    steps = functools.partial(_second_thread, is_enough=_has_looked)
    _check_no_deadlock(_outcomes(run(_carry_out, 2, tmp_path, steps, _PATIENCE)))


def _is_told_of_it(groups: Groups) -> bool:
    return groups.is_told("probably a deadlock")


def test_a_thread_that_could_still_act_is_named(tmp_path: Path) -> None:
    steps = functools.partial(_second_thread, is_enough=_is_told_of_it)
    outcomes = _outcomes(run(_carry_out, 2, tmp_path, steps, _PATIENCE))
    assert [outcome.error for outcome in outcomes] == [None, None]
    (warning,) = outcomes[1].warnings
    first, *lines = warning.splitlines()
    assert first == "rank 1: probably a deadlock: ranks 0, 1 wait for each other"
    at = _at(_second_thread, "time.sleep")
    assert (
        lines[2]
        .replace("that runs", "that sleeps")
        .startswith(f"  rank 1 also has the thread 'helper', that sleeps at {at.partition(':')[0]}:")
    )
    assert lines[2].endswith("in help_out, which could still act")
    assert lines[3] == _NEXT


def _hold_a_lock(groups: Groups) -> None:
    """The thread that would make the missing call waits for a lock that the one in the cycle holds."""
    lock = threading.Lock()

    late: list[phalanx.Deadlock] = []

    def help_out() -> None:
        with lock:
            try:
                groups.reduce(groups.a)
            except phalanx.Deadlock as error:
                late.append(error)

    if groups.rank == 0:
        groups.reduce(groups.a)
    else:
        helper = threading.Thread(target=help_out)
        try:
            with lock:
                helper.start()
                groups.reduce(groups.b)
        finally:
            helper.join()
            # The group that rank 0 has given up on is broken because of the same cycle.
            assert late


def test_a_thread_that_waits_for_a_lock_can_t_act(tmp_path: Path) -> None:
    at = _at(Groups.reduce, "return dist.all_reduce")
    lines = [
        f"  rank 0 waits for rank 1 in all_reduce, seq 1, group '1', at {at}",
        f"  rank 1 waits for rank 0 in all_reduce, seq 1, group '2', at {at}",
    ]
    _check_deadlock(_outcomes(run(_carry_out, 2, tmp_path, _hold_a_lock)), "ORDER", lines)


def _bounded(groups: Groups) -> None:
    """Rank 0 gives up its wait after a while, and makes the missing call."""
    if groups.rank == 0:
        work = groups.reduce(groups.a, async_op=True)
        with contextlib.suppress(phalanx.CallTimeout):
            work.wait(timedelta(seconds=4))
        groups.reduce(groups.b)
        work.wait()
    else:
        groups.reduce(groups.b)
        groups.reduce(groups.a)


def test_a_wait_that_is_given_up(tmp_path: Path) -> None:
    _check_no_deadlock(_outcomes(run(_carry_out, 2, tmp_path, _bounded, _PATIENCE)))


def _be_stopped(groups: Groups) -> None:
    if groups.rank == 0:
        groups.reduce(groups.a)
    else:
        groups.here.tell(os.getpid())
        groups.here.hear()
        groups.reduce(groups.a)


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    world = World(_carry_out, 2, tmp_path, _be_stopped, _PATIENCE)
    pid = world.told(1)
    world.signal(1, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "not stopped")
    world.wait_naps(0, num=60)
    world.signal(1, signal.SIGCONT)
    world.tell(1)
    _check_no_deadlock(_outcomes(world.ends()))


def _leave_no_file(groups: Groups) -> list[str]:
    with pytest.raises(phalanx.Deadlock):
        _in_turns(groups)
    folder = own_box().folder
    assert folder is not None
    return [path.name for path in folder.glob("*.waits")]


def _end_well(here: Here) -> tuple[bool, bool]:
    groups = Groups(here)
    while_waiting = bool(_leave_no_file(groups))
    folder = own_box().folder
    assert folder is not None
    groups.gate.open(f"done {here.rank}")
    groups.gate.wait(*(f"done {rank}" for rank in range(here.size)))
    dist.destroy_process_group()
    threads = [thread.name for thread in threading.enumerate() if thread.name == "phalanx-waits"]
    return while_waiting, bool(threads) or (folder / f"{os.getpid()}.waits").exists()


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    assert [end.value for end in run(_end_well, 2, tmp_path)] == [(True, False)] * 2


def _mixed(groups: Groups) -> None:
    """Rank 0 waits in a call of another engine that rank 1 has not posted; rank 1 in a call of ours."""
    info = GroupInfo("posted", groups.rank, 2)
    posted = posting.join(groups.here.store("posted"), info, 30, lambda: None)
    try:
        if groups.rank == 1:
            groups.reduce(groups.a)
            return
        token = waits.enter(posted, "all_reduce", 1, lambda: [1], where="engine.py:3, in train")
        until(lambda: wait_watch().finding_of(posted.identity) is not None, "no deadlock is found")
        # Rank 1 gives up in its own time.
        groups.gate.wait("done 1")
        waits.leave(token)
    finally:
        posted.close()


def test_a_call_of_another_engine_against_one_of_ours(tmp_path: Path) -> None:
    outcomes = _outcomes(run(_carry_out, 2, tmp_path, _mixed))
    lines = [
        "  rank 0 waits for rank 1 in all_reduce, seq 1, group 'posted', at engine.py:3, in train",
        f"  rank 1 waits for rank 0 in all_reduce, seq 1, group '1', at {_at(Groups.reduce, 'return dist.all_reduce')}",
    ]
    for outcome in outcomes:
        (warning,) = outcome.warnings
        assert warning.splitlines()[1:] == [*lines, _NEXT]
    assert isinstance(outcomes[1].error, phalanx.Deadlock)
