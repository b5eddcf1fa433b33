"""Runs a function once on each rank of a fresh world of processes and gathers what became of them.

Unlike the contract suite's pool these processes are thrown away: their tests break groups, kill ranks and send signals.
They are forked from a server that has torch loaded, so that a world starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The number of the futex system call.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)


def shared_files() -> set[str]:
    """The files of Phalanx in /dev/shm, of this and other programs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("phalanx-")}


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "torch",
        "torch._dynamo",
        "torch.distributed",
        "phalanx",
        "phalanx.group.process_group",
    ]
)


@dataclass
class End:
    """How a rank ended: with a value, with an exception, or by a signal (all None but the exit code)."""

    value: Any = None
    error: str | None = None  # the class' name
    code: str | None = None  # a Phalanx error's code
    text: str = ""
    trace: str = ""
    exitcode: int | None = None


class World:
    """The ranks of one test. `told(rank)` waits for what the rank's function says through `tell`."""

    def __init__(self, function: Callable[..., Any], size: int, folder: Path, *args: object) -> None:
        self._pipes = []
        self.processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_main, args=(theirs, function, rank, size, folder, args), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def told(self, rank: int, timeout: float = 30) -> Any:
        assert self._pipes[rank].poll(timeout), f"rank {rank} said nothing"
        kind, value = self._pipes[rank].recv()
        assert kind == "told", value
        return value

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_asleep(self, rank: int, timeout: float = 30) -> None:
        """Waits until the rank's main thread sleeps in a futex, which is where our waits end up."""
        deadline = time.monotonic() + timeout
        path = Path(f"/proc/{self.processes[rank].pid}/syscall")
        while not path.read_text().startswith(f"{_FUTEX} "):
            assert time.monotonic() < deadline, f"rank {rank} is not asleep: {path.read_text()}"
            os.sched_yield()

    def ends(self, timeout: float = 60) -> list[End]:
        """Waits for all ranks; one that has not ended in time fails the test."""
        deadline = time.monotonic() + timeout
        ends = []
        try:
            for rank, (pipe, process) in enumerate(zip(self._pipes, self.processes, strict=True)):
                end = None
                while end is None:
                    assert pipe.poll(max(0, deadline - time.monotonic())), f"rank {rank} did not end in {timeout} s"
                    try:
                        kind, value = pipe.recv()
                    except EOFError:
                        end = End()
                    else:
                        end = value if kind == "end" else None
                process.join(max(1, deadline - time.monotonic()))
                end.exitcode = process.exitcode
                ends.append(end)
        finally:
            for process in self.processes:
                process.kill()
                process.join()
        return ends


class Here:
    """What a rank's function is given: who it is, and a way to talk to the test."""

    def __init__(self, pipe: multiprocessing.connection.Connection, rank: int, size: int, folder: Path) -> None:
        self._pipe = pipe
        self.rank = rank
        self.size = size
        self.folder = folder

    def tell(self, value: Any = None) -> None:
        self._pipe.send(("told", value))

    def store(self, name: str = "store") -> dist.Store:
        return dist.FileStore(os.fspath(self.folder / name), self.size)

    def init(self, timeout: float = 30) -> None:
        dist.init_process_group(
            "phalanx",
            store=self.store(),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )


def run(function: Callable[..., Any], size: int, folder: Path, *args: object, timeout: float = 60) -> list[End]:
    """function(here, *args) on every rank, and how each ended."""
    return World(function, size, folder, *args).ends(timeout)


def values(function: Callable[..., Any], size: int, folder: Path, *args: object, timeout: float = 60) -> list[Any]:
    """What function(here, *args) returned on each rank; none may raise."""
    ends = run(function, size, folder, *args, timeout=timeout)
    for rank, end in enumerate(ends):
        assert end.error is None, f"rank {rank}: {end.trace}"
        assert end.exitcode == 0, f"rank {rank} ended with exit code {end.exitcode}"
    return [end.value for end in ends]


def _main(
    pipe: multiprocessing.connection.Connection,
    function: Callable[..., Any],
    rank: int,
    size: int,
    folder: Path,
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        end = End(value=function(Here(pipe, rank, size, folder), *args))
    except BaseException as error:
        end = End(
            error=type(error).__name__,
            code=getattr(error, "code", None),
            text=str(error),
            trace=traceback.format_exc(),
        )
    pipe.send(("end", end))
