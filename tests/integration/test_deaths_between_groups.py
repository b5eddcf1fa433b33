"""Ranks that die, end, raise or give up while they are in no group, or not yet in the one that others make.

Every timeout here is far longer than a test may take: whoever waits for it fails the test.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, World, run, values

import phalanx
from phalanx.testing.options import Options
from phalanx.testing.processes import run_in_processes
from phalanx.testing.world import World as KitWorld
from phalanx.transports import rendezvous, segments

_LONG = 1000.0


def _init(here: Here, rank: int, size: int = 3, timeout: float = _LONG) -> None:
    limit = timedelta(seconds=timeout)
    dist.init_process_group("phalanx", store=here.store(), rank=rank, world_size=size, timeout=limit)


def _told(call: Callable[[], object]) -> phalanx.PhalanxError:
    with pytest.raises(phalanx.PhalanxError) as caught:
        call()
    return caught.value


def _sum() -> float:
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def _between_worlds(here: Here, late: bool) -> tuple[str, str]:
    _init(here, here.rank)
    dist.barrier()
    if here.rank != 2 or not late:
        dist.destroy_process_group()
    if here.rank == 2:
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
    here.tell()
    here.hear()
    error = _told(lambda: _init(here, here.rank))
    return error.code, error.message


@pytest.mark.parametrize("late", [False, True], ids=["after it left", "before it left"])
def test_a_rank_dies_between_two_worlds(late: bool, tmp_path: Path) -> None:
    world = World(_between_worlds, 3, tmp_path, late)
    world.all_told(0, 1)
    world.keep_dead()
    world.tell(2)
    world.wait_dead(2)
    world.tell_all(0, 1)
    for end in world.ends()[:2]:
        assert end.value == ("PEER_LOST", "rank 2 died while the group was being made: killed by SIGKILL"), end.trace


def _replaced(here: Here, how: str) -> list[object]:
    """The fourth process takes the place of the third."""
    if here.rank == 3:
        here.hear()
        _init(here, 2)
        return [_sum()]
    _init(here, here.rank)
    dist.barrier()
    if here.rank == 2:
        here.hear()
        os._exit(0)
    seen: list[object] = []
    if how == "in a call":
        seen.append(_told(dist.barrier).code)
        dist.destroy_process_group()
    else:
        dist.destroy_process_group()
        here.tell()
        here.hear()
        with _coming_together(here, lets_find=how == "by a peer"):
            seen.append(_told(lambda: _init(here, here.rank)).code)
        Gate(here).open(f"told{here.rank}")
    here.tell()
    _init(here, here.rank)
    return [*seen, _sum()]


@contextlib.contextmanager
def _coming_together(here: Here, lets_find: bool) -> Iterator[None]:
    """Ranks 0 and 1 come to the same meeting: one that comes when the other has given up would come to its next one.

    `lets_find`: rank 1 does not look around before rank 0 has given up.
    """
    gate, come = Gate(here), rendezvous._Meeting.come

    def come_together(meeting: rendezvous._Meeting) -> None:
        come(meeting)
        gate.open(f"come{here.rank}")
        gate.wait("come0", "come1", *(["told0"] if lets_find and here.rank == 1 else []))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous._Meeting, "come", come_together)
        yield


@pytest.mark.parametrize("how", ["in a call", "in the making", "by a peer"])
def test_a_death_is_told_once_and_then_a_new_rank_is_waited_for(how: str, tmp_path: Path) -> None:
    world = World(_replaced, 4, tmp_path, how)
    if how != "in a call":
        world.all_told(0, 1)
    world.keep_dead()
    world.tell(2)
    world.wait_dead(2)
    if how != "in a call":
        world.tell_all(0, 1)
    world.all_told(0, 1)
    # They look several times for the rank whose process is dead.
    world.wait_naps(0, 40)
    world.wait_naps(1, 40)
    world.tell(3)
    ends = world.ends()
    assert [end.value for end in ends] == [["PEER_LOST", 3.0], ["PEER_LOST", 3.0], None, [3.0]], ends


def _other_rank(here: Here) -> float:
    """A process that was one rank is another rank in the next world, and the process of its old rank has ended."""
    _init(here, here.rank)
    dist.barrier()
    dist.destroy_process_group()
    if here.rank == 0:
        return 0
    here.hear()
    _init(here, here.rank - 1, 2)
    return _sum()


def test_ranks_that_get_other_numbers(tmp_path: Path) -> None:
    world = World(_other_rank, 3, tmp_path)
    world.processes[0].join(30)
    world.tell_all(1, 2)
    assert [end.value for end in world.ends()] == [0, 2.0, 2.0]


def _raises(here: Here, how: str) -> tuple[str, str | None]:
    _init(here, here.rank)
    if here.rank == 2:
        try:
            if how == "raises":
                raise OSError("no disk")
        except OSError:
            dist.destroy_process_group()
        else:
            dist.destroy_process_group()
        # It lives on, and makes no group.
        here.tell()
        here.hear()
        return "", None
    error = _told(lambda: dist.new_group([0, 1, 2], timeout=timedelta(seconds=_LONG)))
    assert isinstance(error, phalanx.PeerLost)
    assert error.peer == 2
    here.tell()
    return error.message.splitlines()[0], error.exception


@pytest.mark.parametrize("how", ["raises", "leaves"])
def test_a_rank_leaves_the_world_instead_of_making_a_group(how: str, tmp_path: Path) -> None:
    world = World(_raises, 3, tmp_path, how)
    world.all_told(0, 1, 2)
    world.tell(2)
    for end in world.ends()[:2]:
        message, exception = end.value
        assert message == "rank 2 ended while the group was being made"
        assert (exception or "").startswith("OSError: no disk" if how == "raises" else ""), exception


def _fails_inside(here: Here, where: int) -> str:
    if here.rank == where:

        def fail(*_: object, **__: object) -> NoReturn:
            raise MemoryError("no memory")

        segments.made_memfd = fail
    error = None
    try:
        _init(here, here.rank)
    except (MemoryError, phalanx.PeerLost) as caught:
        error = caught
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("where", [0, 1])
def test_a_rank_that_fails_inside_the_meeting_says_why(where: int, tmp_path: Path) -> None:
    texts = values(_fails_inside, 3, tmp_path, where)
    assert texts[where] == "MemoryError: no memory"
    for rank in {0, 1, 2} - {where}:
        assert texts[rank].startswith("PeerLost: [PEER_LOST] new_group, group '0', rank"), texts
        assert f"rank {where} gave up making the group: MemoryError: no memory\n" in texts[rank]


def _tries_again(here: Here) -> float:
    gate = Gate(here)
    if here.rank == 0:
        assert _told(lambda: _init(here, 0, 2, timeout=0.2)).code == "MISSING"
        gate.open("again")
    else:
        gate.wait("again")
    _init(here, here.rank, 2)
    return _sum()


def test_a_rank_that_comes_after_others_gave_up_meets_them_when_they_try_again(tmp_path: Path) -> None:
    assert values(_tries_again, 2, tmp_path) == [2.0, 2.0]


def _comes_too_late(here: Here) -> str:
    if here.rank == 0:
        _init(here, 0, 2, timeout=0.2)
    here.hear()
    return str(_told(lambda: _init(here, 1, 2)))


def test_a_rank_that_comes_after_others_gave_up_and_ended_is_told_why(tmp_path: Path) -> None:
    world = World(_comes_too_late, 2, tmp_path)
    world.processes[0].join(30)
    world.tell(1)
    text = world.ends()[1].value
    assert text.startswith("[MISSING] new_group, group '0', rank 1: rank 0 gave up making the group: gave up after ")


def _short_and_long(here: Here) -> str:
    """The rank with the short timeout tells the one with the long one."""
    if here.rank == 2:
        return ""
    return str(_told(lambda: _init(here, here.rank, timeout=0.3 if here.rank == 0 else _LONG)))


def test_a_timeout_of_one_rank_is_that_of_all(tmp_path: Path) -> None:
    first, second, _ = (end.value for end in run(_short_and_long, 3, tmp_path))
    assert "gave up after a timeout of 0.3 s: rank 2 did not come to make the group" in first
    assert "gave up after a timeout of 0.3 s: rank 2 did not come to make the group" in second


def _raise_on_one(rank: int, world: KitWorld) -> None:
    if rank == 1:
        raise OSError("no disk")
    dist.new_group([0, 1])


def _end_before_init(rank: int, world: KitWorld) -> None:
    if rank == 0:
        dist.init_process_group("phalanx", store=world.store, rank=0, world_size=2)


@pytest.mark.parametrize(
    ("function", "init"), [(_raise_on_one, True), (_raise_on_one, False), (_end_before_init, False)]
)
def test_the_kit_ends_a_rank_whose_peer_will_not_come(function: Callable[..., None], init: bool) -> None:
    if function is _raise_on_one and not init:
        function = _raise_before_init
    _, failures, _ = run_in_processes(Options(function, 2, processes=True, init=init), None)
    errors = dict(failures)
    assert isinstance(errors[0], phalanx.PeerLost), errors
    if function is not _end_before_init:
        assert (errors[0].exception or "").startswith("OSError: no disk"), errors[0]


def _raise_before_init(rank: int, world: KitWorld) -> None:
    if rank == 1:
        raise OSError("no disk")
    dist.init_process_group("phalanx", store=world.store, rank=0, world_size=2)
