"""Processes of peers whose pidfd says something wrong: its number belongs to another file, or the process lives on with
another program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, until, values

import phalanx
from phalanx import _native


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def _watch(pid: int) -> tuple[_native.Peer, int]:
    """A peer and its pidfd."""
    start = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    before = _pidfds()
    peer = _native.Peer.watch(pid, start)
    assert peer is not None
    (ours,) = _pidfds() - before
    return peer, ours


def _pidfds() -> set[int]:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {int(os.path.basename(path)) for path in paths if os.path.lexists(path) and "pidfd" in os.readlink(path)}


def _wait_dead(peer: _native.Peer) -> None:
    until(lambda: peer.dead, "the death was not found")


def _readable() -> int:
    """A descriptor that is always readable."""
    return os.open("/dev/null", os.O_RDONLY)


def _ended_pidfd() -> int:
    with subprocess.Popen(["true"]) as process:
        return os.pidfd_open(process.pid)


@pytest.mark.parametrize("make", [_readable, _ended_pidfd])
def test_another_file_under_the_number_of_a_pidfd_is_no_death(make: Any) -> None:
    with _sleeper() as process:
        peer, number = _watch(process.pid)
        other = make()
        os.dup2(other, number)
        assert not peer.dead
        assert not peer.dead
        # The peer has a pidfd again, and tells the death.
        process.kill()
        process.wait()
        assert peer.dead
        for fd in (number, other):
            os.close(fd)


def test_a_death_is_found_where_the_number_of_a_pidfd_belongs_to_a_silent_file() -> None:
    silent, other_end = os.pipe()
    with _sleeper() as process:
        peer, number = _watch(process.pid)
        assert not peer.dead
        os.dup2(silent, number)
        process.kill()
        process.wait()
        _wait_dead(peer)
        del peer
        # What belongs to the program stays open.
        os.fstat(number)
        for fd in (silent, other_end, number):
            os.close(fd)


def test_a_process_whose_main_thread_has_ended_is_alive() -> None:
    code = "import ctypes, sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True); "
    code += "ctypes.CDLL(None).syscall(60 if sys.argv[1] == 'x86_64' else 93, 0)"
    command = [sys.executable, "-c", code, os.uname().machine]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        path = Path(f"/proc/{process.pid}/stat")
        until(lambda: path.read_text().rpartition(") ")[2][0] == "Z", "the main thread goes on")
        peer, number = _watch(process.pid)
        assert not peer.dead
        os.close(number)
        assert not peer.dead
        process.kill()
        process.wait()
        assert peer.dead


def _close_all(here: Here) -> float:
    """Both ranks close what they did not open, and open files under the same numbers."""
    here.init()
    total = torch.ones(1)
    dist.all_reduce(total)
    keep = here.fileno()
    for fd in range(3, 256):
        if fd != keep:
            try:
                os.close(fd)
            except OSError:
                continue
            # Readable at any time.
            os.dup2(os.open("/dev/null", os.O_RDONLY), fd)
    here.tell()
    if here.rank == 0:
        here.hear()
    # Rank 1 waits for some looks around.
    dist.all_reduce(total)
    work = dist.isend(torch.ones(100_000), 1) if here.rank == 0 else dist.irecv(torch.zeros(100_000), 0)
    assert work is not None
    work.wait()
    dist.destroy_process_group()
    # Nothing of the program was closed.
    os.fstat(keep)
    return total.item()


def test_a_program_that_closes_all_descriptors_goes_on(tmp_path: Path) -> None:
    world = World(_close_all, 2, tmp_path)
    world.all_told(0, 1)
    world.wait_asleep(1)
    world.wait_naps(1)
    world.tell(0)
    ends = world.ends()
    assert [end.value for end in ends] == [4, 4], ends[0].trace + ends[1].trace


_PROGRAM = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def _exec(here: Here, how: str) -> dict[str, Any] | None:
    here.init()
    dist.barrier()
    if here.rank == 1:
        # Lives as long as the test.
        os.dup2(here.fileno(), 0)
        here.tell()
        here.hear()

        def replace() -> None:
            os.execv(_PROGRAM[0], _PROGRAM)

        if how == "thread":
            thread = threading.Thread(target=replace)
            thread.start()
            thread.join()
        replace()
    if how == "later":
        here.hear()
    calls: dict[str, Callable[[], object]] = {
        "recv": lambda: dist.recv(torch.ones(1), 1),
        "new_group": lambda: dist.new_group([0, 1]),
    }
    call: Callable[[], object] = calls.get(how, dist.barrier)
    here.tell()
    with pytest.raises(phalanx.PeerLost) as caught:
        call()
    return {"said": str(caught.value), "peer": caught.value.peer}


@pytest.mark.parametrize("how", ["waiting", "thread", "later", "recv", "new_group"])
def test_a_rank_that_replaces_its_program_is_lost(how: str, tmp_path: Path) -> None:
    world = World(_exec, 2, tmp_path, how)
    world.told(1)
    pid = world.processes[1].pid
    if how != "later":
        world.told(0)
    world.tell(1)
    if how == "later":
        program = Path(f"/proc/{pid}/cmdline")
        until(lambda: "sys.stdin.read" in program.read_text(), "rank 1 goes on")
        world.tell(0)
        world.told(0)
    world.processes[0].join(30)
    world.signal(1, signal.SIGKILL)
    end = world.ends()[0]
    assert end.error is None, end.trace
    assert end.value["peer"] == 1
    text = end.value["said"]
    assert f"rank 1 replaced its program (it runs {' '.join(_PROGRAM)!r} now) while " in text
    assert text.splitlines()[-1].startswith("  Next: find the call of os.exec* on rank 1: ")


def _restart(here: Here) -> float:
    """Rank 1 runs itself anew, as programs do that restart, and joins a new group."""
    here.init()
    dist.barrier()
    if here.rank == 1:
        code = (
            "import sys, torch, torch.distributed as dist; "
            "dist.init_process_group('phalanx', init_method='file://' + sys.argv[1], rank=1, world_size=2); "
            "t = torch.ones(1); dist.all_reduce(t); dist.barrier(); dist.destroy_process_group()"
        )
        os.execv(sys.executable, [sys.executable, "-c", code, os.fspath(here.folder / "second")])
    with pytest.raises(phalanx.PeerLost):
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("phalanx", init_method=f"file://{here.folder / 'second'}", rank=0, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return total.item()


def test_a_rank_that_replaced_its_program_can_join_a_new_group(tmp_path: Path) -> None:
    end = World(_restart, 2, tmp_path).ends()[0]
    assert end.value == 2, end.trace


def _take_numbers(here: Here, with_child: bool) -> bytes:
    """Closes descriptors that belong to others, as daemonizing programs do, and opens files under their numbers."""
    here.init()
    dist.barrier()
    child = os.fork() if with_child else 0
    if with_child and child == 0:
        # It keeps the descriptors open that its parent closes.
        signal.pause()
    own = {here.fileno(), 0, 1, 2}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in own:
            with contextlib.suppress(OSError):
                os.close(fd)
    path = here.folder / f"file{here.rank}"
    files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600) for _ in range(64)]
    dist.destroy_process_group()
    for file in files:
        os.fstat(file)
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return path.read_bytes()


@pytest.mark.parametrize("with_child", [False, True])
def test_files_that_take_the_numbers_of_ours_are_left_alone(tmp_path: Path, with_child: bool) -> None:
    assert values(_take_numbers, 2, tmp_path, with_child) == [b"", b""]
