"""The keeper: a warm process from which worlds are forked, one after another.

Three kinds of process: the program that a person or pytest started holds a `Keeper`, the client's end; the keeper
process has torch loaded, has one thread, and runs a supervising function for each world; ranks are forked from it
(worlds.py). The keeper ends with its client.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worlds import ClientGone, InRank, Supervisor

_SERVE = "import keeper; main = keeper.serve(); main and main()"


class Keeper:
    """The client's end. `run` carries out one supervising function at a time.

    With `quick_ends`, ranks do not take down modules and libraries that the keeper has loaded.
    """

    def __init__(self, *, quick_ends: bool = False) -> None:
        ours, theirs = socket.socketpair()
        # One thread only, or the ranks could inherit a lock that nobody gives back.
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        folder = Path(__file__).parent
        paths = [str(folder), str(folder.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._socket, self._lines = ours, ours.makefile()
        # A session of its own: Ctrl-C is for the client, which then ends the keeper.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(theirs.fileno()), *(["quick ends"] if quick_ends else [])],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
        theirs.close()

    def run(self, function: str, on_note: Callable[[Any], None] = lambda note: None, **arguments: Any) -> Any:
        """Calls `module.function(supervisor, **arguments)` in the keeper; arguments and result are of JSON's kinds."""
        self._socket.sendall(json.dumps([function, arguments]).encode() + b"\n")
        while line := self._lines.readline():
            kind, value = json.loads(line)
            if kind == "end":
                return value
            on_note(value)
        raise RuntimeError(f"the keeper ended with exit code {self._process.wait()} in {function}({arguments})")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve() -> Callable[[], None] | None:
    """The keeper's main loop. Returns None when the client has gone, and in a rank what the rank has to do."""
    import torch
    import torch.distributed

    # Loaded once, here, for all ranks.
    import phalanx.debug.observing
    import phalanx.group.process_group
    import phalanx.group.registry  # noqa: F401

    quick_ends = "quick ends" in sys.argv
    if quick_ends:
        from quick_end import skip_library_destructors

        skip_library_destructors()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ranks then leave alone what is loaded here, also at their end, and a world takes half the time. What hangs on a
    # loaded module is not taken down then: a rank may undo it (`Here.unfreeze_unless_quick`).
    gc.freeze()
    client = socket.socket(fileno=int(sys.argv[1]))
    supervisor = Supervisor(client, client.makefile(), quick_ends)
    for request in supervisor.requests:
        name, arguments = json.loads(request)
        module, _, function = name.rpartition(".")
        try:
            supervisor.tell("end", getattr(importlib.import_module(module), function)(supervisor, **arguments))
        except InRank as rank:
            return rank.main
        except ClientGone:
            return None
    return None
