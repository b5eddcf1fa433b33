"""The last line of a report names the rank that died or ended while a group was made, and how."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Gate, Here, World, until

import phalanx
from phalanx.commands import main
from phalanx.debug.evidence import read_boxes
from phalanx.transports.exchange import Exchange

_LONG = timedelta(seconds=1000)
_ENDS = {
    "killed": "was killed by SIGKILL",
    "crash": "was killed by SIGSEGV",
    "code": "left early with exit code 3",
    "no code": "left early with exit code 0",
    "exit": "left early",
    "raise": "raised LookupError: no shard (",
}


def _init(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    dist.init_process_group("phalanx", store=here.store(), rank=here.rank, world_size=here.size, timeout=_LONG)


def _end(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if how in ("code", "no code"):
        os._exit(3 if how == "code" else 0)
    if how == "exit":
        sys.exit(0)
    raise LookupError("no shard")


def _end_at_first_word(how: str) -> None:
    """In the making: the rank has come to the meeting, and says nothing any more."""
    say = Exchange.set

    def end(exchange: Exchange, key: str, value: str) -> None:
        if "hello" in key:
            _end(how)
        say(exchange, key, value)

    Exchange.set = end  # type: ignore[assignment, method-assign]


def _fall(here: Here, where: str, how: str) -> None:
    """Rank 0 answers the failure with an exit code, rank 1 with an error of its own."""
    gate = Gate(here)
    _init(here)
    dist.barrier()
    if where == "between":
        dist.destroy_process_group()
        gate.open(f"left{here.rank}")
        gate.wait("left0", "left1", "left2")
    if here.rank == 2:
        # Both know the rest of the job before they lose this rank.
        here.tell(os.getpid())
        here.hear()
        if where == "inside":
            _end_at_first_word(how)
            dist.new_group([0, 1, 2])
        _end(how)
    try:
        if where == "between":
            _init(here)
        else:
            dist.new_group([0, 1, 2])
    except phalanx.PhalanxError:
        if here.rank == 0:
            os._exit(1)
        raise RuntimeError("the step failed") from None


@pytest.mark.parametrize("how", list(_ENDS))
@pytest.mark.parametrize("where", ["between", "before", "inside"])
def test_the_report_names_the_rank_that_did_not_make_the_group(
    where: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(_fall, 3, tmp_path, where, how, way="short program")
    pid = world.told(2)
    world.tell(2)
    for process in world.processes:
        process.join(30)
    world.kill()
    (job,) = (tmp_path / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"Earliest cause: rank 2 (pid {pid}) {_ENDS[how]}"), last


def _fall_in_the_first(here: Here) -> None:
    here.tell(os.getpid())
    here.hear()
    if here.rank == 2:
        say = Exchange.set

        def end(exchange: Exchange, key: str, value: str) -> None:
            say(exchange, key, value)
            if "hello" in key:
                os.kill(os.getpid(), signal.SIGKILL)

        Exchange.set = end  # type: ignore[assignment, method-assign]
    _init(here)


def test_a_rank_that_dies_in_the_first_group_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It never had a black box."""
    world = World(_fall_in_the_first, 3, tmp_path, way="short program")
    _, _, pid = (world.told(rank) for rank in range(3))
    # Its peers learn which process it is from its last word.
    world.keep_dead()
    world.tell_all(0, 1, 2)
    world.ends()
    (job,) = (tmp_path / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"Earliest cause: rank 2 (pid {pid}) was killed by SIGKILL; it had not begun new_group")


def _killed_by_a_launcher(here: Here) -> None:
    """The survivors are in no group, and are ended before they look for the rank that crashed."""
    gate = Gate(here)
    _init(here)
    dist.destroy_process_group()
    gate.open(f"left{here.rank}")
    gate.wait("left0", "left1", "left2")
    here.tell(os.getpid())
    if here.rank == 2:
        here.hear()
        _end("crash")
    Exchange.wait = lambda *_: signal.pause()  # type: ignore[method-assign]
    _init(here)


def test_survivors_that_a_launcher_ends_while_they_make_a_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(_killed_by_a_launcher, 3, tmp_path, way="short program")
    pids = [world.told(rank) for rank in range(3)]

    def come() -> int:
        jobs = list((tmp_path / "jobs").iterdir())
        return sum(bool(box.makings) for box in read_boxes(*jobs)[0]) if jobs else 0

    until(lambda: come() == 2, "ranks 0 and 1 do not come")
    world.tell(2)
    world.processes[2].join(30)
    for rank in (0, 1):
        world.signal(rank, signal.SIGTERM)
        world.processes[rank].join(30)
    world.kill()
    (job,) = (tmp_path / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"Earliest cause: rank 2 (pid {pids[2]}) was killed by SIGSEGV"), last


def _fall_at_once(here: Here) -> None:
    _init(here)
    dist.barrier()
    here.tell(os.getpid())
    here.hear()


def test_a_crash_comes_before_the_launchers_sigterms_that_are_seen_with_it(tmp_path: Path) -> None:
    """Rank 0 is stopped while all others die."""
    world = World(_fall_at_once, 6, tmp_path, way="short program")
    pids = [world.told(rank) for rank in range(6)]
    world.signal(0, signal.SIGSTOP)
    for rank in range(1, 6):
        world.signal(rank, signal.SIGKILL if rank == 3 else signal.SIGTERM)
        world.processes[rank].join(30)
    world.signal(0, signal.SIGCONT)
    (job,) = (tmp_path / "jobs").iterdir()

    def deaths() -> list[int]:
        (box,) = [box for box in read_boxes(job)[0] if box.rank == 0]
        return [death.pid for death in box.deaths]

    until(lambda: len(deaths()) == 5, "rank 0 notes no deaths")
    assert deaths()[0] == pids[3]
    world.kill()


def _go_on_without_rank_0(here: Here, how: str) -> None:
    """The survivors make a smaller world, in which one of them is rank 0."""
    _init(here)
    dist.barrier()
    if here.rank == 0:
        here.tell(os.getpid())
        here.hear()
        _end(how)
    with pytest.raises(phalanx.PeerLost):
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("phalanx", store=here.store("smaller"), rank=here.rank - 1, world_size=2, timeout=_LONG)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["killed", "raise"])
def test_survivors_that_take_the_number_of_the_dead_rank(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(_go_on_without_rank_0, 3, tmp_path, how, way="short program")
    pid = world.told(0)
    world.tell(0)
    for process in world.processes:
        process.join(30)
    assert [process.exitcode for process in world.processes[1:]] == [0, 0], world.output(1)
    world.kill()
    (job,) = (tmp_path / "jobs").iterdir()
    assert main(["report", str(job)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"Earliest cause: rank 0 (pid {pid}) {_ENDS[how]}"), last
