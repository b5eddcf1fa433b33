"""Processes that take part in a job folder, do as they are told, and may be killed.

They are forked from a process that has loaded everything and runs no thread; each talks to the test through a socket.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from boxes import Call, make_box

from phalanx import _native
from phalanx.debug.folders import Membership, make_job_folder


class Nursery:
    def __init__(self, folder: Path) -> None:
        address = str(folder / "socket")
        self._listener = Listener(address, "AF_UNIX")
        self._process = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE)

    def start(self) -> Process:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return Process(self._listener.accept())

    def close(self) -> None:
        self._process.communicate()
        self._listener.close()


class Process:
    """One of them."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self.pid: int = connection.recv()
        self._handle = os.pidfd_open(self.pid)

    def do(self, what: str, *args: object) -> Any:
        """Has it done; returns when it is."""
        self._connection.send((what, args))
        return self._connection.recv()

    def kill(self) -> None:
        """Returns when it is dead, and the system has taken back what it had."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait_dead()

    def wait_dead(self) -> None:
        self._connection.close()
        select.select([self._handle], [], [])
        os.close(self._handle)


class _Actor:
    """What a process can be told."""

    def __init__(self) -> None:
        self.membership: Membership | None = None

    def make_job_folder(self) -> Path | None:
        return make_job_folder()

    def join(self, folder: Path) -> Path:
        """The process' box is made, too."""
        self.membership = Membership.join(folder)
        pid, start = _native.own_identity()
        self.membership.box.write_bytes(make_box(Call(), pid=pid, start=start))
        return self.membership.box

    def end(self, failed: bool) -> None:
        assert self.membership is not None
        self.membership.end(failed)

    def fork(self) -> int:
        """A child that tries to end its parent's part, and stays until its parent's socket is closed."""
        mine, others = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(mine)
            self.end(False)
            os.write(others, b"!")
            signal.pause()
        os.close(others)
        os.read(mine, 1)
        os.close(mine)
        return child


def _main() -> None:
    # Nobody asks how they ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while os.read(0, 1):
        if os.fork() == 0:
            break
    else:
        return
    actor = _Actor()
    with Client(sys.argv[1], "AF_UNIX") as connection:
        connection.send(os.getpid())
        while True:
            try:
                what, args = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send(getattr(actor, what)(*args))


if __name__ == "__main__":
    _main()
