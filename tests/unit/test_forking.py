"""What processes that the tests fork are like."""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Connection
from pathlib import Path

import programs
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


# Rank 0, the first to be forked, counts the children of the launcher; the others stay until it has.
_COUNT_SIBLINGS = """
import os
from pathlib import Path

def parent(process):
    return process.joinpath("stat").read_text().rpartition(")")[2].split()[1]

def siblings():
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield from [process] * (parent(process) == str(os.getppid()))
        except OSError:
            pass

if os.environ["RANK"] == "0":
    count = len(list(siblings()))
    Path("new").write_text(str(count))
    Path("new").rename("count")
while not Path("count").exists():
    os.sched_yield()
"""


def test_ranks_of_a_launcher_begin_when_all_are_forked(tmp_path: Path) -> None:
    """So no rank connects to the launcher, whose threads then hold locks, while another one is being forked."""
    (tmp_path / "siblings.py").write_text(_COUNT_SIBLINGS)
    done = programs.run(["torchrun", "--standalone", "--nproc-per-node", "4", "siblings.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "count").read_text() == "4"
