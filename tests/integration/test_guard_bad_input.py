"""What users may do wrong when they ask for guards: each has an answer, and no rank ever hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded import init, init_plain, logged
from ranks import Here, World, values
from test_sharing import refuse

import phalanx
from phalanx.debug.observing import install
from phalanx.guards import guarding
from phalanx.guards.guarded import GuardedGroup
from phalanx.guards.guarding import guard_all


def _sum(size: int) -> bool:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.tolist() == [float(size)] * 3


def _twice(here: Here) -> list[bool]:
    init_plain(here)
    guarded = phalanx.guard()
    return [
        isinstance(guarded, GuardedGroup),
        phalanx.guard() is guarded,
        phalanx.guard(guarded) is guarded,
        dist.group.WORLD is guarded,
        dist.get_backend() == "gloo",
        _sum(here.size),
    ]


def test_a_group_that_is_guarded_twice(tmp_path: Path) -> None:
    assert values(_twice, 2, tmp_path) == [[True] * 6] * 2


def _all_twice(here: Here) -> bool:
    guard_all()
    group = init(here)
    return not isinstance(group.plain, GuardedGroup) and _sum(here.size)  # type: ignore[attr-defined]


def test_all_groups_are_guarded_twice(tmp_path: Path) -> None:
    assert values(_all_twice, 2, tmp_path) == [True, True]


def _own_group(here: Here) -> bool:
    here.init()
    group = dist.group.WORLD
    return phalanx.guard() is group


def test_a_group_of_our_own_needs_no_guard(tmp_path: Path) -> None:
    assert values(_own_group, 2, tmp_path) == [True, True]


@pytest.mark.parametrize("group", ["world", 3, torch.ones(1)], ids=["a name", "a number", "a tensor"])
def test_something_else_than_a_group(group: Any) -> None:
    with pytest.raises(phalanx.InvalidCall) as caught:
        phalanx.guard(group)
    assert caught.value.code == "INVALID:GROUP"


def _under_way(here: Here) -> str:
    """Rank 0 has begun a call that rank 1 has not made."""
    group = init_plain(here)
    install()
    work = dist.all_reduce(torch.ones(3), async_op=True) if here.rank == 0 else None
    with pytest.raises(phalanx.InvalidCall) as caught:
        phalanx.guard()
    # The plain group stays as it was.
    assert dist.group.WORLD is group
    if here.rank == 1:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()
    assert _sum(here.size)
    return str(caught.value)


def test_a_group_with_a_call_under_way(tmp_path: Path) -> None:
    for rank, text in enumerate(values(_under_way, 2, tmp_path)):
        assert text.startswith(
            f"[INVALID:PENDING] guard, group 'default_pg', rank {rank}: expected a group without calls"
        )
        assert "(rank 0: 1, rank 1: 0)" in text
        assert "\n  Next: guard the group on every rank at the same place" in text


def _not_all(here: Here) -> list[str]:
    """Ranks 0 and 2 guard the group, rank 1 does not."""
    guarding._PATIENCE = 1.0
    group = init_plain(here)
    texts = logged()
    if here.rank != 1:
        assert phalanx.guard() is group
        assert dist.group.WORLD is group
    # The plain group works on.
    assert _sum(here.size)
    found = []
    while not texts.empty():
        found.append(texts.get())
    return found


def test_only_some_ranks_guard_a_group(tmp_path: Path) -> None:
    told = values(_not_all, 3, tmp_path)
    assert told[1] == []
    for rank in (0, 2):
        (text,) = [text for text in told[rank] if "is not guarded" in text]
        assert text.startswith("group 'default_pg' is not guarded: ")
        assert "rank 1" in text


def _not_all_at_once(here: Here) -> bool:
    """Only rank 1 has no PHALANX_GUARD."""
    guarding._PATIENCE = 1.0
    if here.rank != 1:
        install()
        guard_all()
    group = init_plain(here)
    return not isinstance(group, GuardedGroup) and _sum(here.size)


def test_only_some_ranks_have_the_variable(tmp_path: Path) -> None:
    assert values(_not_all_at_once, 3, tmp_path) == [True] * 3


def _apart(here: Here) -> list[str]:
    """Ranks 1 and 2 can't open the memory of rank 0."""
    refuse(("/proc", "/dev/shm"), (1, 2), here)
    texts = logged()
    install()
    guard_all()
    group = init_plain(here)
    assert not isinstance(group, GuardedGroup)
    assert _sum(here.size)
    found = []
    while not texts.empty():
        found.append(texts.get())
    return [text for text in found if "guard" in text]


def test_ranks_that_can_not_share_memory(tmp_path: Path) -> None:
    for (text,) in values(_apart, 3, tmp_path):
        assert text.startswith("group 'default_pg' is not guarded: ")
        assert "the ranks do not share memory" in text


def test_an_unknown_word(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import torch"]
    environment = {**os.environ, "PHALANX_GUARD": "ja"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert "expected PHALANX_GUARD to be one of 0, off, 1, on, got 'ja'" in done.stderr
    assert done.returncode != 0


def _destroys_one(here: Here) -> list[bool]:
    """Sub groups are guarded, too, and end by themselves."""
    init(here)
    group = dist.new_group([1, 0], sort_ranks=False, group_desc="pair") if here.size == 2 else None
    assert isinstance(group, GuardedGroup)
    tensor = torch.ones(2)
    dist.broadcast(tensor, 1, group)
    dist.destroy_process_group(group)
    return [_sum(here.size), dist.is_initialized()]


def test_a_group_that_is_destroyed_leaves_the_others(tmp_path: Path) -> None:
    assert values(_destroys_one, 2, tmp_path) == [[True, True]] * 2


def _stops_while_made(here: Here) -> str:
    """Rank 1 ends before it makes the guard."""
    init_plain(here)
    if here.rank == 1:
        os._exit(3)
    guarding._PATIENCE = 20.0
    texts = logged()
    group = dist.group.WORLD
    assert phalanx.guard() is group
    return texts.get(timeout=30)


def test_a_rank_that_ends_before_it_guards_the_group(tmp_path: Path) -> None:
    ends = World(_stops_while_made, 2, tmp_path).ends()
    assert ends[0].error is None, ends[0].trace
    assert ends[0].value.startswith("group 'default_pg' is not guarded: ")
    assert "rank 1" in ends[0].value
