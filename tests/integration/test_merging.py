"""merge_remote_group: groups that were started apart become one, on both transports; and what keeps them from it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import End, Here, World, check_no_files_left, place, shared_files
from test_splitting import make, on_both, run, sum_of

import phalanx
import phalanx.testing as pt
from phalanx.group.group import Group


def _side(rank: int, world: pt.World, sizes: tuple[int, ...]) -> phalanx.ProcessGroup:
    """The group of this rank: the first ones make a group of the first size, and so on."""
    first = 0
    for number, size in enumerate(sizes):
        if rank < first + size:
            store = dist.PrefixStore(f"side {number}", world.store)
            return phalanx.new_group(store=store, rank=rank - first, world_size=size, name=f"side {number}")
        first += size
    raise AssertionError


def _merge(rank: int, world: pt.World) -> list[Any]:
    side = _side(rank, world, (2, 1, 2))
    told: list[Any] = []
    # One merger after another, with one store.
    for name in (None, "both", None):
        merged = side.merge_remote_group(world.store, 5, timedelta(seconds=25), name=name)
        assert sum_of(merged, rank) == 10
        assert merged.size() == 5
        told.append((merged.rank(), merged._info.name, merged.timeout.total_seconds()))
        half = merged.split_group([0, 1, 2])
        assert (half is not None) == (merged.rank() < 3)
        merged.shutdown()
    assert sum_of(side, 1) == side.size()
    side.shutdown()
    return told


@on_both
def test_groups_become_one(way: str) -> None:
    told = run(_merge, way, 5)
    for number, name in enumerate(("merged", "both", "merged")):
        ranks = [one[number][0] for one in told]
        assert sorted(ranks) == list(range(5))
        # Those of a group stay together, in their order.
        assert ranks[1] == ranks[0] + 1
        assert ranks[4] == ranks[3] + 1
        assert {one[number][1:] for one in told} == {(name, 25.0)}


def _alone(rank: int, world: pt.World) -> float:
    side = make(rank, world)
    return sum_of(side.merge_remote_group(world.store, 2), 1)


@on_both
def test_a_group_that_is_the_whole(way: str) -> None:
    assert run(_alone, way, 2) == [2, 2]


def _wrong_size(rank: int, world: pt.World, sizes: tuple[int, int], asked: tuple[int, int]) -> tuple[str, str]:
    side = _side(rank, world, sizes)
    number = int(rank >= sizes[0])
    # The second one comes when the first one has.
    if number == 1:
        world.store.wait(["phalanx/merges/merged/1"])
    with pytest.raises(phalanx.GroupError) as caught:
        side.merge_remote_group(world.store, asked[number])
    # All try again, and find each other.
    merged = side.merge_remote_group(world.store, sum(sizes))
    assert sum_of(merged, 1) == sum(sizes)
    return caught.value.code, caught.value.message


def _too_many(rank: int, world: pt.World) -> tuple[str, str]:
    return _wrong_size(rank, world, (2, 2), (3, 3))


def _of_two_minds(rank: int, world: pt.World) -> tuple[str, str]:
    return _wrong_size(rank, world, (1, 2), (3, 4))


@on_both
def test_the_wrong_size(way: str) -> None:
    assert set(run(_too_many, way, 4)) == {
        (
            "GROUP:SIZE",
            "expected groups of 3 ranks in all, got 4\n  group 'side 0' of 2 ranks\n  group 'side 1' of 2 ranks",
        )
    }
    assert set(run(_of_two_minds, way, 3)) == {
        (
            "GROUP:SIZE",
            "the groups do not agree how many ranks there are in all\n  group 'side 0' of 1 rank wants 3 in all\n"
            "  group 'side 1' of 2 ranks wants 4 in all",
        )
    }


def _nobody_comes(rank: int, world: pt.World) -> list[str]:
    side = make(rank, world, "lonely")
    texts = []
    for _ in range(2):
        with pytest.raises(phalanx.CallTimeout) as caught:
            side.merge_remote_group(world.store, 5, timedelta(seconds=0.3))
        texts.append(str(caught.value))
    assert sum_of(side, 1) == 2
    return texts


@on_both
def test_one_side_never_comes(way: str) -> None:
    for rank, texts in enumerate(run(_nobody_comes, way, 2)):
        for text in texts:
            assert text.startswith("[MISSING] merge_remote_group")
            assert (
                f"group 'lonely', rank {rank}: gave up after a timeout of 0.3 s: 3 of 5 ranks did not come to be merged"
                "; these came:\n  group 'lonely' of 2 ranks\n  Next: find out whether the other groups"
            ) in text


def _disagree(rank: int, world: pt.World) -> str:
    side = make(rank, world, "side")
    with pytest.raises(phalanx.Mismatch) as caught:
        side.merge_remote_group(world.store, 4 + rank)
    assert sum_of(side, 1) == 2
    return str(caught.value)


@on_both
def test_ranks_of_a_group_that_disagree(way: str) -> None:
    where = place(_disagree, "side.merge_remote_group")
    for rank, text in enumerate(run(_disagree, way, 2)):
        assert text == (
            f"[MISMATCH:SIZE] merge_remote_group, seq 1, group 'side', rank {rank}: rank 1 does not want the same "
            "group as rank 0\n"
            f"  rank 0 passed size 4 and the name 'merged', at {where}\n"
            f"  rank 1 passed size 5 and the name 'merged', at {where}\n"
            "  Next: pass the same size and name on all ranks; no group was made, and this one still works"
        )


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((dist.HashStore(), 1), {}, "[INVALID:SIZE] merge_remote_group, group 'pair', rank 0: expected at least the 2"),
        ((dist.HashStore(), "4"), {}, "[INVALID:SIZE]"),
        ((dist.HashStore(), 4), {"timeout": 4}, "[INVALID:TIMEOUT]"),
        ((dist.HashStore(), 4), {"name": ""}, "[INVALID:NAME]"),
        (
            (None, 4),
            {},
            "'pair', rank 0: no group was made\n  rank 0: expected a torch.distributed.Store, got None\n",
        ),
        (
            (dist.HashStore(), 4),
            {"name": "pair"},
            "[GROUP:NAME] merge_remote_group, seq 1, group 'pair', rank 0: no group was made\n  rank 0: the name",
        ),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    def program(rank: int, world: pt.World) -> None:
        side = make(rank, world, "pair")
        with pytest.raises(phalanx.PhalanxError) as caught:
            side.merge_remote_group(*arguments, **options)
        assert message.replace("'pair', rank 0", f"'pair', rank {rank}") in str(caught.value)
        assert sum_of(side, 1) == 2

    pt.run(program, ranks=2, init=False)


def _name_taken_on_one_rank(rank: int, world: pt.World) -> str:
    side = make(rank, world)
    other = phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name="taken") if rank == 1 else None
    with pytest.raises(phalanx.GroupError) as caught:
        side.merge_remote_group(world.store, 3, name="taken")
    assert sum_of(side, 1) == 2
    if other is not None:
        other.shutdown()
    return f"{caught.value.code} {caught.value.message}"


@on_both
def test_a_name_that_is_taken_on_one_rank(way: str) -> None:
    text = "GROUP:NAME no group was made\n  rank 1: the name 'taken' is taken: it is in an open group of that name"
    assert run(_name_taken_on_one_rank, way, 2) == [text] * 2


def test_a_key_that_others_use() -> None:
    store = dist.HashStore()
    store.set("phalanx/merges/both/1", "something else")
    with phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1) as alone:
        with pytest.raises(phalanx.GroupError) as caught:
            alone.merge_remote_group(store, 2, name="both")
        assert caught.value.code == "GROUP:STORE_KEY"
        assert "did not understand the key 'phalanx/merges/both/1' in the store" in str(caught.value)


def _lose_speaker(here: Here) -> str:
    number = here.rank // 2
    store = dist.PrefixStore(f"side {number}", here.store())
    side = phalanx.new_group(store=store, rank=here.rank % 2, world_size=2, name=f"side {number}")
    here.tell()
    with pytest.raises(phalanx.PeerLost) as caught:
        side.merge_remote_group(here.store("meeting"), 6)
    return str(caught.value)


def _ends_without(victim: int, folder: Path) -> list[End]:
    """The victim is killed when both groups wait for a third one."""
    world = World(_lose_speaker, 4, folder)
    world.all_told(0, 1, 2, 3)
    meeting = dist.FileStore(os.fspath(folder / "meeting"), 4)
    meeting.wait(["phalanx/merges/merged/1", "phalanx/merges/merged/2"], timedelta(seconds=30))
    world.signal(victim, signal.SIGKILL)
    ends = world.ends()
    for rank in {0, 1, 2, 3} - {victim}:
        assert ends[rank].error is None, ends[rank].trace
    return ends


def test_the_death_of_a_speaker(tmp_path: Path) -> None:
    before = shared_files()
    ends = _ends_without(2, tmp_path)
    for rank in (0, 1):
        assert "rank 0 of group 'side 1' of 2 ranks ended while the groups were being merged" in ends[rank].value
    assert "rank 0 died (" in ends[3].value
    check_no_files_left(before)


def test_the_death_of_a_rank_that_does_not_speak(tmp_path: Path) -> None:
    ends = _ends_without(3, tmp_path)
    for rank in (0, 1):
        assert "group 'side 1' could not be merged: rank 1 died while the group was being made: " in ends[rank].value
    # It may have died before or after its last step.
    assert "rank 1 died" in ends[2].value
    assert "killed by SIGKILL" in ends[2].value


def _merge_two(here: Here) -> float:
    """Groups of one rank each. Rank 0 is killed while it waits; rank 2 takes its place."""
    side = phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name=f"side {here.rank}")
    here.tell()
    here.hear()
    return sum_of(side.merge_remote_group(here.store("meeting"), 2), 1)


def test_a_group_that_died_before_the_others_came_does_not_count(tmp_path: Path) -> None:
    world = World(_merge_two, 3, tmp_path)
    world.all_told(0, 1, 2)
    world.tell(0)
    meeting = dist.FileStore(os.fspath(tmp_path / "meeting"), 3)
    meeting.wait(["phalanx/merges/merged/1"], timedelta(seconds=30))
    world.signal(0, signal.SIGKILL)
    world.wait_dead(0)
    world.tell_all(1, 2)
    ends = world.ends()
    assert [end.value for end in ends[1:]] == [2, 2], ends[1].trace + ends[2].trace


def _die_in_merger(here: Here, step: str) -> str:
    """Group 0 waits; group 1, of two ranks, completes the number, and one of its ranks dies."""
    number, rank = (0, 0) if here.rank == 0 else (1, here.rank - 1)
    store = dist.PrefixStore(f"side {number}", here.store())
    side = phalanx.new_group(store=store, rank=rank, world_size=1 + number, name=f"side {number}")
    here.tell()
    here.hear()
    kind: Any = Group
    if (here.rank, step) == (1, "a speaker that has told its group"):
        kind.join = staticmethod(_die)
    elif (here.rank, step) in ((1, "a speaker that has not"), (2, "a rank that was not told")):
        kind.exchange = _dying(kind.exchange)
    with pytest.raises(phalanx.PeerLost) as caught:
        side.merge_remote_group(here.store("meeting"), 3)
    return str(caught.value)


def _die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(exchange: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Dies before the second exchange, in which the first rank tells the others what came of the merger."""
    left = [1]

    def dying(*args: Any) -> list[str]:
        if left[0] == 0:
            _die()
        left[0] -= 1
        return exchange(*args)

    return dying


@pytest.mark.parametrize(
    ("step", "dead", "text"),
    [
        ("a speaker that has told its group", 1, "group 'merged', rank 0: rank 1 died while the group was being made"),
        ("a speaker that has not", 1, "group 'merged', rank 0: rank 1 died while the group was being made"),
        ("a rank that was not told", 2, "group 'merged', rank 0: group 'side 1' could not be merged: rank 1 died ("),
    ],
    ids=["told", "not told", "does not speak"],
)
def test_a_death_after_all_groups_have_come(step: str, dead: int, text: str, tmp_path: Path) -> None:
    before = shared_files()
    world = World(_die_in_merger, 3, tmp_path, step)
    world.all_told(0, 1, 2)
    world.tell(0)
    meeting = dist.FileStore(os.fspath(tmp_path / "meeting"), 3)
    meeting.wait(["phalanx/merges/merged/1"], timedelta(seconds=30))
    world.tell_all(1, 2)
    ends = world.ends()
    for rank in {0, 1, 2} - {dead}:
        assert ends[rank].error is None, ends[rank].trace
    assert text in ends[0].value
    check_no_files_left(before)


@pytest.mark.parametrize("seed", range(5))
def test_a_death_among_threads(seed: int) -> None:
    told: dict[int, str] = {}

    def program(rank: int, world: pt.World) -> None:
        side = _side(rank, world, (2, 2))
        try:
            side.merge_remote_group(world.store, 4)
        except phalanx.PhalanxError as error:
            told[rank] = type(error).__name__

    pt.run(program, ranks=4, init=False, seed=seed, faults=[pt.kill(2, at_call=2)])
    assert told[3] == "PeerLost"
    assert told[0] == told[1] == "PeerLost"
