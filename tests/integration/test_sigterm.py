"""SIGTERM of a launcher: the ranks that it ends have noted before who died, and SIGTERM does all that it did before."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Here, World, until

from phalanx.commands import main
from phalanx.debug.own_box import own_box


def _pause(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    here.init()
    dist.barrier()
    here.tell(os.fspath(own_box().folder or ""))
    signal.pause()


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


def test_a_death_is_noted_before_sigterm_ends_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 can't notice the death by itself: it is stopped until after SIGTERM was sent."""
    world = World(_pause, 2, tmp_path, way="child")
    folder, _ = world.told(0), world.told(1)
    world.keep_dead()
    survivor, victim = (process.pid for process in world.processes)
    assert survivor is not None
    world.signal(0, signal.SIGSTOP)
    until(lambda: _is_stopped(survivor), "rank 0 was not stopped")
    world.signal(1, signal.SIGKILL)
    world.wait_dead(1)
    world.signal(0, signal.SIGTERM)
    world.signal(0, signal.SIGCONT)
    assert [end.exitcode for end in world.ends()] == [-signal.SIGTERM, -signal.SIGKILL]
    assert main(["report", folder]) == 0
    assert f"Earliest cause: rank 1 (pid {victim}) was killed by SIGKILL;" in capsys.readouterr().out
    assert f"phalanx: rank 1 (pid {victim}) was killed by SIGKILL; all ranks:" in world.output(0)


def _handle(here: Here, when: str) -> list[str]:
    handled: list[str] = []

    def install() -> None:
        signal.signal(signal.SIGTERM, lambda *_: handled.append(when))

    if when == "before":
        install()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    here.init()
    if when == "after":
        install()
    os.kill(os.getpid(), signal.SIGTERM)
    dist.barrier()
    return handled


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_program_keeps_its_own_handler(tmp_path: Path, when: str) -> None:
    world = World(_handle, 2, tmp_path, when)
    assert [end.value for end in world.ends()] == [[when]] * 2


def _ignore(here: Here) -> str:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here.init()
    os.kill(os.getpid(), signal.SIGTERM)
    dist.barrier()
    return "alive"


def test_a_program_that_ignores_sigterm_goes_on_ignoring_it(tmp_path: Path) -> None:
    assert [end.value for end in World(_ignore, 2, tmp_path).ends()] == ["alive"] * 2


def _fork(here: Here) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    here.init()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    dist.barrier()
    return status


def test_sigterm_ends_a_forked_child(tmp_path: Path) -> None:
    assert [end.value for end in World(_fork, 2, tmp_path, way="call").ends()] == [signal.SIGTERM] * 2


def _terminate_after_leaving(here: Here) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    here.init()
    dist.barrier()
    dist.destroy_process_group()
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_ends_a_rank_that_has_left_its_groups(tmp_path: Path) -> None:
    ends = World(_terminate_after_leaving, 2, tmp_path, way="child").ends()
    assert [end.exitcode for end in ends] == [-signal.SIGTERM] * 2


def test_sigterm_waits_for_the_look_only(tmp_path: Path) -> None:
    """A rank whose watcher does not answer gives up after 200 naps, each of which is a switch to another thread."""
    world = World(_pause, 4, tmp_path, way="child")
    world.all_told(0, 1, 2, 3)
    world.keep_dead()
    switches = []
    for rank, process in enumerate(world.processes):
        before = _num_switches(process.pid)
        world.signal(rank, signal.SIGTERM)
        world.wait_dead(rank)
        switches.append(_num_switches(process.pid) - before)
    world.ends()
    assert min(switches) < 100


def _num_switches(pid: int | None) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


def _block(here: Here) -> bool:
    here.init()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
    dist.barrier()
    return signal.SIGTERM in signal.sigpending() and signal.sigwait([signal.SIGTERM]) == signal.SIGTERM


def test_a_signal_that_the_program_blocks_is_not_taken_by_a_thread_of_ours(tmp_path: Path) -> None:
    assert [end.value for end in World(_block, 2, tmp_path).ends()] == [True, True]
