"""split_group: smaller groups of a group's ranks, on both transports; and what is said of wrong lists."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, check_no_files_left, place, shared_files, values

import phalanx
import phalanx.testing as pt
from phalanx.transports import segments

WAYS: dict[str, dict[str, Any]] = {
    "processes": {"processes": True},
    "threads": {},
    "seed 5": {"seed": 5},
    "free": {"schedule": "free"},
}
on_both = pytest.mark.parametrize("way", WAYS)


def run(function: Callable[..., Any], way: str, ranks: int = 4) -> list[Any]:
    return pt.run(function, ranks=ranks, init=False, **WAYS[way])


def make(rank: int, world: pt.World, name: str | None = None) -> phalanx.ProcessGroup:
    return phalanx.new_group(store=world.store, rank=rank, world_size=world.size, name=name)


def sum_of(group: phalanx.ProcessGroup, number: float) -> float:
    tensor = torch.tensor([number])
    group.allreduce(tensor).wait()
    return tensor.item()


def _split(rank: int, world: pt.World) -> list[Any]:
    whole = make(rank, world, "all")
    lower = whole.split_group([0, 1])
    halves = whole.split_group([1, 0] if rank < 2 else [2, 3])
    assert halves is not None
    # Overlaps those of earlier calls.
    middle = whole.split_group([2, 1], timeout=timedelta(seconds=20), name="middle")
    nested = halves.split_group([1])
    told: list[Any] = [None if lower is None else (lower.rank(), lower.size(), sum_of(lower, rank))]
    told.append((halves.rank(), halves.size(), sum_of(halves, rank), halves._info.name))
    told.append(None if middle is None else (middle.rank(), sum_of(middle, rank), middle.timeout.total_seconds()))
    told.append(None if nested is None else (nested.rank(), nested.size(), sum_of(nested, rank)))
    assert sum_of(whole, rank) == 6
    for group in (lower, halves, middle, nested, whole):
        if group is not None:
            group.shutdown()
    return told


@on_both
def test_members_get_the_group_and_others_none(way: str) -> None:
    assert run(_split, way) == [
        [(0, 2, 1.0), (1, 2, 1.0, "all[1,0]"), None, (0, 1, 0.0)],
        [(1, 2, 1.0), (0, 2, 1.0, "all[1,0]"), (1, 3.0, 20.0), None],
        [None, (0, 2, 5.0, "all[2-3]"), (0, 3.0, 20.0), None],
        [None, (1, 2, 5.0, "all[2-3]"), None, (0, 1, 3.0)],
    ]


def _split_the_default_group(rank: int, world: pt.World) -> tuple[list[int], str]:
    group = dist.group.WORLD
    assert isinstance(group, phalanx.ProcessGroup)
    part = group.split_group([3, 1], group_desc="odd") if rank % 2 else group.split_group([0, 2])
    assert part is not None
    with pytest.raises(phalanx.InvalidCall) as caught:
        part.broadcast(torch.ones(1), root=9)
    return part.global_ranks, str(caught.value.group)


@pytest.mark.parametrize("way", ["processes", "threads"])
def test_a_split_of_torchs_group_knows_its_global_ranks(way: str) -> None:
    told = pt.run(_split_the_default_group, ranks=4, **WAYS[way])
    assert told == [([0, 2], "default_pg[0,2]"), ([3, 1], "odd"), ([0, 2], "default_pg[0,2]"), ([3, 1], "odd")]


def _split_off_two(whole: phalanx.ProcessGroup) -> None:
    whole.split_group([2, 3])


def _disagree(rank: int, world: pt.World) -> tuple[str, str, float]:
    whole = make(rank, world, "all")
    with pytest.raises(phalanx.Mismatch) as caught:
        _split_off_two(whole) if rank == 2 else whole.split_group([1, 2])
    return caught.value.code, str(caught.value), sum_of(whole, rank)


@on_both
def test_a_list_that_not_all_of_its_members_passed(way: str) -> None:
    one, other = place(_disagree, "whole.split_group"), place(_split_off_two, "whole.split_group")
    for rank, (code, text, total) in enumerate(run(_disagree, way)):
        assert code == "MISMATCH:RANKS"
        assert text == (
            f"[MISMATCH:RANKS] split_group, seq 1, group 'all', rank {rank}: rank 0 passed [1, 2], but its member "
            "rank 2 passed [2, 3]\n"
            f"  rank 0 passed [1, 2], at {one}\n"
            f"  rank 1 passed [1, 2], at {one}\n"
            f"  rank 2 passed [2, 3], at {other}\n"
            f"  rank 3 passed [1, 2], at {one}\n"
            "  Next: pass the same list and name on every rank of a list; no group was made, and this one still works"
        )
        assert total == 6


def _order(rank: int, world: pt.World) -> str:
    whole = make(rank, world)
    with pytest.raises(phalanx.Mismatch) as caught:
        whole.split_group([0, 1] if rank else [1, 0])
    return caught.value.message.splitlines()[0]


@on_both
def test_members_pass_the_ranks_in_one_order(way: str) -> None:
    assert run(_order, way, 2) == ["rank 0 passed [1, 0], but its member rank 1 passed [0, 1]"] * 2


def _names(rank: int, world: pt.World) -> list[str]:
    whole = make(rank, world)
    errors = []
    with pytest.raises(phalanx.Mismatch) as caught:
        whole.split_group([0, 1], name=f"mine {rank}")
    errors.append(f"{caught.value.code} {caught.value.message.splitlines()[0]}")
    first = whole.split_group([0], name="taken")
    with pytest.raises(phalanx.GroupError) as taken:
        whole.split_group([0, 1], name="taken")
    errors.append(str(taken.value))
    if first is not None:
        # Has no effect on a name that the program has chosen.
        first._set_group_desc("another")
        first.shutdown()
    again = whole.split_group([0, 1], name="taken")
    assert again is not None
    assert sum_of(again, rank) == 1
    return errors


@on_both
def test_names(way: str) -> None:
    for rank, (mismatch, taken) in enumerate(run(_names, way, 2)):
        assert mismatch == "MISMATCH:NAME rank 0 named the group 'mine 0', but rank 1 named it 'mine 1'"
        assert taken == (
            f"[GROUP:NAME] split_group, seq {taken.split('seq ')[1].split(',')[0]}, group 'phalanx', rank {rank}: no "
            "group was made\n  rank 0: the name 'taken' is taken: it is in an open group of that name\n"
            "  Next: shut down the other group of that name first, or choose another name"
        )


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            ([0, 2],),
            {},
            "[INVALID:RANKS] split_group, group 'alone', rank 0: expected ranks of the group, in 0..0",
        ),
        (([-1],), {}, "expected ranks of the group, in 0..0, got -1 in [-1]"),
        (([0, 0],), {}, "expected every rank once, got 0 twice in [0, 0]"),
        (([],), {}, "expected at least one rank, got none"),
        ((None,), {}, "expected at least one rank, got none"),
        ((["0"],), {}, "expected ranks as a list of integers, got '0' in place 0"),
        ((0,), {}, "expected ranks as a list of integers, got 0"),
        (
            ([0],),
            {"name": ""},
            "[INVALID:NAME] split_group, group 'alone', rank 0: expected a name as a str that is",
        ),
        (([0],), {"name": 7}, "expected a name as a str that is not empty, got 7"),
        (([0],), {"timeout": 3}, "[INVALID:TIMEOUT] split_group, group 'alone', rank 0: "),
        (([0],), {"timeout": timedelta(0)}, "[INVALID:TIMEOUT]"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name="alone") as alone:
        with pytest.raises(phalanx.InvalidCall) as caught:
            alone.split_group(*arguments, **options)
        assert message in str(caught.value)
        part = alone.split_group([0])
        assert part is not None
        assert sum_of(part, 3) == 3


def _refuse(rank: int, world: pt.World) -> str:
    whole = make(rank, world)
    if rank == 1:
        with pytest.raises(phalanx.InvalidCall):
            whole.split_group([1, 5])
        whole.shutdown()
        return ""
    with pytest.raises(phalanx.PeerLost) as caught:
        whole.split_group([0, 1])
    return str(caught.value)


@on_both
def test_peers_are_told_of_a_wrong_list(way: str) -> None:
    text = run(_refuse, way, 2)[0]
    assert "rank 1 refused split_group, seq 1, at " in text
    assert "[INVALID:RANKS] expected ranks of the group, in 0..1, got 5 in [1, 5]" in text


def _another_op(rank: int, world: pt.World) -> str:
    whole = make(rank, world)
    with pytest.raises(phalanx.Mismatch) as caught:
        whole.barrier().wait() if rank else whole.split_group([0, 1])
    return str(caught.value)


@on_both
def test_a_rank_that_makes_another_call(way: str) -> None:
    for text in run(_another_op, way, 2):
        assert text.startswith("[MISMATCH:OP] ")
        assert "split_group" in text
        assert "barrier" in text


def _closed(rank: int, world: pt.World) -> list[str]:
    whole = make(rank, world)
    part = whole.split_group([0, 1])
    assert part is not None
    whole.shutdown()
    calls: list[Callable[[], object]] = [
        lambda: whole.split_group([0]),
        lambda: whole.merge_remote_group(world.store, 2),
    ]
    codes = []
    for call in calls:
        with pytest.raises(phalanx.GroupError) as caught:
            call()
        codes.append(caught.value.code)
    # What was made of it lives on.
    assert sum_of(part, rank) == 1
    return codes


@on_both
def test_use_after_shutdown(way: str) -> None:
    assert run(_closed, way, 2) == [["GROUP:CLOSED"] * 2] * 2


def _fork(here: Here) -> list[str]:
    whole = phalanx.new_group(store=here.store(), rank=here.rank, world_size=here.size)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            whole.split_group([0, 1])
        except phalanx.GroupError as error:
            os.write(writes, error.code.encode())
        os._exit(0)
    os.waitpid(child, 0)
    code = os.read(reads, 100).decode()
    part = whole.split_group([0, 1])
    assert part is not None
    return [code, str(sum_of(part, here.rank))]


def test_use_in_a_forked_child(tmp_path: Path) -> None:
    assert values(_fork, 2, tmp_path) == [["GROUP:FORKED", "1"]] * 2


def _die(here: Here, step: int) -> str:
    whole = phalanx.new_group(store=here.store(), rank=here.rank, world_size=here.size)
    kind: Any = type(whole._group)
    kind.run = _telling(kind.run, here, step)
    with pytest.raises(phalanx.PeerLost) as caught:
        whole.split_group([0, 1, 2])
    here.tell()
    here.hear()
    return f"{caught.value.peer} {caught.value.message}"


def _telling(run: Callable[..., None], here: Here, step: int) -> Callable[..., None]:
    """Tells that it comes to the call of this number. Rank 1 does not make it, but dies when it is told to."""
    left = [step]

    def telling(*args: Any) -> None:
        if left[0] == 0:
            here.tell()
            if here.rank == 1:
                here.hear()
                os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        run(*args)

    return telling


@pytest.mark.parametrize("step", [0, 1])
def test_a_death_in_any_step(step: int, tmp_path: Path) -> None:
    before = shared_files()
    world = World(_die, 3, tmp_path, step)
    world.all_told(0, 1, 2)
    # Both are in the call: one that comes to it after the other one has found the death is told of a broken group.
    world.wait_asleep(0)
    world.wait_asleep(2)
    world.tell(1)
    world.all_told(0, 2)
    check_no_files_left(before)
    world.tell_all(0, 2)
    ends = world.ends()
    for rank in (0, 2):
        assert ends[rank].error is None, ends[rank].trace
        assert ends[rank].value.startswith("1 rank 1 died (killed by SIGKILL")


def _hide(here: Here, hidden: tuple[str, ...]) -> list[Any]:
    """Rank 1 can't open segments below these folders, and the new group has its segment made by rank 2."""
    whole = phalanx.new_group(store=here.store(), rank=here.rank, world_size=here.size, name="all")
    check = segments.check_path

    def check_path(offer: Any, maker: Any) -> None:
        if offer.path.startswith(hidden):
            raise OSError(f"no way to {offer.path.split('/')[1]}")
        check(offer, maker)

    if here.rank == 1:
        segments.check_path = check_path
    told: list[Any] = []
    try:
        part = whole.split_group([2, 1] if here.rank else [0])
        assert part is not None
        told.append(sum_of(part, here.rank))
        part.shutdown()
    except phalanx.GroupError as error:
        told += [error.code, error.message]
    return [*told, sum_of(whole, here.rank)]


def test_a_rank_that_can_not_open_the_memory_gets_a_file(tmp_path: Path) -> None:
    before = shared_files()
    assert values(_hide, 3, tmp_path, ("/proc/",)) == [[0, 3], [3, 3], [3, 3]]
    check_no_files_left(before)


def test_memory_that_a_rank_can_not_open_at_all(tmp_path: Path) -> None:
    before = shared_files()
    text = (
        "no group was made, because not all ranks could share its memory\n"
        "  rank 1:\n    no way to proc\n    no way to dev"
    )
    assert values(_hide, 3, tmp_path, ("/proc/", "/dev/")) == [["GROUP:NOT_SHARED", text, 3]] * 3
    check_no_files_left(before)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at_call", [1, 2])
def test_a_death_among_threads(seed: int, at_call: int) -> None:
    told = []

    def program(rank: int, world: pt.World) -> None:
        whole = make(rank, world)
        try:
            for _ in range(3):
                part = whole.split_group([0, 1, 2])
                assert part is not None
                part.barrier().wait()
        except phalanx.PeerLost as error:
            told.append((rank, error.peer))

    pt.run(program, ranks=3, init=False, seed=seed, faults=[pt.kill(1, at_call=at_call)])
    assert sorted(told) == [(0, 1), (2, 1)]


def _late(rank: int, world: pt.World) -> str:
    whole = make(rank, world)
    if rank == 1:
        # It is busy until the other one has given up.
        world.store.wait(["done"])
        return ""
    with pytest.raises(phalanx.CallTimeout) as caught:
        whole.split_group([0, 1], timeout=timedelta(seconds=0.2))
    world.store.set("done", "")
    return str(caught.value)


@on_both
def test_a_rank_that_does_not_come(way: str) -> None:
    text = run(_late, way, 2)[0]
    assert text.startswith("[MISSING] split_group, seq 1, group 'phalanx', rank 0: ")
    assert "timeout of 0.2 s" in text


def _many(here: Here) -> tuple[int, int]:
    """Makes and leaves many: nothing piles up."""
    whole = phalanx.new_group(store=here.store(), rank=here.rank, world_size=here.size)

    def round_of_groups() -> None:
        part = whole.split_group([1, 0])
        assert part is not None
        part.barrier().wait()
        part.shutdown()

    for _ in range(5):
        round_of_groups()
    before = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(60):
        round_of_groups()
    after = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    assert after[1] <= before[1] + 10
    return before[0], after[0]


def test_nothing_is_left_of_groups_that_were_left(tmp_path: Path) -> None:
    for before, after in values(_many, 2, tmp_path):
        assert after == before
