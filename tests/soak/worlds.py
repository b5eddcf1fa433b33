"""Worlds of rank processes that are forked from the keeper, watched, and may die.

A rank leaves through the bottom of the keeper's `serve` (InRank), so that its main program ends as any Python program
does, with excepthook and atexit. The keeper is the ranks' parent: it decides when a dead one is reaped, which is how
long its peers can read from /proc what became of it. Ranks are killed when the keeper ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import json
import mmap
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

_LONGEST_MESSAGE = 1 << 17
_PR_SET_PDEATHSIG = 1


class InRank(BaseException):
    """Unwinds the keeper's stack in a rank. Nothing between its raise and `serve` may have something to clean up."""

    def __init__(self, main: Callable[[], None]) -> None:
        super().__init__()
        self.main = main


class ClientGone(BaseException):
    """Nobody wants the result any more."""


@dataclass(frozen=True)
class Supervisor:
    """What a supervising function is given: the way to the client. Both ways have one line of JSON a message."""

    client: socket.socket
    requests: IO[str]
    quick_ends: bool = False

    def tell(self, kind: str, value: Any) -> None:
        try:
            self.client.sendall(json.dumps([kind, value]).encode() + b"\n")
        except BrokenPipeError:
            raise ClientGone from None

    def note(self, value: Any) -> None:
        self.tell("note", value)


class Board:
    """A few words that a rank writes and the keeper reads, also when the rank is dead."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)

    def _get(self, index: int) -> int:
        (value,) = struct.unpack_from("q", self._map, 8 * index)
        return int(value)

    @property
    def died(self) -> float:
        """When the victim died or was about to (time.monotonic), 0 before."""
        return self._get(0) / 1e9

    def note_death(self) -> None:
        struct.pack_into("q", self._map, 0, time.monotonic_ns())

    @property
    def begun(self) -> int:
        """The number of the step that the victim is in."""
        return self._get(1)

    def note_step(self, number: int) -> None:
        struct.pack_into("q", self._map, 8, number)


@dataclass
class Here:
    """What a rank's main function is given."""

    rank: int
    size: int
    board: Board
    _pipe: socket.socket
    _listener: socket.socket
    _quick_end: bool

    def unfreeze_unless_quick(self) -> None:
        """Unless ends are to be quick: the interpreter takes down all that is loaded."""
        if not self._quick_end:
            gc.unfreeze()

    def tell(self, kind: str, **values: Any) -> None:
        self._pipe.send(json.dumps([kind, values]).encode())

    def wait_told(self) -> None:
        """Waits until the keeper says `go`."""
        if not self._pipe.recv(_LONGEST_MESSAGE):
            os._exit(1)

    def connect(self) -> Any:
        """A TCPStore that rank 0 hosts."""
        from torch.distributed import TCPStore

        listener, port = self._listener, self._listener.getsockname()[1]
        wait = timedelta(seconds=60)
        if self.rank == 0:
            fd = listener.detach()
            return TCPStore(
                "127.0.0.1", port, self.size, True, timeout=wait, wait_for_workers=False, master_listen_fd=fd
            )
        listener.close()
        return TCPStore("127.0.0.1", port, self.size, False, timeout=wait, wait_for_workers=False)


@dataclass
class Rank:
    """A rank as the keeper sees it. `ended` is when it was seen dead, `status` its exit code or minus its signal."""

    number: int
    pid: int
    pidfd: int
    pipe: socket.socket
    output: int
    ended: float = 0.0
    status: int | None = None

    def text(self) -> str:
        """What it wrote to stdout and stderr. (pread: the rank's own place in the file is shared with us.)"""
        return os.pread(self.output, os.fstat(self.output).st_size, 0).decode(errors="replace")


@dataclass(frozen=True)
class Event:
    """A rank said something, or (kind `ended`) is dead but not reaped."""

    rank: Rank
    kind: str
    values: dict[str, Any] = field(default_factory=dict)


class World:
    """The ranks of one run. `main(here)` runs in each; `close` must be called in the end."""

    def __init__(self, supervisor: Supervisor, size: int, main: Callable[[Here], None]) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "the keeper must have one thread"
        self._supervisor = supervisor
        self.board = Board()
        self.ranks: list[Rank] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(supervisor.client, selectors.EVENT_READ)
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        for number in range(size):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            output = os.memfd_create("output")
            pid = os.fork()
            if pid == 0:
                self._forget(ours)
                _become_rank(output)
                here = Here(number, size, self.board, theirs, listener, self._supervisor.quick_ends)
                raise InRank(functools.partial(main, here))
            theirs.close()
            os.setpgid(pid, self.ranks[0].pid if self.ranks else pid)
            rank = Rank(number, pid, os.pidfd_open(pid), ours, output)
            self.ranks.append(rank)
            self._selector.register(ours, selectors.EVENT_READ, rank)
            self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)
        listener.close()

    def _forget(self, pipe: socket.socket) -> None:
        """Closes, in a rank, what belongs to the keeper."""
        self._selector.close()
        self._supervisor.requests.close()
        self._supervisor.client.close()
        pipe.close()
        for rank in self.ranks:
            os.close(rank.pidfd)
            rank.pipe.close()
            os.close(rank.output)

    def release(self) -> None:
        """Lets the ranks go on from `wait_told`."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.pipe.send(b"go")

    def events(self, deadline: float) -> Iterator[Event]:
        """What happens until the deadline, or until all ranks are dead."""
        while any(not rank.ended for rank in self.ranks):
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            # Words before deaths: a rank that speaks and ends is heard first.
            for key, _ in sorted(ready, key=lambda item: isinstance(item[0].fileobj, int)):
                if key.fileobj is self._supervisor.client:
                    self.close()
                    raise ClientGone
                rank: Rank = key.data
                if key.fileobj is rank.pipe:
                    yield from self._hear(rank)
                else:
                    self._selector.unregister(rank.pidfd)
                    rank.ended = time.monotonic()
                    yield Event(rank, "ended")

    def _hear(self, rank: Rank) -> Iterator[Event]:
        try:
            message = rank.pipe.recv(_LONGEST_MESSAGE)
        except ConnectionResetError:
            message = b""
        if message:
            kind, values = json.loads(message)
            yield Event(rank, kind, values)
        else:
            self._selector.unregister(rank.pipe)

    def reap(self, rank: Rank) -> None:
        """Takes a dead rank's exit status; after that it has no entry in /proc any more."""
        if rank.status is None:
            _, status = os.waitpid(rank.pid, 0)
            rank.status = os.waitstatus_to_exitcode(status)

    def where(self, rank: Rank) -> str:
        """Where a rank is stuck: Python's stacks, and what its threads wait for in the kernel."""
        lines = []
        for task in sorted(Path(f"/proc/{rank.pid}/task").glob("*")):
            with contextlib.suppress(OSError):
                words = [(task / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
                lines.append(f"thread {task.name} {' '.join(words)}")
        before = len(rank.text())
        os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        # The main program's stack ends with this word.
        while "<module>" not in rank.text()[before:] and time.monotonic() < deadline:
            os.sched_yield()
        return "\n".join([*lines, rank.text()[before:]])

    def close(self) -> bool:
        """Kills and reaps what is left. Says whether a process remained that is not one of the ranks."""
        for rank in self.ranks:
            if rank.status is None:
                signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
                self.reap(rank)
            os.close(rank.pidfd)
            rank.pipe.close()
            os.close(rank.output)
        self._selector.close()
        try:
            os.killpg(self.ranks[0].pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def _become_rank(output: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.register(signal.SIGUSR1, chain=False)
