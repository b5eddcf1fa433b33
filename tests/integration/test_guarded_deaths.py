"""A rank of a guarded group dies, in whatever way: the others are told who died and how, although the engine moves the
bytes. The groups' timeout is far longer than the tests, so only the guard can have ended a call."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded import init, logged, lost
from ranks import Here, World, until, values

import phalanx

_LARGE = 4_000_000


class DataError(Exception):
    """What a program raises."""


def _raise() -> None:
    raise DataError("shard 7 is empty")


_DEATHS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "os._exit": lambda: os._exit(3),
    "exception": _raise,
    "sys.exit": lambda: sys.exit(4),
    "return": lambda: None,
}
_TOLD = {
    "SIGKILL": "rank 2 died (killed by SIGKILL) while rank ",
    "SIGSEGV": "rank 2 died (killed by SIGSEGV) while rank ",
    "os._exit": "rank 2 died (exit code 3) while rank ",
    "exception": "rank 2 ended",
    "sys.exit": "rank 2 ended",
    "return": "rank 2 ended",
}


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


_CALLS: dict[str, Callable[[], object]] = {
    "sync": lambda: dist.all_reduce(torch.ones(3)),
    "sync, large": lambda: dist.all_reduce(torch.ones(_LARGE)),
    "barrier": dist.barrier,
    "async": lambda: _started(dist.all_reduce(torch.ones(3), async_op=True)).wait(),
    "recv": lambda: dist.recv(torch.ones(3), 2),
    "irecv": lambda: _started(dist.irecv(torch.ones(3), 2)).wait(),
    "send": lambda: dist.send(torch.ones(_LARGE), 2),
}


def _meet(here: Here, death: str, call: str) -> None:
    """Rank 2 dies, the others call."""
    init(here)
    dist.barrier()
    here.tell()
    here.hear()
    if here.rank == 2:
        _DEATHS[death]()
        return
    here.tell(lost(_CALLS[call]))
    with pytest.raises(phalanx.PeerLost, match=r"rank 2 (died|ended)"):
        dist.barrier()
    here.tell()
    dist.destroy_process_group()


def _watch(folder: Path, death: str, call: str, waiting: bool) -> list[dict[str, Any]]:
    """What ranks 0 and 1 were told. They call while rank 2 lives, if they wait, or when it has died."""
    world = World(_meet, 3, folder, death, call, way=("call", "call", "short program"))
    world.all_told(0, 1, 2)
    world.keep_dead()
    for rank in (0, 1, 2) if waiting else (2, 0, 1):
        if rank == 2 and waiting:
            for waiter in (0, 1):
                world.wait_asleep(waiter)
        world.tell(rank)
        if rank == 2 and not waiting:
            world.wait_dead(2)
    told = [world.told(rank) for rank in (0, 1)]
    world.all_told(0, 1)
    for end in world.ends()[:2]:
        assert end.error is None, end.trace
    return told


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "later"])
@pytest.mark.parametrize("death", _DEATHS)
def test_every_way_to_die_is_told(death: str, waiting: bool, tmp_path: Path) -> None:
    told = _watch(tmp_path, death, "sync", waiting)
    for one in told:
        assert re.fullmatch(r"\[PEER_LOST\] all_reduce, seq \d, group 'default_pg', ", one["head"])
        assert one["peer"] == 2
        assert one["said"].startswith(_TOLD[death])
        assert "waited for it in all_reduce, seq 2, at tests/integration/test_guarded_deaths.py:" in one["said"]
        expected = f"{DataError.__module__}.DataError: shard 7 is empty" if death == "exception" else None
        assert (one["exception"] or "").startswith(expected or "")
        assert (one["exception"] is None) == (expected is None)
        assert "\n  Next: " in one["said"]
    # The failure is one and the same, whoever found it.
    assert told[0]["said"] == told[1]["said"]


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "later"])
@pytest.mark.parametrize("call", [call for call in _CALLS if call != "sync"])
def test_every_call_that_needs_the_dead_raises(call: str, waiting: bool, tmp_path: Path) -> None:
    for one in _watch(tmp_path, "SIGKILL", call, waiting):
        assert one["peer"] == 2
        assert one["said"].startswith("rank 2 died (killed by SIGKILL) while rank ")


def _in_the_call(here: Here) -> dict[str, Any]:
    """Rank 1 dies when it has posted the call and handed it to Gloo; rank 2 comes after that."""
    init(here)
    dist.barrier()
    if here.rank == 2:
        here.tell()
        here.hear()
        return lost(dist.all_reduce, torch.ones(_LARGE))
    work = _started(dist.all_reduce(torch.ones(_LARGE), async_op=True))
    here.tell()
    here.hear()
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return lost(work.wait)


def test_a_rank_that_dies_in_a_call(tmp_path: Path) -> None:
    world = World(_in_the_call, 3, tmp_path)
    world.all_told(0, 1, 2)
    world.keep_dead()
    world.tell(1)
    world.wait_dead(1)
    world.tell_all(0, 2)
    ends = world.ends()
    for rank in (0, 2):
        assert ends[rank].error is None, ends[rank].trace
        assert ends[rank].value["peer"] == 1
        assert ends[rank].value["said"].startswith("rank 1 died (killed by SIGKILL) while rank ")


def _stop(here: Here) -> list[float]:
    """Rank 2 is stopped: the others are warned, and go on when it does."""
    os.environ["PHALANX_SLOW"] = "0.5"
    init(here)
    dist.barrier()
    texts = logged()
    tensor = torch.ones(3)
    if here.rank == 2:
        here.tell()
        here.hear()
        dist.all_reduce(tensor)
        return tensor.tolist()
    work = _started(dist.all_reduce(tensor, async_op=True))
    here.tell(texts.get(timeout=30))
    work.wait()
    return tensor.tolist()


def test_a_rank_that_is_stopped_is_late_and_not_dead(tmp_path: Path) -> None:
    world = World(_stop, 3, tmp_path)
    world.told(2)
    world.signal(2, signal.SIGSTOP)
    for rank in (0, 1):
        assert world.told(rank).startswith(f"all_reduce, seq 2, group 'default_pg', rank {rank}: has waited for 0.5 s")
    world.signal(2, signal.SIGCONT)
    world.tell(2)
    for end in world.ends():
        assert end.error is None, end.trace
        assert end.value == [3.0] * 3


def _time_out(here: Here, way: str) -> str | None:
    """Rank 0 gives up on ranks 1 and 3, which stay away."""
    init(here, timeout=2)
    dist.barrier()
    if here.rank in (1, 3):
        here.hear()
        return None
    with pytest.raises(phalanx.CallTimeout) as caught:
        _CALLS[way]()
    here.tell()
    return str(caught.value)


@pytest.mark.parametrize("way", ["sync", "async", "barrier"])
def test_a_timeout_names_the_ranks_that_did_not_come(way: str, tmp_path: Path) -> None:
    world = World(_time_out, 4, tmp_path, way)
    world.all_told(0, 2)
    world.tell_all(1, 3)
    ends = world.ends()
    for rank in (0, 2):
        assert ends[rank].error is None, ends[rank].trace
        assert ends[rank].value.startswith("[MISSING] ")
        assert "ranks 1, 3" in ends[rank].value.splitlines()[0]


def _leave_well(here: Here) -> list[float]:
    """Rank 1 leaves when it has made its calls: nobody needs it any more."""
    init(here)
    tensor = torch.ones(3)
    work = _started(dist.all_reduce(tensor, async_op=True))
    if here.rank == 1:
        work.wait()
        dist.destroy_process_group()
        here.tell()
        return tensor.tolist()
    here.hear()
    work.wait()
    return tensor.tolist()


def test_a_rank_that_has_left_in_order_is_not_lost(tmp_path: Path) -> None:
    world = World(_leave_well, 3, tmp_path)
    world.told(1)
    world.tell_all(0, 2)
    for end in world.ends():
        assert end.error is None, end.trace
        assert end.value == [3.0] * 3


def _keep_nothing(here: Here) -> None:
    """No thread of ours and no memory stays when the group is destroyed."""
    before = {path.name for path in Path("/proc/self/task").iterdir()}
    init(here)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    until(lambda: "memfd:phalanx" not in Path("/proc/self/maps").read_text(), "a segment is still mapped")

    def ours() -> set[str]:
        names = {path.name: (path / "comm").read_text() for path in Path("/proc/self/task").iterdir()}
        return {name for task, name in names.items() if task not in before and name.startswith("phalanx")}

    until(lambda: not ours(), "threads are left")


def test_nothing_is_left_of_a_guarded_group(tmp_path: Path) -> None:
    values(_keep_nothing, 2, tmp_path)
