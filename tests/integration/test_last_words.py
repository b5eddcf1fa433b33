"""The first exception that nobody caught on a rank is told to its peers, however its process ends; and torchrun."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from ranks import Here, World, place

import phalanx
import programs


class DataError(Exception):
    """What a program raises."""


def _raise() -> None:
    raise DataError("shard 7 is empty")


_RAISED_AT = place(_raise, "raise DataError")
_WORDS = f"{DataError.__module__}.DataError: shard 7 is empty ({_RAISED_AT})"


class Told(NamedTuple):
    """The parts of a PeerLost."""

    message: str
    exception: str | None
    frames: tuple[str, ...]


def _told() -> Told:
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.all_reduce(torch.ones(1))
    assert caught.value.peer == 1
    return Told(caught.value.message, caught.value.exception, caught.value.frames)


def _in_main() -> None:
    _raise()


def _in_thread() -> None:
    thread = threading.Thread(target=_raise)
    thread.start()
    thread.join()


def _in_finally() -> None:
    try:
        _raise()
    finally:
        dist.destroy_process_group()


def _in_another_call() -> None:
    """One exception leads to the next: the one that is not caught is told."""
    try:
        _raise()
    except DataError:
        raise ValueError("no data\nno training") from None


def _after_a_caught_one() -> None:
    with pytest.raises(DataError):
        _raise()


def _exit_in_finally() -> None:
    try:
        sys.exit(4)
    finally:
        dist.destroy_process_group()


_ENDS: dict[str, Callable[[], None]] = {
    "main": _in_main,
    "thread": _in_thread,
    "finally": _in_finally,
    "caught": _after_a_caught_one,
    "another": _in_another_call,
    "exit in finally": _exit_in_finally,
}


def _meet(here: Here, end: str) -> Told | None:
    here.init()
    dist.barrier()
    if here.rank == 1:
        _ENDS[end]()
        return None
    return _told()


_WAITED = f"while rank 0 waited for it in all_reduce, seq 2, at {place(_told, 'dist.all_reduce')}"
_LAST_CALLS = (
    "\n  the last calls of rank 1:"
    f"\n    barrier, seq 1, group 'default_pg', at {place(_meet, 'dist.barrier')} (completed)"
)
# Of the traceback, what is not of the way in which a process is started.
_FRAMES: dict[str, list[tuple[Callable[..., Any], str]]] = {
    "main": [(_meet, "_ENDS[end]()"), (_in_main, "_raise()"), (_raise, 'raise DataError("shard 7 is empty")')],
    "thread": [(_raise, 'raise DataError("shard 7 is empty")')],
    "finally": [(_in_finally, "_raise()"), (_raise, 'raise DataError("shard 7 is empty")')],
}


def _survivor(folder: Path, end: str, way: str) -> tuple[Told, int | None, str]:
    world = World(_meet, 2, folder, end, way=("call", way))
    world.keep_dead()
    first, second = world.ends()
    assert first.error is None, first.trace
    return first.value, second.exitcode, world.output(1)


@pytest.mark.parametrize("way", ["short program", "child"])
@pytest.mark.parametrize("end", ["main", "thread", "finally"])
def test_peers_are_told_of_the_exception(end: str, way: str, tmp_path: Path) -> None:
    told, code, output = _survivor(tmp_path, end, way)
    assert told.exception == _WORDS
    frames = [f"{place(function, text)}: {text}" for function, text in _FRAMES[end]]
    assert list(told.frames[-len(frames) :]) == frames
    assert len(told.frames) == len(frames) or end == "main"
    what = "left the group (it was destroyed there)" if end == "finally" else "ended"
    # Who has an exception to tell does not wait for the code.
    message = re.sub(r"ended \(exit code \d\)", "ended", told.message)
    traceback = "".join(f"\n    {frame}" for frame in told.frames)
    assert message == (f"rank 1 {what} {_WAITED}\n  the first exception of rank 1: {_WORDS}{traceback}{_LAST_CALLS}")
    assert code == (end != "thread")
    # The rank itself still says it, too.
    assert "DataError: shard 7 is empty" in output


def test_peers_are_told_of_the_exception_of_a_whole_program(tmp_path: Path) -> None:
    told, code, _ = _survivor(tmp_path, "main", "program")
    assert told.message.startswith("rank 1 ended while")
    assert told.exception == _WORDS
    assert told.frames[-1] == f'{_RAISED_AT}: raise DataError("shard 7 is empty")'
    assert code == 1


def test_an_exception_that_was_caught_is_no_reason(tmp_path: Path) -> None:
    told, code, _ = _survivor(tmp_path, "caught", "short program")
    assert told == Told(f"rank 1 ended (exit code 0) {_WAITED}{_LAST_CALLS}", None, ())
    assert code == 0


def test_an_exception_with_several_lines_is_told_in_one(tmp_path: Path) -> None:
    told, _, _ = _survivor(tmp_path, "another", "short program")
    raised_at = place(_in_another_call, "raise ValueError")
    assert told.exception == f"ValueError: no data; no training ({raised_at})"
    assert told.frames[-1].startswith(f"{raised_at}: raise ValueError(")


def test_an_exit_is_no_exception(tmp_path: Path) -> None:
    told, code, _ = _survivor(tmp_path, "exit in finally", "short program")
    assert told == Told(f"rank 1 left the group (it was destroyed there) {_WAITED}{_LAST_CALLS}", None, ())
    assert code == 4


def _worker(rank: int, folder: Path) -> None:
    """For torch.multiprocessing, which ends the others as soon as one has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store = dist.FileStore(os.fspath(folder / "store"), 3)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=3)
    dist.barrier()
    if rank == 1:
        _raise()
    (folder / f"told{rank}").write_text(_told().message)


def test_peers_are_told_under_torch_multiprocessing(tmp_path: Path) -> None:
    # As spawn() does it, from a process that has loaded torch.
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="shard 7 is empty"):
        torch.multiprocessing.start_processes(_worker, (tmp_path,), nprocs=3, start_method="forkserver")
    for rank in (0, 2):
        assert f"the first exception of rank 1: {_WORDS}" in (tmp_path / f"told{rank}").read_text()


def _forking(here: Here) -> None:
    """A rank that starts ranks by fork, with a group of its own."""
    here.init()
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_forked, args=(here.folder, rank)) for rank in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    dist.barrier()
    dist.destroy_process_group()
    here.tell([child.exitcode for child in children])


def _forked(folder: Path, rank: int) -> None:
    group = phalanx.ProcessGroup(dist.FileStore(os.fspath(folder / "forked"), 2), rank, 2)
    group.barrier().wait()
    if rank == 1:
        _raise()
    with pytest.raises(phalanx.PeerLost) as caught:
        group.barrier().wait()
    (folder / "told").write_text(str(caught.value))


def test_peers_are_told_in_forked_children(tmp_path: Path) -> None:
    world = World(_forking, 1, tmp_path, way="child")
    assert world.told(0) == [0, 1]
    world.ends()
    text = (tmp_path / "told").read_text()
    assert "rank 0: rank 1 ended" in text
    assert f"the first exception of rank 1: {_WORDS}" in text


def _going_down(here: Here) -> None:
    """Rank 1 has called exit and does not come to its end."""
    libc = ctypes.CDLL(None)
    if here.rank == 1:
        # The interpreter is not taken down before, which may take longer than peers wait for it.
        atexit.register(libc.exit, 7)
    here.init()
    dist.barrier()
    if here.rank == 1:
        # What was registered first runs last.
        libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)
        sys.exit(7)
    here.tell(_told())
    dist.destroy_process_group()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not tell a process its exit code")
def test_the_exit_code_of_a_process_that_is_still_going_down(tmp_path: Path) -> None:
    world = World(_going_down, 2, tmp_path, way=("call", "program"))
    told = world.told(0)
    world.signal(1, signal.SIGKILL)
    world.ends()
    assert told.message.startswith("rank 1 ended (exit code 7) while rank 0 waited for it in all_reduce")
    assert told.exception is None


_TRAINING = """
import os, signal, sys
import torch, torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("phalanx")
total = torch.ones(1)
dist.all_reduce(total)
if attempt == 0 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(total)
except dist.DistBackendError as error:
    open(f"{sys.argv[1]}/failed{dist.get_rank()}", "w").write(str(error))
    raise
open(f"{sys.argv[1]}/done{dist.get_rank()}", "w").write(f"{attempt} {total.item()}")
dist.destroy_process_group()
"""


def test_torchrun_starts_again(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_TRAINING)
    options: list[Any] = ["--nproc-per-node=2", "--max-restarts=2", "--monitor-interval=0.05", "--standalone"]
    result = programs.run(["torchrun", *options, program, tmp_path], tmp_path)
    assert result.returncode == 0, result.stderr
    assert [(tmp_path / f"done{rank}").read_text() for rank in (0, 1)] == ["1 4.0", "1 4.0"]
    failed = tmp_path / "failed0"
    # The agent may have been faster and ended it.
    assert not failed.exists() or "rank 1 died (" in failed.read_text()
