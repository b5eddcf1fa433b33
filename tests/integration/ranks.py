"""Runs a function once on each rank of a fresh world of processes and gathers what became of them.

An exception of the function is gathered, too ("call"), or leaves the process, which is then a child of multiprocessing
("child") or ends as a Python program does, with excepthook and finalization ("program"). A "short program" has all of
that but the last step, in which the interpreter takes itself down, and which may take a second.

Unlike the contract suite's pool these processes are thrown away: their tests break groups, kill ranks and send signals.
They are forked from a server that has torch loaded, so that a world starts in a fraction of a second.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import select
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store

from forking import context
from freezing import freeze_loaded

# The numbers of system calls: futex, and those in which the parent of the ranks waits for something to do.
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)
_IDLE = {"x86_64": ("232", "281"), "aarch64": ("22",)}.get(os.uname().machine, ())


def shared_files() -> set[str]:
    """The files of Phalanx in /dev/shm, of this and other programs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("phalanx-")}


def check_no_files_left(before: set[str]) -> None:
    """Of what was not there before, nothing stays. Other programs may be making groups meanwhile: their files go."""
    new = shared_files() - before
    until(lambda: not new & shared_files(), f"files are left: {new}")


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
    """The ranks of one test. `told(rank)` waits for what the rank's function says through `tell`, and the other way."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        folder: Path,
        *args: object,
        way: str | Sequence[str] = "call",  # of all, or by rank
    ) -> None:
        self._pipes = []
        self.processes = []
        self._folder = folder
        # Those of a test that has failed.
        while _worlds:
            _worlds[-1].kill()
        _worlds.append(self)
        ways = [way] * size if isinstance(way, str) else way
        for rank, one in enumerate(ways):
            ours, theirs = context.Pipe()
            here = Here(theirs, rank, size, folder)
            # Only those who are no daemons may have children.
            process = context.Process(target=_WAYS[one], args=(here, function, args), daemon=one != "child")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def told(self, rank: int, timeout: float = 30) -> Any:
        assert self._pipes[rank].poll(timeout), f"rank {rank} said nothing"
        try:
            kind, value = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            kind, value = "ended", self.output(rank)
        assert kind == "told", value
        return value

    def tell(self, rank: int, value: Any = None) -> None:
        self._pipes[rank].send(value)

    def all_told(self, *ranks: int) -> None:
        for rank in ranks:
            self.told(rank)

    def tell_all(self, *ranks: int) -> None:
        for rank in ranks:
            self.tell(rank)

    def keep_dead(self) -> None:
        """Ranks that die from now on are not collected by their parent before `ends`: all can see how they died."""
        # Not while it still holds the pipe of a rank that it has just started.
        while Path(f"/proc/{_parent()}/syscall").read_text().split()[0] not in _IDLE:
            os.sched_yield()
        os.kill(_parent(), signal.SIGSTOP)

    def output(self, rank: int) -> str:
        """What a rank that is a program has printed."""
        path = self._folder / f"output{rank}"
        return path.read_text() if path.exists() else ""

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_asleep(self, rank: int, timeout: float = 30) -> None:
        """Waits until the rank's main thread sleeps in a futex, which is where our waits end up."""
        path = Path(f"/proc/{self.processes[rank].pid}/syscall")
        until(lambda: path.read_text().startswith(f"{_FUTEX} "), f"rank {rank} is not asleep", timeout)

    def wait_dead(self, rank: int, timeout: float = 30) -> None:
        """Waits until a rank whose parent does not collect it (`keep_dead`) is dead."""
        pid = self.processes[rank].pid
        assert pid is not None
        until(lambda: is_gone(pid), f"rank {rank} lives", timeout)

    def wait_naps(self, rank: int, num: int = 5, timeout: float = 30) -> None:
        """Waits until a rank that waits has slept and looked around so often."""
        pid = self.processes[rank].pid
        first = _num_sleeps(pid)
        until(lambda: _num_sleeps(pid) >= first + num, f"rank {rank} does not wait", timeout)

    def ends(self, timeout: float = 60) -> list[End]:
        """Waits for all ranks; one that has not ended in time fails the test."""
        deadline = time.monotonic() + timeout
        ends = []
        try:
            for rank, pipe in enumerate(self._pipes):
                end = None
                while end is None:
                    assert pipe.poll(max(0, deadline - time.monotonic())), f"rank {rank} did not end in {timeout} s"
                    try:
                        kind, value = pipe.recv()
                    except (EOFError, ConnectionResetError):
                        end = End()
                    else:
                        end = value if kind == "end" else None
                ends.append(end)
            os.kill(_parent(), signal.SIGCONT)
            for rank, (process, end) in enumerate(zip(self.processes, ends, strict=True)):
                process.join(max(1, deadline - time.monotonic()))
                end.exitcode = process.exitcode
                assert end.exitcode is not None, f"rank {rank} did not end in {timeout} s"
        finally:
            self.kill()
        return ends

    def kill(self) -> None:
        os.kill(_parent(), signal.SIGCONT)
        for process in self.processes:
            process.kill()
            process.join()
        _worlds.remove(self)


# Those that have not ended yet.
_worlds: list[World] = []


@atexit.register
def _kill_worlds() -> None:
    """Of a test that has failed: the parent of its ranks may be stopped (`keep_dead`), and would be waited for."""
    while _worlds:
        _worlds[-1].kill()


class Here:
    """What a rank's function is given: who it is, and a way to talk to the test."""

    def __init__(self, pipe: multiprocessing.connection.Connection, rank: int, size: int, folder: Path) -> None:
        self._pipe = pipe
        self.rank = rank
        self.size = size
        self.folder = folder
        self._stores: list[Store] = []

    def tell(self, value: Any = None) -> None:
        self._pipe.send(("told", value))

    def fileno(self) -> int:
        """Of the pipe to the test."""
        return self._pipe.fileno()

    def hear(self) -> Any:
        """What the test tells."""
        return self._pipe.recv()

    def end(self, end: End) -> None:
        self._pipe.send(("end", end))

    def store(self, name: str = "store") -> Store:
        """A new object of the same store. All are kept: torch removes the file with the last one of all ranks."""
        self._stores.append(FileStore(os.fspath(self.folder / name), self.size))
        return self._stores[-1]

    def init(self, timeout: float = 30) -> None:
        dist.init_process_group(
            "phalanx",
            store=self.store(),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )


class Gate:
    """Lets a peer wait until this rank says that it has come to a point."""

    def __init__(self, here: Here) -> None:
        self._store = here.store("gate")

    def open(self, name: str) -> None:
        self._store.set(name, "")

    def wait(self, *names: str) -> None:
        self._store.wait(list(names), timedelta(seconds=30))


def is_gone(pid: int) -> bool:
    """Whether a process has ended with all of its threads."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def until(holds: Callable[[], bool], what: str, timeout: float = 30) -> None:
    """Looks again and again; `what` is said where it does not hold in time."""
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, what
        os.sched_yield()


def place(function: Callable[..., Any], text: str) -> str:
    """How errors name the first line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    number = next(number for number, line in enumerate(lines, first) if text in line)
    return f"{os.path.relpath(inspect.getfile(function))}:{number}, in {function.__name__}"


def gave_up_on(what: str, where: str) -> str:
    """What all but the one whose time was up are told of a timeout."""
    return f"gave up on {what}, at {where}, when its timeout ran out: "


def outline(text: str) -> str:
    """An error's first line and its last one, which says what to do next, without what it tells in between."""
    first, *_, last = text.splitlines()
    return f"{first}\n{last}"


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


def _gather(here: Here, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    # A shell that starts the tests in the background has them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        end = End(value=function(here, *args))
    except BaseException as error:
        end = End(
            error=type(error).__name__,
            code=getattr(error, "code", None),
            text=str(error),
            trace=traceback.format_exc(),
        )
    here.end(end)


def _let_go(here: Here, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    _redirect(here)
    function(here, *args)


def _be_short_program(here: Here, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    code = 1

    def main() -> None:
        nonlocal code
        try:
            function(here, *args)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
            raise

    def end() -> None:
        sys.stderr.flush()
        os._exit(code)

    # The last of all, as it is the first that is registered.
    atexit.register(end)
    _be_program(here, lambda here: main(), ())


def _be_program(here: Here, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    _redirect(here)
    # What was loaded before is not looked through in the end, which would take longer than all else.
    freeze_loaded()
    # From Python 3.13 on, a child of multiprocessing has forgotten what was to be called at the exit of its parent.
    if sys.version_info >= (3, 13):
        atexit.register(weakref.finalize._exitfunc)
    main = sys.modules["__main__"]
    main.main = lambda: function(here, *args)  # type: ignore[attr-defined]
    # What the interpreter does with a main program; SystemExit does not come back from here.
    failed = ctypes.pythonapi.PyRun_SimpleString(b"main()")
    ctypes.pythonapi.Py_Exit(1 if failed else 0)


_WAYS = {"call": _gather, "child": _let_go, "program": _be_program, "short program": _be_short_program}


def _redirect(here: Here) -> None:
    output = os.open(here.folder / f"output{here.rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)


def _parent() -> int:
    """The process of which all ranks are children."""
    pid: int = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _num_sleeps(pid: int | None) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("voluntary")]
    return int(line.split()[1])
