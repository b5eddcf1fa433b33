"""Subgroups that only their members make: who meets whom, and what ranks are told that mean different groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, run, values

import phalanx
import phalanx.testing as pt


def _sum(group: dist.ProcessGroup | None, rank: int) -> int:
    tensor = torch.tensor([10**rank])
    dist.all_reduce(tensor, group=group)
    return int(tensor.item())


def _disjoint(rank: int) -> list[int]:
    """torch gives both groups of a round the same name."""
    return [_sum(dist.new_group([0, 1] if rank < 2 else [2, 3]), rank) for _ in range(5)]


def _by_tag(rank: int) -> list[int]:
    make = dist.distributed_c10d._find_or_create_pg_by_ranks_and_tag
    groups = [make("pairs", [0, 1, 2, 3], 2), make("quads", [0, 1, 2, 3], 4), make("pairs", [0, 1, 2, 3], 2)]
    return [_sum(group, rank) for group in groups]


def _overlapping(rank: int) -> list[int]:
    """A chain: the groups that ranks share have different names on them."""
    chain = [[0, 1], [1, 2], [2, 3], [0, 1, 2, 3], [1, 3]]
    return [_sum(dist.new_group(ranks), rank) for ranks in chain if rank in ranks]


def _locally_synchronized(rank: int) -> list[int]:
    groups = [dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True) for _ in range(3)]
    return [_sum(group, rank) for group in groups]


_PROGRAMS: dict[Callable[[int], list[int]], list[list[int]]] = {
    _disjoint: [[11] * 5, [11] * 5, [1100] * 5, [1100] * 5],
    _by_tag: [[11, 1111, 11], [11, 1111, 11], [1100, 1111, 1100], [1100, 1111, 1100]],
    _overlapping: [[11, 1111], [11, 110, 1111, 1010], [110, 1100, 1111], [1100, 1111, 1010]],
    _locally_synchronized: [[11] * 3, [11] * 3, [1100] * 3, [1100] * 3],
}
_programs = pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__.strip("_"))


def _in_processes(here: Here, program: Callable[[int], list[int]]) -> list[int]:
    here.init(timeout=30)
    sums = program(here.rank)
    dist.destroy_process_group()
    return sums


@_programs
def test_members_alone_make_their_groups_between_processes(program: Callable[[int], list[int]], tmp_path: Path) -> None:
    assert values(_in_processes, 4, tmp_path, program) == _PROGRAMS[program]


@_programs
@pytest.mark.parametrize("schedule", ["round robin", "random", "free"])
def test_members_alone_make_their_groups_between_threads(program: Callable[[int], list[int]], schedule: str) -> None:
    for seed in range(1 if schedule != "random" else 5):
        options: dict[str, Any] = {"seed": seed} if schedule == "random" else {}
        assert pt.run(lambda rank, world: program(rank), 4, schedule=schedule, **options) == _PROGRAMS[program]


def _late(here: Here) -> int:
    """Rank 0 waits for rank 1, which first makes another group of the same name with rank 2, which is late."""
    here.init(timeout=30)
    if here.rank == 2:
        here.hear()
    for ranks in ([1, 2], [0, 1]) if here.rank == 1 else ([0, 1],) if here.rank == 0 else ([1, 2],):
        total = _sum(dist.new_group(ranks), here.rank)
    return total


def test_a_rank_that_makes_another_group_first_is_waited_for(tmp_path: Path) -> None:
    world = World(_late, 3, tmp_path)
    # Several looks at what the others are making.
    world.wait_naps(0, 60)
    world.wait_naps(1, 60)
    world.tell(2)
    ends = world.ends()
    assert [end.value for end in ends] == [11, 11, 110], [end.trace for end in ends]


# What each rank takes for the members, the code of the error and who is said to wait for whom.
_WRONG = {
    "sizes": ([[0, 1], [0, 1, 2], [0, 1, 2]], "GROUP:SIZE", "ranks [0, 1] on rank 0 and ranks [0, 1, 2] on rank 1"),
    "ranks": ([[0, 1], [1, 2], [0, 2]], "GROUP:RANKS", "ranks [0, 1] on rank 0, ranks [1, 2] on rank 1 and ranks"),
}


def _make_wrong(rank: int, lists: list[list[int]]) -> list[str]:
    with pytest.raises(phalanx.GroupError) as caught:
        dist.new_group(lists[rank])
    assert caught.value.rank == lists[rank].index(rank)
    return [caught.value.code, str(caught.value)]


def _make_wrong_in_processes(here: Here, lists: list[list[int]]) -> list[str]:
    here.init(timeout=1000)
    return _make_wrong(here.rank, lists)


@pytest.mark.parametrize("case", _WRONG)
@pytest.mark.parametrize("where", ["processes", "threads"])
def test_ranks_that_mean_different_groups_are_told_both(case: str, where: str, tmp_path: Path) -> None:
    lists, code, text = _WRONG[case]
    if where == "processes":
        results = values(_make_wrong_in_processes, 3, tmp_path, lists)
    else:
        results = pt.run(lambda rank, world: _make_wrong(rank, lists), 3)
    for found, message in results:
        assert found == code
        # The circle may be told from any of its ranks on.
        assert "expected the same ranks everywhere, got " in message
        assert {part for part in ("ranks [0, 1] on rank 0", "on rank 1") if part in message}, message
    assert any(text in message for _, message in results) or case == "ranks"


def _sizes_of_worlds(here: Here) -> None:
    dist.init_process_group("phalanx", store=here.store(), rank=here.rank, world_size=3 if here.rank else 2)


def test_worlds_of_different_sizes(tmp_path: Path) -> None:
    for end in run(_sizes_of_worlds, 3, tmp_path):
        assert (end.error, end.code) == ("GroupError", "GROUP:SIZE"), end.trace
        assert "got ranks [0, 1] on rank 0 and ranks [0, 1, 2] on rank 1" in end.text
