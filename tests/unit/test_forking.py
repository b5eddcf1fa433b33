"""What processes that the tests fork are like."""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Connection

from forking import context
from freezing import can_freeze


def _look(pipe: Connection) -> None:
    pipe.send((gc.get_freeze_count(), can_freeze(), os.environ.get("GLIBC_TUNABLES"), os.environ.get("PYTHONPATH")))


def test_forked_processes_have_frozen_modules_and_the_environment_of_the_tests() -> None:
    ours, theirs = context.Pipe()
    process = context.Process(target=_look, args=(theirs,))
    process.start()
    num_frozen, freezes, *environment = ours.recv()
    process.join()
    assert (num_frozen > 100_000) == freezes
    assert environment == [os.environ.get("GLIBC_TUNABLES"), os.environ.get("PYTHONPATH")]
