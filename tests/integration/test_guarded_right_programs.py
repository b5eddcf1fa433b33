"""Programs that are right on the plain backend, and unusual: a guard does not change what they get."""

from __future__ import annotations

import itertools
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded import init, logged
from ranks import Here, World, values

import phalanx
from phalanx.guards import watch
from phalanx.guards.calls import GuardedCalls
from phalanx.transports import waits


def _wait_again(here: Here) -> list[float]:
    """Rank 0 gives up waiting, and waits again. Rank 1 comes in between."""
    init(here)
    tensor = torch.full((2,), float(here.rank + 1))
    if here.rank == 1:
        here.hear()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if here.rank == 0:
        with pytest.raises(phalanx.CallTimeout, match="rank 1 did not come; the call is still under way"):
            work.wait(timedelta(milliseconds=200))
        here.tell()
    work.wait()
    return tensor.tolist()


def test_a_wait_that_is_given_up_leaves_the_call_under_way(tmp_path: Path) -> None:
    world = World(_wait_again, 2, tmp_path)
    world.told(0)
    world.tell(1)
    assert [end.value for end in world.ends()] == [[3.0, 3.0]] * 2


def _from_anybody(here: Here) -> list[float]:
    """The receives are waited for in another order than they were made in."""
    group = init(here)
    if here.rank == 1:
        dist.send(torch.full((4,), 4.0), 0)
        dist.send(torch.full((5,), 5.0), 0)
        dist.barrier()
        return []
    first, second = torch.empty(4), torch.empty(5)
    works = [group.recv_anysource([first], 0), group.recv_anysource([second], 0)]
    for work in reversed(works):
        work.wait()
    dist.barrier()
    return [first[0].item(), second[0].item()]


def test_receives_from_anybody_may_be_waited_for_in_any_order(tmp_path: Path) -> None:
    assert values(_from_anybody, 2, tmp_path) == [[4.0, 5.0], []]


class _Own(torch.Tensor):
    """A class of tensors that the native front does not know."""


def _unlike_spellings(here: Here) -> list[Any]:
    """Rank 0 makes the same calls as the others, with other classes and spellings."""
    group = init(here)
    tensor = torch.full((3,), float(here.rank + 1))
    dist.broadcast(tensor.as_subclass(_Own) if here.rank == 0 else tensor, 0)
    found = [tensor.tolist()]
    if here.rank == 0:
        group.send([tensor], tag=7, dstRank=1).wait()
    else:
        group.recv([tensor], 0, 7).wait()
    dist.barrier()
    return found


def test_ranks_may_spell_a_call_differently(tmp_path: Path) -> None:
    assert values(_unlike_spellings, 2, tmp_path) == [[[1.0, 1.0, 1.0]]] * 2


def _slow_barrier(here: Here, num_groups: int) -> list[str]:
    """Rank 0 waits until it was warned, and for some looks more of the thread that warns."""
    os.environ["PHALANX_SLOW"] = "0.5"
    texts = logged()
    look, num_looks = watch._look, itertools.count(1)

    def look_and_count(calls: GuardedCalls) -> None:
        look(calls)
        if not texts.empty() and next(num_looks) == 4 * num_groups:
            here.tell()

    watch._look = look_and_count
    init(here)
    for _ in range(num_groups - 1):
        dist.new_group()
    dist.barrier()
    if here.rank == 1:
        here.hear()
    dist.barrier()
    dist.destroy_process_group()
    assert not waits.entered()
    return [texts.get() for _ in range(texts.qsize())]


def test_a_long_wait_is_told_once_and_forgotten_with_its_group(tmp_path: Path) -> None:
    world = World(_slow_barrier, 2, tmp_path, 3)
    world.told(0)
    world.tell(1)
    ends = world.ends()
    for end in ends:
        assert end.error is None, end.trace
    assert len([text for text in ends[0].value if "has waited for 0.5 s" in text]) == 1


def _blamed(here: Here) -> str:
    """Rank 0 does its part and leaves in order, rank 1 dies before it has done its own."""
    init(here)
    dist.barrier()
    if here.rank == 1:
        here.tell()
        here.hear()
    if here.rank == 0:
        dist.reduce(torch.ones(2), 2)
        dist.destroy_process_group()
        return ""
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.reduce(torch.ones(2), 2)
    return str(caught.value)


def test_the_rank_that_has_not_come_is_blamed(tmp_path: Path) -> None:
    world = World(_blamed, 3, tmp_path)
    world.told(1)
    os.kill(world.processes[1].pid or 0, signal.SIGKILL)
    assert "rank 1 died (killed by SIGKILL)" in world.ends()[2].value
