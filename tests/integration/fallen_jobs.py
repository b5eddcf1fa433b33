"""Jobs that fall, in every order of hang, crash, exception, early exit and the launcher's SIGTERM.

A job is a function that runs on every rank. Ranks see in each other's black boxes how far they have come, so that
things happen in the order that the job names. `fallen_runs.py` runs them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import is_gone, until

import phalanx
from phalanx.debug.box_reader import read_box
from phalanx.debug.own_box import own_box
from phalanx.debug.records import Box

SIZE = 3
# Of a call that gives up, and of one that never does.
SHORT, LONG = 1.0, 60.0


class Rank:
    """What a job's function is given."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self._folder = folder

    def init(self, timeout: float = LONG) -> None:
        store = dist.FileStore(os.fspath(self._folder / "store"), SIZE)
        dist.init_process_group(
            "phalanx", store=store, rank=self.rank, world_size=SIZE, timeout=timedelta(seconds=timeout)
        )
        dist.barrier()

    def box(self, rank: int) -> Box | None:
        folder = own_box().folder
        assert folder is not None
        for path in folder.glob("*.box"):
            with contextlib.suppress(ValueError):
                box = read_box(path)
                if box.rank == rank:
                    return box
        return None

    def await_call(self, *ranks: int, op: str = "all_reduce") -> None:
        """Until these ranks wait in such a call."""

        def waits(rank: int) -> bool:
            return _is_in(self.box(rank), op)

        for rank in ranks:
            until(partial(waits, rank), f"rank {rank} is not in {op}")

    def await_end(self, rank: int) -> None:
        """Until the rank's process is gone, or nothing but gone."""
        box = self.box(rank)
        assert box is not None
        until(lambda: is_gone(box.pid), f"rank {rank} lives")

    def mark(self, name: str) -> None:
        (self._folder / name).touch()

    def await_mark(self, name: str) -> None:
        until((self._folder / name).exists, f"nobody came to {name!r}")

    def hang(self) -> None:
        """For ever, in code of its own."""
        self.mark(f"hangs{self.rank}")
        while True:
            signal.pause()

    def await_hang(self, *ranks: int) -> None:
        for rank in ranks:
            self.await_mark(f"hangs{rank}")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), number)
        signal.pause()


def _is_in(box: Box | None, op: str) -> bool:
    return box is not None and any(record.op == op and record.state == "started" for record in box.records)


def all_reduce(group: Any = None, timeout: float = LONG) -> None:
    group = group or dist.group.WORLD
    group.allreduce(torch.ones(4), timeout=timedelta(seconds=timeout)).wait()


def _all_reduce_until_rank_0_gives_up(here: Rank, group: Any = None, others: Any = None) -> None:
    """Rank 1 waits in its call, of whatever group, before the time of rank 0's begins, however slow the machine is."""
    if here.rank == 0:
        here.await_call(1)
        all_reduce(group, timeout=SHORT)
    else:
        all_reduce(others)


@dataclass
class Job:
    """`causes` are what the last line may begin with after "Earliest cause: ", with {pid0}, … for the ranks' pids."""

    body: Callable[[Rank], None]
    causes: str | tuple[str, ...]
    # Without a launcher: how the test ends ranks that are left when the others have ended, or all hang.
    ended_by: signal.Signals = signal.SIGTERM
    # The whole job is ended from outside once all ranks hang or wait.
    from_outside: bool = False

    @property
    def name(self) -> str:
        return self.body.__name__.strip("_")

    def expected(self, pids: dict[str, int]) -> tuple[str, ...]:
        causes = (self.causes,) if isinstance(self.causes, str) else self.causes
        return tuple(cause.format(**pids) for cause in causes)


_WORLD = "of group 'default_pg'"


def _hang_in_own_code(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.hang()
    here.await_hang(2)
    _all_reduce_until_rank_0_gives_up(here)


def _hang_behind_a_subgroup(here: Rank) -> None:
    """Rank 0 waits for 1, 1 waits elsewhere for 2."""
    here.init()
    pair = dist.new_group([1, 2])
    if here.rank == 2:
        here.hang()
    here.await_hang(2)
    if here.rank == 1:
        here.mark("hangs1")
        all_reduce(pair)
    here.await_call(1)
    all_reduce(timeout=SHORT)


def _groups_in_different_orders(here: Rank) -> None:
    here.init()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if here.rank == 2:
        here.hang()
    here.await_hang(2)
    _all_reduce_until_rank_0_gives_up(here, first, second)


def _killed_while_others_wait(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        here.kill()
    all_reduce()


def _crash_while_others_compute(here: Rank) -> None:
    """Nobody waits for anybody: the survivors are ended in their own code."""
    here.init()
    if here.rank == 1:
        here.await_hang(0, 2)
        here.kill(signal.SIGSEGV)
    here.hang()


def _exception_while_others_wait(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        raise LookupError("no shard")
    all_reduce()


def _exception_while_an_innocent_rank_waits_elsewhere(here: Rank) -> None:
    here.init()
    pair = dist.new_group([0, 1])
    if here.rank == 2:
        here.await_call(0, 1)
        raise LookupError("no shard")
    all_reduce(pair if here.rank == 1 else None)


def _exception_after_the_group_is_destroyed(here: Rank) -> None:
    here.init()
    try:
        if here.rank == 2:
            here.await_call(0, 1)
            raise LookupError("no shard")
        all_reduce()
    finally:
        dist.destroy_process_group()


def _early_exit(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        sys.exit(0)
    all_reduce()


def _early_exit_with_a_code(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        sys.exit(3)
    all_reduce()


def _early_exit_without_handlers(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        os._exit(0)
    all_reduce()


def _early_return_before_others_begin(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        return
    here.await_end(2)
    all_reduce()


def _another_program(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        here.mark("hangs2")
        # It ends by itself: exec closes the pipe by which torch's launcher knows that a process lives.
        os.execvp("sleep", ["sleep", "5"])
    all_reduce()


def _left_the_group_and_hangs(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        dist.destroy_process_group()
        here.hang()
    all_reduce()


def _crash_after_a_hang_that_nobody_gave_up_on(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.hang()
    here.await_hang(2)
    if here.rank == 1:
        here.await_call(0)
        here.kill()
    all_reduce()


def _crash_after_others_gave_up_on_a_hang(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.hang()
    here.await_hang(2)
    try:
        _all_reduce_until_rank_0_gives_up(here)
    except phalanx.PhalanxError:
        if here.rank == 1:
            here.kill(signal.SIGABRT)
        raise


def _crash_after_an_exception(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
        raise LookupError("no shard")
    try:
        all_reduce()
    except phalanx.PeerLost:
        if here.rank == 1:
            here.kill()
        raise


def _exceptions_after_a_crash(here: Rank) -> None:
    """Rank 0 answers the failure with an error of its own, rank 1 raises although it waits for nobody."""
    here.init()
    if here.rank == 2:
        here.await_call(0)
        here.kill()
    if here.rank == 1:
        here.await_end(2)
        raise ValueError("a part is missing")
    try:
        all_reduce()
    except phalanx.PeerLost:
        raise RuntimeError("the step failed") from None


def _hang_after_an_early_exit(here: Rank) -> None:
    here.init()
    if here.rank == 1:
        here.await_call(0)
        here.hang()
    if here.rank == 2:
        here.await_hang(1)
        sys.exit(0)
    all_reduce()


def _sigterm_to_one_rank(here: Rank) -> None:
    here.init()
    if here.rank == 1:
        here.await_call(0, 2)
        here.kill(signal.SIGTERM)
    all_reduce()


def _sigterm_handlers_that_exit_in_order(here: Rank) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    here.init()
    if here.rank == 1:
        here.await_hang(0, 2)
        here.kill()
    here.hang()


def _sigterm_to_a_healthy_job(here: Rank) -> None:
    here.init()
    here.hang()


def _mismatch(here: Rank) -> None:
    here.init()
    if here.rank == 2:
        here.await_call(0, 1)
    dist.all_reduce(torch.ones(5 if here.rank == 2 else 4))


def _chain_of_deaths_in_subgroups(here: Rank) -> None:
    """Rank 2 is killed; rank 1, which waits for it in one group, fails; rank 0 waits for 1 in another one."""
    here.init()
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    if here.rank == 2:
        here.await_call(0, 1)
        here.kill(signal.SIGBUS)
    all_reduce(first if here.rank == 0 else second)


JOBS = [
    Job(
        _hang_in_own_code,
        f"rank 2 (pid {{pid2}}) was still running; it had not begun all_reduce, seq 2, {_WORLD}, for which ranks 0, 1 "
        "waited until their timeout",
    ),
    Job(
        _hang_in_own_code,
        f"rank 2 (pid {{pid2}}) was still running; it had not begun all_reduce, seq 2, {_WORLD}, for which ranks 0, 1 "
        "waited until their timeout",
        ended_by=signal.SIGKILL,
    ),
    Job(
        _hang_behind_a_subgroup,
        "rank 2 (pid {pid2}) was still running; it had not begun all_reduce, seq 1, of group '1', for which rank 1 "
        "waited",
    ),
    Job(_groups_in_different_orders, "ranks 0, 1 waited for each other"),
    Job(
        _killed_while_others_wait,
        f"rank 2 (pid {{pid2}}) was killed by SIGKILL; it had not begun all_reduce, seq 2, {_WORLD}, for which ranks "
        "0, 1 waited",
    ),
    Job(
        _crash_while_others_compute,
        f"rank 1 (pid {{pid1}}) was killed by SIGSEGV; its last completed call is barrier, seq 1, {_WORLD}",
    ),
    Job(
        _exception_while_others_wait,
        "rank 2 (pid {pid2}) raised LookupError: no shard (",
    ),
    Job(_exception_while_an_innocent_rank_waits_elsewhere, "rank 2 (pid {pid2}) raised LookupError: no shard ("),
    Job(_exception_after_the_group_is_destroyed, "rank 2 (pid {pid2}) raised LookupError: no shard ("),
    Job(
        _early_exit,
        f"rank 2 (pid {{pid2}}) left early with exit code 0; it had not begun all_reduce, seq 2, {_WORLD}, for which "
        "ranks 0, 1 waited",
    ),
    Job(_early_exit_with_a_code, "rank 2 (pid {pid2}) left early with exit code 3; it had not begun all_reduce, seq 2"),
    Job(
        _early_exit_without_handlers,
        "rank 2 (pid {pid2}) left early with exit code 0; it had not begun all_reduce, seq 2",
    ),
    Job(_early_return_before_others_begin, "rank 2 (pid {pid2}) left early with exit code 0; it had not begun"),
    Job(
        _another_program, f"rank 2 (pid {{pid2}}) called exec; it had not begun all_reduce, seq 2, {_WORLD}, for which"
    ),
    Job(
        _left_the_group_and_hangs,
        f"rank 2 (pid {{pid2}}) left the group early; it had not begun all_reduce, seq 2, {_WORLD}",
    ),
    Job(_crash_after_a_hang_that_nobody_gave_up_on, "rank 1 (pid {pid1}) was killed by SIGKILL; it had not begun"),
    Job(_crash_after_others_gave_up_on_a_hang, "rank 2 (pid {pid2}) was still running; it had not begun all_reduce"),
    Job(_crash_after_an_exception, "rank 2 (pid {pid2}) raised LookupError: no shard ("),
    Job(_exceptions_after_a_crash, "rank 2 (pid {pid2}) was killed by SIGKILL; it had not begun all_reduce, seq 2"),
    Job(_hang_after_an_early_exit, "rank 2 (pid {pid2}) left early with exit code 0; it had not begun all_reduce"),
    Job(_sigterm_to_one_rank, "rank 1 (pid {pid1}) was killed by SIGTERM"),
    Job(_sigterm_handlers_that_exit_in_order, "rank 1 (pid {pid1}) was killed by SIGKILL; its last completed call"),
    Job(
        _sigterm_to_a_healthy_job,
        # Which one is first is the system's choice; where all die at once, nobody sees the signal.
        (
            "rank 0 (pid {pid0}) was killed by SIGTERM, and ranks 1, 2 (pids {pid1}, {pid2}) after it; no rank",
            "rank 1 (pid {pid1}) was killed by SIGTERM, and ranks 0, 2 (pids {pid0}, {pid2}) after it; no rank",
            "rank 2 (pid {pid2}) was killed by SIGTERM, and ranks 0, 1 (pids {pid0}, {pid1}) after it; no rank",
            "ranks 0, 1, 2 (pids {pid0}, {pid1}, {pid2}) died without recording an exit; no rank had failed before",
        ),
        from_outside=True,
    ),
    Job(_mismatch, f"ranks disagree about seq 2 {_WORLD}"),
    Job(_chain_of_deaths_in_subgroups, "rank 2 (pid {pid2}) was killed by SIGBUS; it had not begun all_reduce, seq 1"),
]
