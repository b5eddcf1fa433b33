"""A rank that does not come: who waits for it is told where it is, in a warning first, and in the error at last.

The absent rank does what the test is about when all ranks have met; the others wait for it until their timeout.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, World, run, values

import phalanx
import phalanx.testing as pt
from default_group import default_group

_TIMEOUT = 1.0
_FILE = os.path.relpath(__file__)


def _place(function: Callable[..., object], mark: str) -> str:
    """Where in the function the line with the mark is, as reports say it."""
    lines, first = inspect.getsourcelines(function)
    (number,) = [number for number, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
    return f"{_FILE}:{first + number}, in {function.__name__}"


def _waiting_for_one(here: Here, absence: str) -> str:
    """What rank 0 and 2 are told of rank 1."""
    here.init()
    pair = dist.new_group([1], backend="phalanx")
    dist.barrier()  # last
    if here.rank == 1:
        _ABSENCES[absence](here, pair)
        return ""
    with pytest.raises(phalanx.CallTimeout) as caught:
        default_group().allreduce(torch.ones(1), timeout=timedelta(seconds=_TIMEOUT)).wait()
    here.tell()
    return caught.value.message


def _hear(here: Here, pair: dist.ProcessGroup) -> None:
    here.hear()  # hear


def _tell_and_hear(here: Here, pair: dist.ProcessGroup) -> None:
    here.tell()
    here.hear()


def _receive(here: Here, pair: dist.ProcessGroup) -> None:
    with pytest.raises(phalanx.CallTimeout):
        default_group().recv(torch.ones(3), 0, tag=5, timeout=timedelta(seconds=30)).wait()  # receive
    # Not to be found gone.
    here.hear()


def _keep_the_interpreter(here: Here, pair: dist.ProcessGroup) -> None:
    # Unlike CDLL it does not release the GIL.
    ctypes.PyDLL(None).read(os.open(here.folder / "fifo", os.O_RDWR), ctypes.create_string_buffer(1), 1)


def _work(here: Here, pair: dist.ProcessGroup) -> None:
    """Goes on with calls of its own until the others have given up."""
    group = default_group()
    while True:
        dist.all_reduce(torch.ones(1), group=pair)  # work
        try:
            group.barrier(timeout=timedelta(seconds=30)) if here._pipe.poll() else None
        except phalanx.CallTimeout:
            return


_ABSENCES: dict[str, Callable[[Here, dist.ProcessGroup], None]] = {
    "in its own code": _hear,
    "in another call": _receive,
    "keeps the interpreter": _keep_the_interpreter,
    "slow": _work,
    "stopped": _tell_and_hear,
}
_LAST = _place(_waiting_for_one, "last")
_BARRIER = f"    its last completed call: barrier, seq 1, group 'default_pg', at {_LAST}"


def _texts(tmp_path: Path, absence: str, before: Callable[[World], None] = lambda world: None) -> list[list[str]]:
    """The lines that ranks 0 and 2 are told, without the first one."""
    world = World(_waiting_for_one, 3, tmp_path, absence)
    before(world)
    world.all_told(0, 2)
    if absence == "stopped":
        world.signal(1, signal.SIGCONT)
    if absence == "keeps the interpreter":
        (tmp_path / "fifo").write_text("x")
    else:
        world.tell(1)
    ends = world.ends()
    assert [end.error for end in ends] == [None] * 3, [end.trace for end in ends]
    texts = [ends[rank].value.splitlines() for rank in (0, 2)]
    for first, *_ in texts:
        assert re.search(r"gave up .*: rank 1 did not come$", first)
    return [lines for _, *lines in texts]


def test_a_rank_in_its_own_code(tmp_path: Path) -> None:
    here = _place(_hear, "hear")
    for lines in _texts(tmp_path, "in its own code"):
        assert lines[0].startswith(f"  rank 1 is in its own code, at {_FILE.replace('test_hangs', 'ranks')}:")
        assert lines[1:3] == [_BARRIER, "    its stack, innermost last:"]
        assert f"      {here}" in lines


def test_a_rank_that_waits_in_another_call(tmp_path: Path) -> None:
    for lines in _texts(tmp_path, "in another call"):
        place = _place(_receive, "receive")
        waits = f"recv from rank 0, tag 5, seq 1, group 'default_pg', at {place}"
        assert re.fullmatch(rf"  rank 1 is in another call: it waits in {re.escape(waits)}, for [\d.]+ s", lines[0])
        assert lines[1] == _BARRIER


def test_a_rank_that_keeps_the_interpreter_to_itself(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for lines in _texts(tmp_path, "keeps the interpreter"):
        assert lines == [
            "  rank 1 does not answer: it sleeps without letting other threads of Python run (in a call into C?)",
            _BARRIER,
        ]


def test_a_rank_that_is_slow_but_alive(tmp_path: Path) -> None:
    for lines in _texts(tmp_path, "slow"):
        assert re.match(r"  rank 1 is slow, but alive: it has completed \d+ calls meanwhile, at ", lines[0])
        assert f"group '1', at {_place(_work, 'work')}" in lines[1]


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    def stop(world: World) -> None:
        world.told(1)
        world.signal(1, signal.SIGSTOP)

    for lines in _texts(tmp_path, "stopped", stop):
        assert lines == [
            "  rank 1 is stopped (by SIGSTOP, Ctrl-Z or a debugger); SIGCONT lets it go on",
            _BARRIER,
        ]


def _reduce_both(tensor: torch.Tensor, first: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=first)  # first
    dist.all_reduce(tensor, group=second)


def _in_different_orders(here: Here) -> str:
    here.init()
    groups = [dist.new_group([0, 1], timedelta(seconds=_TIMEOUT), group_desc=name) for name in ("rows", "columns")]
    first, second = groups if here.rank == 0 else groups[::-1]
    gate = Gate(here)
    tensor = torch.ones(1)
    with pytest.raises(phalanx.CallTimeout) as caught:
        _reduce_both(tensor, first, second)
    # The other one must not find this rank gone.
    gate.open(str(here.rank))
    gate.wait("0", "1")
    return caught.value.message


def test_groups_that_are_used_in_different_orders(tmp_path: Path) -> None:
    first = _place(_reduce_both, "first")
    for rank, text in enumerate(values(_in_different_orders, 2, tmp_path)):
        own, other = ("rows", "columns") if rank == 0 else ("columns", "rows")
        line = text.splitlines()[1]
        waits = f"for rank {rank} in all_reduce, seq 1, group '{other}', at {re.escape(first)}"
        told = f"this rank has not made that call: they use the groups '{own}' and '{other}' in different orders"
        assert re.fullmatch(rf"  rank {1 - rank} waits {waits}, for [\d.]+ s; {told}", line), text


def _slow(here: Here) -> list[str]:
    """The warnings of a rank that waits for a second, and goes on when the peer comes."""
    os.environ["PHALANX_SLOW"] = "0.2"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
    here.init()
    dist.barrier()
    gate = Gate(here)
    if here.rank == 1:
        gate.wait("told")  # wait
    else:

        def note(record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            gate.open("told")

        handler.emit = note  # type: ignore[method-assign]
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    dist.destroy_process_group()
    return said


def test_a_long_wait_is_told_once_and_goes_on(tmp_path: Path) -> None:
    told, nothing = values(_slow, 2, tmp_path)
    assert nothing == []
    (text,) = told
    lines = text.splitlines()
    assert lines[0] == "all_reduce, seq 2, group 'default_pg', rank 0: has waited for 0.2 s"
    assert lines[1].startswith("  rank 1 is in its own code, at ")
    assert lines[2].startswith("    its last completed call: barrier, seq 1, group 'default_pg', at ")
    assert len(lines) == 3


def _monitored(here: Here) -> tuple[str, float]:
    here.init()
    dist.barrier()
    if here.rank in (1, 3):
        here.hear()
        return "", 0.0
    began = time.monotonic()
    with pytest.raises(phalanx.CallTimeout) as caught:
        default_group().monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
    here.tell()
    return caught.value.message.splitlines()[0], time.monotonic() - began


def test_a_monitored_barrier_names_all_on_every_rank(tmp_path: Path) -> None:
    world = World(_monitored, 4, tmp_path)
    world.all_told(0, 2)
    world.tell_all(1, 3)
    ends = world.ends()
    for rank in (0, 2):
        assert ends[rank].value[0].endswith("ranks 1, 3 did not come")


def _with_records(here: Here, fails: bool) -> str:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    here.init()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    (job,) = (here.folder / "jobs").iterdir()
    dist.barrier()
    if fails and here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fails:
        with pytest.raises(phalanx.PeerLost) as caught:
            dist.barrier()
        assert (job / f"rank{here.rank}-1.txt").read_text() == f"PeerLost: {caught.value}\n"
        return caught.value.message
    return job.name


def test_a_job_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    values(_with_records, 3, tmp_path, False)
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_rank_that_is_killed_leaves_its_last_calls(tmp_path: Path) -> None:
    ends = run(_with_records, 3, tmp_path, True)
    (job,) = (tmp_path / "jobs").iterdir()
    assert job.stat().st_mode & 0o777 == 0o700
    assert len(list(job.glob("*.box"))) == 3
    for rank in (0, 2):
        lines = ends[rank].value.splitlines()
        assert lines[1] == "  the last calls of rank 1:"
        assert [line.split(", at")[0] for line in lines[2:]] == [
            "    all_reduce, seq 2, group 'default_pg'",
            "    all_reduce, seq 3, group 'default_pg'",
            "    barrier, seq 4, group 'default_pg'",
        ]
        assert all(line.endswith("(completed)") for line in lines[2:])


def _mostly_absent(rank: int, world: pt.World) -> str:
    if rank > 1:
        world.store.wait(["all were told"])
        return ""
    with pytest.raises(phalanx.CallTimeout) as caught:
        default_group().monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    if world.store.add("told", 1) == 2:
        world.store.set("all were told", "")
    return caught.value.message.splitlines()[0]


def test_a_monitored_barrier_names_all_however_many_there_are() -> None:
    everybody = ", ".join(map(str, range(2, 70)))
    for text in pt.run(_mostly_absent, ranks=70)[:2]:
        assert text.endswith(f"ranks {everybody} did not come")
