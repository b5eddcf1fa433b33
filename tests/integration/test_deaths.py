"""A rank that dies, in whatever way: who needs it is told who died and how, who does not need it goes on.

The victim dies when the test says so. Its parent does not collect it before the survivors have said what they saw, so
that how it died can be seen on every kernel; one test is about those whom the parent collects at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, gave_up_on, place, values

import phalanx

_LARGE = 4_000_000  # elements; far more than fits into a channel


class DataError(Exception):
    """What a program raises."""


def _raise() -> None:
    raise DataError("shard 7 is empty")


_RAISED_AT = place(_raise, "raise DataError")

_DEATHS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "os._exit": lambda: os._exit(3),
    "exception": _raise,
    "sys.exit": lambda: sys.exit(4),
    "return": lambda: None,
}
_TOLD = {
    "SIGKILL": "rank 2 died (killed by SIGKILL)",
    "SIGSEGV": "rank 2 died (killed by SIGSEGV)",
    "os._exit": "rank 2 died (exit code 3)",
    "exception": "rank 2 ended",
    "sys.exit": "rank 2 ended (exit code 4)",
    "return": "rank 2 ended (exit code 0)",
}


def _lost(call: Callable[[], object]) -> dict[str, Any]:
    """The PeerLost that the call raises: its parts and its text, without the caller's own rank."""
    with pytest.raises(phalanx.PeerLost) as caught:
        call()
    error = caught.value
    assert isinstance(error, dist.DistBackendError)
    head, _, said = str(error).partition(f"rank {error.rank}: ")
    # So it begins where a peer was faster.
    said = said.removeprefix("the group is broken: ")
    parts = {"peer": error.peer, "exception": error.exception, "frames": error.frames}
    return {**parts, "head": head, "said": said}


def _start(op: str) -> dist.Work:
    """Something that needs rank 2."""
    work: dist.Work | None
    if op == "all_reduce":
        work = dist.all_reduce(torch.ones(3), async_op=True)
    elif op == "large all_reduce":
        work = dist.all_reduce(torch.ones(_LARGE), async_op=True)
    elif op == "recv":
        work = dist.irecv(torch.ones(3), 2)
    elif op == "any source":
        work = dist.irecv(torch.ones(3))
    else:
        work = dist.isend(torch.ones(_LARGE), 2)
    assert work is not None
    return work


_CALLS: dict[str, Callable[[], object]] = {
    "sync": lambda: dist.all_reduce(torch.ones(3)),
    "sync, large": lambda: dist.all_reduce(torch.ones(_LARGE)),
    "barrier": dist.barrier,
    "async": lambda: _start("all_reduce").wait(),
    "async, large": lambda: _start("large all_reduce").wait(),
    "async, with a timeout": lambda: _start("all_reduce").wait(timedelta(seconds=30)),
    "recv": lambda: dist.recv(torch.ones(3), 2),
    "irecv": lambda: _start("recv").wait(),
    "send": lambda: dist.send(torch.ones(_LARGE), 2),
    "isend": lambda: _start("send").wait(),
}


def _meet(here: Here, death: str, call: str) -> None:
    """Rank 2 dies, the others call."""
    here.init()
    dist.barrier()
    if here.rank == 2:
        here.tell()
        here.hear()
        _DEATHS[death]()
        return
    here.tell()
    here.hear()
    here.tell(_lost(_CALLS[call]))
    with pytest.raises(phalanx.PeerLost, match=r"the group is broken: rank 2 (died|ended)"):
        dist.barrier()
    dist.destroy_process_group()


def _watch(folder: Path, death: str, call: str, waiting: bool) -> tuple[list[dict[str, Any]], list[int | None]]:
    """What ranks 0 and 1 were told. They call while rank 2 lives, if they wait, or when it has died."""
    world = World(_meet, 3, folder, death, call, way=("call", "call", "short program"))
    world.all_told(0, 1, 2)
    world.keep_dead()
    for rank in (2, 0, 1) if not waiting else (0, 1, 2):
        if rank == 2 and waiting:
            for waiter in (0, 1):
                world.wait_asleep(waiter)
        world.tell(rank)
        if rank == 2 and not waiting:
            world.wait_dead(2)
    told = [world.told(rank) for rank in (0, 1)]
    ends = world.ends()
    for end in ends[:2]:
        assert end.error is None, end.trace
    return told, [end.exitcode for end in ends]


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "later"])
@pytest.mark.parametrize("death", _DEATHS)
def test_every_way_to_die_is_told(death: str, waiting: bool, tmp_path: Path) -> None:
    told, codes = _watch(tmp_path, death, "sync", waiting)
    assert codes[:2] == [0, 0]
    waited = f" waited for it in all_reduce, seq 2, at {place(_CALLS['sync'], 'dist.all_reduce')}"
    last_calls = [
        "  the last calls of rank 2:",
        f"    barrier, seq 1, group 'default_pg', at {place(_meet, 'dist.barrier')} (completed)",
    ]
    for one in told:
        assert one["head"] == "[PEER_LOST] all_reduce, seq 2, group 'default_pg', "
        assert one["peer"] == 2
        first, *more, last = one["said"].splitlines()
        if death == "exception":
            # Who has an exception to tell does not wait for the code.
            first = first.replace(_TOLD[death], "rank 2 ended").replace("rank 2 ended", _TOLD[death])
        assert first.startswith(f"{_TOLD[death]} while rank ")
        assert first.endswith(waited)
        if death == "exception":
            words = f"{DataError.__module__}.DataError: shard 7 is empty ({_RAISED_AT})"
            frames = [f"    {frame}" for frame in one["frames"]]
            assert more == [f"  the first exception of rank 2: {words}", *frames, *last_calls]
            assert one["exception"] == words
            assert one["frames"][-1] == f'{_RAISED_AT}: raise DataError("shard 7 is empty")'
            assert last.startswith("  Next: mend what raised on rank 2")
        else:
            assert more == last_calls
            assert (one["exception"], one["frames"]) == (None, ())
            assert last.startswith("  Next: look ")
    # The failure is one and the same, whoever found it.
    assert told[0]["said"] == told[1]["said"]


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "later"])
@pytest.mark.parametrize("call", [call for call in _CALLS if call != "sync"])
def test_every_call_that_needs_the_dead_raises(call: str, waiting: bool, tmp_path: Path) -> None:
    told, codes = _watch(tmp_path, "SIGKILL", call, waiting)
    assert codes == [0, 0, -signal.SIGKILL]
    for one in told:
        assert one["peer"] == 2
        assert one["said"].startswith("rank 2 died (killed by SIGKILL) while rank ")
    assert told[0]["said"] == told[1]["said"]


def _future(here: Here) -> list[str]:
    here.init()
    dist.barrier()
    if here.rank == 1:
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
    work, message = dist.all_reduce(torch.ones(3), async_op=True), dist.irecv(torch.ones(3), 1)
    assert work is not None
    assert message is not None
    futures = [one.get_future() for one in (work, message)]
    chained = futures[0].then(lambda future: future.value()[0] * 2)
    here.tell()
    texts = []
    for future in (*futures, chained):
        # torch keeps the text of what a future raises, not its class.
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        texts.append(str(caught.value))
    for one in (work, message):
        assert _lost(one.wait)["peer"] == 1
        assert isinstance(one.exception(), phalanx.PeerLost)
    dist.destroy_process_group()
    return texts


def test_futures_of_calls_that_need_the_dead_raise(tmp_path: Path) -> None:
    world = World(_future, 2, tmp_path)
    world.told(0)
    world.wait_asleep(0)
    world.keep_dead()
    world.tell(1)
    end = world.ends()[0]
    assert end.error is None, end.trace
    for text in end.value:
        # From Python 3.12 on, torch says that the exception has notes.
        assert "PeerLost: [PEER_LOST] " in text.replace("[WITH __notes__]", "")
        assert "rank 0: rank 1 died (killed by SIGKILL) while rank 0 waited for it in " in text


def _half_sent(here: Here) -> None:
    here.init()
    dist.barrier()
    if here.rank == 1:
        work = dist.isend(torch.ones(_LARGE), 0)
        here.tell()
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
        del work
    here.hear()
    here.tell(_lost(lambda: dist.recv(torch.ones(_LARGE), 1)))


def test_a_message_that_was_announced_only_does_not_come(tmp_path: Path) -> None:
    world = World(_half_sent, 2, tmp_path)
    world.told(1)
    world.keep_dead()
    world.tell(1)
    world.wait_dead(1)
    world.tell(0)
    assert world.told(0)["peer"] == 1
    world.ends()


def _any_source(here: Here) -> str:
    here.init()
    dist.barrier()
    if here.rank > 0:
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
    here.tell()
    lost = _lost(lambda: dist.recv(torch.ones(3)))
    assert lost["peer"] in (1, 2)
    return str(lost["said"])


def test_a_receive_from_anybody_waits_for_the_last_peer(tmp_path: Path) -> None:
    world = World(_any_source, 3, tmp_path)
    world.told(0)
    world.wait_asleep(0)
    world.keep_dead()
    world.tell(2)
    world.wait_dead(2)
    # It goes on waiting, as one is left.
    world.wait_naps(0)
    assert world.processes[0].is_alive()
    world.tell(1)
    end = world.ends()[0]
    assert end.error is None, end.trace
    assert "died (killed by SIGKILL) while rank 0 waited for it in recv, seq 1" in end.value


def _collected(here: Here) -> str:
    here.init()
    dist.barrier()
    if here.rank == 1:
        os._exit(3)
    return str(_lost(dist.barrier)["said"])


def test_one_whom_the_parent_collected_at_once(tmp_path: Path) -> None:
    said = World(_collected, 2, tmp_path).ends()[0].value
    # Older kernels keep the exit code for the parent alone.
    assert said.startswith(("rank 1 died (exit code 3) while", "rank 1 died (how is not visible from here) while"))


def _complete(here: Here, op: str) -> list[float]:
    """Rank 2 has given what it had to give when it dies."""
    here.init()
    dist.barrier()
    tensor = torch.full((5,), float(here.rank + 1))
    parts = [torch.zeros(5) for _ in range(3)]

    def call() -> Any:
        if op == "broadcast":
            return dist.broadcast(tensor, 2, async_op=True)
        if op == "gather":
            return dist.gather(tensor, parts if here.rank == 0 else None, 0, async_op=True)
        if op == "all_gather":
            return dist.all_gather(parts, tensor, async_op=True)
        if op == "reduce":
            return dist.reduce(tensor, 0, async_op=True)
        return dist.all_reduce(tensor, async_op=True)

    if here.rank == 2:
        works = [call() if op != "send" else dist.isend(tensor, 0)]
        here.tell()
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
        del works
    here.hear()
    if op == "send":
        if here.rank == 0:
            dist.recv(tensor, 2)
    else:
        call().wait()
    if "gather" in op and (here.rank == 0 or op == "all_gather"):
        tensor = torch.stack(parts).sum(0)
    # Here it is needed; and who calls later finds a broken group.
    here.tell()
    here.hear()
    assert _lost(dist.barrier)["peer"] == 2
    return tensor.tolist()


_COMPLETE = {
    "broadcast": (3, 3),
    "all_reduce": (6, 6),
    "all_gather": (6, 6),
    "reduce": (6, None),
    "gather": (6, None),
    "send": (3, None),
}


@pytest.mark.parametrize("op", _COMPLETE)
def test_calls_that_do_not_need_the_dead_any_more_finish(op: str, tmp_path: Path) -> None:
    world = World(_complete, 3, tmp_path, op)
    world.told(2)
    world.keep_dead()
    world.tell(2)
    world.wait_dead(2)
    world.tell_all(0, 1)
    world.all_told(0, 1)
    world.tell_all(0, 1)
    ends = world.ends()
    for end, expected in zip(ends[:2], _COMPLETE[op], strict=True):
        assert end.error is None, end.trace
        assert expected is None or end.value == [expected] * 5


def _in_flight(here: Here) -> float:
    """Rank 1 sends to rank 0 and is stopped; rank 2 dies; rank 0 learns of that while its receive is under way."""
    here.init()
    pair = dist.new_group([0, 1])
    dist.barrier()
    if here.rank == 2:
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.full((_LARGE,), float(here.rank))
    if here.rank == 1:
        work = dist.isend(tensor, 0)
    else:
        here.hear()
        work = dist.irecv(tensor, 1)
    assert work is not None
    here.tell()
    if here.rank == 0:
        assert _lost(dist.barrier)["peer"] == 2
        assert not work.is_completed()
        here.tell()
    else:
        here.hear()
    work.wait()
    # New calls go the way of the group that is whole, and of one that is made now.
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    assert total.item() == 4
    assert _lost(lambda: dist.send(torch.ones(1), 1 - here.rank))["peer"] == 2
    return tensor.double().mean().item()


def test_messages_between_the_living_and_other_groups_go_on(tmp_path: Path) -> None:
    world = World(_in_flight, 3, tmp_path)
    world.told(1)
    world.signal(1, signal.SIGSTOP)
    world.tell(0)
    world.told(0)
    world.keep_dead()
    world.tell(2)
    world.told(0)
    world.signal(1, signal.SIGCONT)
    world.tell(1)
    ends = world.ends()
    assert [end.value for end in ends[:2]] == [1.0, 1.0], ends[0].trace + ends[1].trace


def _stopped(here: Here, timeout: float) -> float | str:
    here.init(timeout)
    dist.barrier()
    here.tell()
    here.hear()
    total = torch.ones(1)
    try:
        dist.all_reduce(total)
    except phalanx.CallTimeout as error:
        return str(error)
    return total.item()


def test_a_rank_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    world = World(_stopped, 2, tmp_path, 30)
    world.all_told(0, 1)
    world.signal(1, signal.SIGSTOP)
    world.tell(0)
    world.tell(1)
    world.wait_asleep(0)
    world.wait_naps(0)
    world.signal(1, signal.SIGCONT)
    assert [end.value for end in world.ends()] == [2, 2]


def test_a_rank_that_stands_still_until_the_timeout_is_missing(tmp_path: Path) -> None:
    world = World(_stopped, 2, tmp_path, 0.4)
    world.all_told(0, 1)
    world.signal(1, signal.SIGSTOP)
    world.tell(0)
    world.tell(1)
    world.processes[0].join(30)
    assert world.processes[0].exitcode == 0
    world.signal(1, signal.SIGCONT)
    first, second = world.ends()
    assert first.value.splitlines()[0] == (
        "[MISSING] all_reduce, seq 2, group 'default_pg', rank 0: gave up after a timeout of 0.4 s: rank 1 did not come"
    )
    gave_up = gave_up_on("all_reduce, seq 2", place(_stopped, "dist.all_reduce"))
    assert f"the group is broken: rank 0 {gave_up}rank 1 did not come\n" in second.value


def _overtaken(here: Here) -> tuple[str, str]:
    """Two deaths, and a third rank that looks late: it is told of the first."""
    here.init()
    dist.barrier()
    if here.rank in (2, 3):
        here.hear()
        os._exit(here.rank)
    if here.rank == 1:
        here.tell()
        here.hear()
    first = _lost(lambda: dist.recv(torch.ones(1), 2) if here.rank == 0 else dist.all_reduce(torch.ones(1)))
    here.tell()
    return str(first["said"]), str(_lost(dist.barrier)["said"])


def test_the_first_failure_is_the_one_that_all_are_told(tmp_path: Path) -> None:
    world = World(_overtaken, 4, tmp_path)
    world.told(1)
    world.keep_dead()
    world.tell(2)
    world.told(0)
    world.tell(3)
    world.wait_dead(3)
    world.tell(1)
    first, second = world.ends()[:2]
    said = "rank 2 died (exit code 2) while rank 0 waited for it in recv, seq 1"
    for end in (first, second):
        assert end.error is None, end.trace
        assert all(text.startswith(said) for text in end.value)


def test_threads_are_not_ranks(tmp_path: Path) -> None:
    """A thread that ends by an exception does not end its rank."""
    assert values(_thread_raises, 2, tmp_path) == [2.0, 2.0]


def _thread_raises(here: Here) -> float:
    here.init()
    threading.excepthook = lambda arguments: None
    thread = threading.Thread(target=_raise)
    thread.start()
    thread.join()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()
