"""split_group and merge_remote_group where something is in the way: odd arguments and modes, interrupts, deaths."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, run, values
from test_splitting import make, on_both, sum_of
from test_splitting import run as run_both
from torch._subclasses.fake_tensor import FakeTensorMode

import phalanx
import phalanx.testing as pt
from phalanx.group.group import Group
from phalanx.transports.arrivals import Speaker


def _list_types(rank: int, world: pt.World) -> list[float]:
    whole = make(rank, world)
    sums = []
    for ranks in (range(2), (0, 1), torch.tensor([1, 0]), torch.tensor([1, 0]).numpy(), [True, False]):
        part = whole.split_group(ranks)  # type: ignore[arg-type]
        assert part is not None
        sums.append(sum_of(part, rank + 1))
    return sums


@on_both
def test_lists_of_many_types(way: str) -> None:
    assert run_both(_list_types, way, 2) == [[3.0] * 5] * 2


def _in_mode(rank: int, world: pt.World, mode: Callable[[], AbstractContextManager[Any]]) -> list[float]:
    whole = make(rank, world)
    with mode():
        part = whole.split_group([1, 0])
        merged = whole.merge_remote_group(world.store, 2)
    assert part is not None
    return [sum_of(part, rank), sum_of(merged, rank)]


def _on_meta(rank: int, world: pt.World) -> list[float]:
    return _in_mode(rank, world, lambda: torch.device("meta"))


def _in_inference_mode(rank: int, world: pt.World) -> list[float]:
    return _in_mode(rank, world, torch.inference_mode)


def _with_fake_tensors(rank: int, world: pt.World) -> list[float]:
    return _in_mode(rank, world, FakeTensorMode)


@on_both
def test_where_tensors_are_not_plain_by_default(way: str) -> None:
    assert run_both(_on_meta, way, 2) == [[1.0, 1.0]] * 2
    assert run_both(_in_inference_mode, way, 2) == [[1.0, 1.0]] * 2


def test_in_a_fake_tensor_mode() -> None:
    assert run_both(_with_fake_tensors, "processes", 2) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\ud800", r"expected a name that can be encoded as UTF-8, got 'a\ud800'"),
        ("a" * 1001, "expected a name of at most 1000 characters, got one of 1001"),
    ],
)
def test_names_that_nobody_can_write_down(name: str, message: str) -> None:
    with phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1) as alone:
        calls: list[Callable[[], object]] = [
            lambda: phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name=name),
            lambda: alone.split_group([0], name=name),
            lambda: alone.merge_remote_group(dist.HashStore(), 1, name=name),
        ]
        for call in calls:
            with pytest.raises(phalanx.PhalanxError) as caught:
                call()
            assert caught.value.message == message
        assert sum_of(alone, 2) == 2


@pytest.mark.parametrize("name", ["a/b", "../..", "two words", "ü☃\n", "nul\0", "%2F", "ü" * 1000])
def test_odd_names(name: str) -> None:
    with phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1) as alone:
        one = phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name=name)
        assert sum_of(one, 2) == 2
        one.shutdown()
        part = alone.split_group([0], name=name)
        assert part is not None
        assert sum_of(part, 2) == 2
        part.shutdown()
        merged = alone.merge_remote_group(dist.HashStore(), 1, name=name)
        assert sum_of(merged, 2) == 2
        merged.shutdown()


def test_a_name_is_free_once_its_group_is_left_whatever_torch_calls_it() -> None:
    with phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1) as alone:
        first = alone.split_group([0], name="mine", group_desc="torch's word")
        assert first is not None
        first.shutdown()
        again = alone.split_group([0], name="mine")
        assert again is not None
        again.shutdown()


def _cannot_take_part(rank: int, world: pt.World) -> list[str]:
    side = make(rank, world, "side")
    other = phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name=f"of {rank}")
    errors = []
    for store, name in ((world.store, "of 1"), (None if rank == 0 else world.store, "both")):
        with pytest.raises(phalanx.GroupError) as caught:
            side.merge_remote_group(store, 4, name=name)  # type: ignore[arg-type]
        errors.append(f"{caught.value.code} {caught.value.message}")
    assert sum_of(side, 1) == 2
    other.shutdown()
    return errors


@on_both
def test_all_are_told_why_one_rank_cannot_take_part_in_a_merger(way: str) -> None:
    taken = "the name 'of 1' is taken: it is in an open group of that name"
    texts = [
        f"GROUP:NAME no group was made\n  rank 1: {taken}",
        "GROUP no group was made\n  rank 0: expected a torch.distributed.Store, got None",
    ]
    assert run_both(_cannot_take_part, way, 2) == [texts, texts]


def _before(kind: Any, method: str, number: int, act: Callable[[], object]) -> None:
    """Acts before the call of this number of a method."""
    inner, left = getattr(kind, method), [number]

    def acting(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            act()
        return inner(*args, **kwargs)

    setattr(kind, method, acting)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupted(here: Here, method: str, number: int) -> list[str]:
    whole = phalanx.new_group(store=here.store(), rank=here.rank, world_size=here.size)
    other = phalanx.new_group(store=here.store("other"), rank=here.rank, world_size=here.size)
    if here.rank == 1:
        _before(Group, "exchange", number, _interrupt)
    errors = []
    for _ in range(2):
        try:
            whole.split_group([0, 1, 2]) if method == "split" else whole.merge_remote_group(here.store("meeting"), 3)
        except (KeyboardInterrupt, phalanx.PhalanxError) as error:
            errors.append(type(error).__name__)
    assert sum_of(other, 1) == 3
    return errors


@pytest.mark.parametrize("method", ["split", "merge"])
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_between_two_steps_ends_the_group(method: str, number: int, tmp_path: Path) -> None:
    told = values(_interrupted, 3, tmp_path, method, number)
    assert told == [["Aborted"] * 2, ["KeyboardInterrupt", "Aborted"], ["Aborted"] * 2]


def _side_of(here: Here) -> phalanx.ProcessGroup:
    number = here.rank // 2
    store = dist.PrefixStore(f"side {number}", here.store())
    return phalanx.new_group(store=store, rank=here.rank % 2, world_size=2, name=f"side {number}")


def _dies_before_it_is_told(here: Here, late: bool) -> str:
    """Rank 3, when rank 2 has seen where all go, and before rank 2 tells it. `late`: rank 1 waits to be told, too,
    before it goes there."""
    side = _side_of(here)

    def die_when_told() -> None:
        here.hear()
        _die()

    def tell_and_hear() -> None:
        here.tell()
        here.hear()

    if here.rank == 3:
        _before(Group, "exchange", 2, die_when_told)
    elif here.rank == 2:
        _before(Group, "exchange", 2, tell_and_hear)
    elif here.rank == 1 and late:
        _before(Group, "join", 1, tell_and_hear)
    with pytest.raises(phalanx.PeerLost) as caught:
        side.merge_remote_group(here.store("meeting"), 4, timedelta(seconds=50))
    return f"{caught.value.peer} {caught.value.message}"


@pytest.mark.parametrize("late", [False, True], ids=["all come", "one comes after the others have given up"])
def test_a_death_while_the_ranks_of_a_group_are_told_where_to_go(late: bool, tmp_path: Path) -> None:
    world = World(_dies_before_it_is_told, 4, tmp_path, late)
    world.told(2)
    world.keep_dead()
    world.tell(3)
    world.wait_dead(3)
    world.tell(2)
    if late:
        world.told(1)
        world.wait_dead(0)
        world.tell(1)
    ends = world.ends(40)
    for end in ends[:2]:
        assert end.error is None, end.trace
        assert "group 'side 1' could not be merged: rank 1 died (killed by SIGKILL" in end.value
    assert ends[2].error is None, ends[2].trace


def _speaker_dies(here: Here) -> str:
    side = _side_of(here)
    if here.rank == 0:
        _before(Group, "exchange", 2, _die)
    with pytest.raises(phalanx.PeerLost) as caught:
        side.merge_remote_group(here.store("meeting"), 4, timedelta(seconds=50))
    return caught.value.message


def test_the_death_of_a_first_rank_that_knows_where_to_go(tmp_path: Path) -> None:
    ends = run(_speaker_dies, 4, tmp_path, timeout=40)
    for end in ends[1:]:
        assert end.error is None, end.trace
        assert "died" in end.value


def _comes_alone(here: Here) -> None:
    side = phalanx.new_group(store=here.store(), rank=0, world_size=1, name="dead")
    _before(Speaker, "_wait", 1, _die)
    side.merge_remote_group(here.store("meeting"), 2)


def _comes_later(here: Here) -> float:
    name = f"alive {here.rank}"
    side = phalanx.new_group(store=here.store(name), rank=0, world_size=1, name=name)
    return sum_of(side.merge_remote_group(here.store("meeting"), 2, timedelta(seconds=30)), 1)


def test_a_group_that_has_died_is_not_merged_with(tmp_path: Path) -> None:
    ends = run(_comes_alone, 1, tmp_path)
    assert ends[0].exitcode == -signal.SIGKILL
    assert values(_comes_later, 2, tmp_path) == [2, 2]


def _gives_up(here: Here) -> float:
    """Interrupted after it has come, before it has seen that."""
    name = f"side {here.rank}"
    side = phalanx.new_group(store=here.store(name), rank=0, world_size=1, name=name)
    if here.rank == 0:
        kind: Any = Speaker
        write = kind._write

        def write_and_stop(speaker: Speaker, entry: Any) -> None:
            write(speaker, entry)
            kind._write = write
            raise KeyboardInterrupt

        kind._write = write_and_stop
        with pytest.raises(KeyboardInterrupt):
            side.merge_remote_group(here.store("meeting"), 2)
        side = phalanx.new_group(store=here.store("again"), rank=0, world_size=1, name="again")
        here.tell()
        here.hear()
    else:
        here.hear()
    return sum_of(side.merge_remote_group(here.store("meeting"), 2, timedelta(seconds=30)), 1)


def test_a_group_that_was_interrupted_departs(tmp_path: Path) -> None:
    world = World(_gives_up, 2, tmp_path)
    world.told(0)
    world.tell_all(0, 1)
    ends = world.ends()
    for end in ends:
        assert end.error is None, end.trace
        assert end.value == 2


@pytest.mark.parametrize("seed", [None, 3])
def test_a_group_whose_rank_ends_before_it_comes(seed: int | None) -> None:
    told: dict[int, str] = {}

    def program(rank: int, world: pt.World) -> None:
        number = rank // 2
        store = dist.PrefixStore(str(number), world.store)
        side = phalanx.new_group(store=store, rank=rank % 2, world_size=2, name=f"side {number}")
        if number == 1:
            return
        with pytest.raises(phalanx.Deadlock) as caught:
            side.merge_remote_group(world.store, 4)
        told[rank] = caught.value.code

    pt.run(program, ranks=4, init=False, seed=seed)
    assert told == {0: "DEADLOCK:EXIT", 1: "DEADLOCK:EXIT"}


def _from_two_threads(here: Here) -> int:
    whole = phalanx.new_group(store=here.store(), rank=here.rank, world_size=here.size)
    groups: list[phalanx.ProcessGroup | None] = []

    def split() -> None:
        groups.extend(whole.split_group([1, 0]) for _ in range(10))

    threads = [threading.Thread(target=split) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum_of(whole, 1) == 2
    return sum(group is not None for group in groups)


def test_threads_of_a_rank_split_one_group_at_once(tmp_path: Path) -> None:
    assert values(_from_two_threads, 2, tmp_path) == [20, 20]
