"""How ranks that are threads end: failures, whom they are told to, and what is said of them."""

from __future__ import annotations

import random
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt


@pytest.mark.parametrize("schedule", ["round robin", "random", "free"])
def test_ranks_that_disagree_are_told_before_the_others_come(schedule: str) -> None:
    def disagree(rank: int, world: pt.World) -> str:
        if rank == 2:
            world.store.get("told")
        with pytest.raises(phalanx.Mismatch) as caught:
            dist.all_reduce(torch.ones(1)) if rank != 1 else dist.barrier()
        world.store.set("told", "")
        return str(caught.value)

    results = pt.run(disagree, 3, schedule=schedule)
    for rank, text in enumerate(results):
        first, *lines = text.splitlines()
        broken = "the group is broken: " if rank == 2 else ""
        assert first.endswith(f"seq 1, group 'default_pg', rank {rank}: {broken}ranks disagree about the op")
        assert [line for line in lines if line.startswith("  rank ")] == [
            "  rank 0: all_reduce(SUM, 1 element of float32)  <-- all_reduce",
            "  rank 1: barrier()  <-- barrier",
            "  rank 2: had not made this call",
        ]


@pytest.mark.parametrize("schedule", ["round robin", "random", "free"])
@pytest.mark.parametrize("how", ["raises", "returns", "killed"])
def test_a_rank_that_ends_while_others_make_a_group(schedule: str, how: str) -> None:
    told: list[str] = []

    def make(rank: int, world: pt.World) -> None:
        if rank == 2:
            if how == "raises":
                raise LookupError("no shard")
            if how == "returns":
                return
            dist.barrier()
        try:
            dist.new_group([0, 1, 2])
        except phalanx.PeerLost as error:
            told.append(f"{error.peer}: {error}")
            raise

    faults = [pt.kill(2, at_call=1)] if how == "killed" else []
    with pytest.raises(LookupError if how == "raises" else phalanx.PeerLost):
        pt.run(make, 3, schedule=schedule, faults=faults)
    ending = {"raises": "the first exception of rank 2: LookupError: no shard", "returns": "rank 2 ended while"}
    assert [text[:3] for text in told] == ["2: "] * 2
    assert all(
        ending.get(how, "rank 2 died while the group was being made: killed by SIGKILL") in text for text in told
    )


def test_failures_that_are_not_caused_by_the_first() -> None:
    def fail(rank: int, world: pt.World) -> None:
        if rank in (1, 2):
            raise ValueError(f"bad value {rank}")
        if rank == 3:
            raise ValueError("bad value 1")
        world.barrier()

    with pytest.raises(ValueError, match="bad value 1") as caught:
        pt.run(fail, 5)
    assert caught.value.__notes__[:-1] == [
        "on rank 1, and the same on rank 3",
        "because of it:\n  ranks 0, 4: PeerLost in barrier, seq 1",
        "also, on its own:\n  rank 2: ValueError: bad value 2",
    ]


def test_each_rank_and_run_has_an_exception_of_its_own() -> None:
    planned = OSError("disk full")
    seen: list[BaseException] = []

    def work(rank: int, world: pt.World) -> None:
        try:
            dist.recv(torch.ones(1), (rank + 1) % world.size)
        except BaseException as error:
            seen.append(error)
            raise

    for _ in range(2):
        with pytest.raises(phalanx.Deadlock):
            pt.run(work, 3)
        with pytest.raises(OSError, match="disk full") as caught:
            pt.run(work, 1, faults=[pt.fail(0, at_call=1, error=planned)])
        assert caught.value is not planned
        assert len([note for note in caught.value.__notes__ if note.startswith("again:")]) == 1
    assert len({id(error) for error in seen}) == len(seen) == 8
    assert not hasattr(planned, "__notes__")
    with pytest.raises(ZeroDivisionError):
        pt.run(work, 1, faults=[pt.fail(0, at_call=1, error=ZeroDivisionError)])


def test_a_failure_says_how_to_repeat_it() -> None:
    def work(rank: int, world: pt.World) -> None:
        dist.barrier()

    with pytest.raises(OSError, match="disk") as caught:
        pt.run(work, 2, faults=[pt.fail(0, at_call=1, error=OSError("disk"))], timeout=timedelta(seconds=3))
    again = caught.value.__notes__[-1]
    assert again.startswith(
        "again: pt.run(work, ranks=2, faults=[pt.fail(0, at_call=1, error=OSError('disk'))], timeout="
    )
    names = {"pt": pt, "work": work, "datetime": __import__("datetime")}
    with pytest.raises(OSError, match="disk"):
        eval(again.removeprefix("again: "), names)


@pytest.mark.parametrize("schedule", ["round robin", "random", "free"])
def test_ranks_that_mean_other_groups(schedule: str) -> None:
    def make(rank: int, world: pt.World) -> str:
        with pytest.raises(phalanx.GroupError) as caught:
            dist.new_group([0, 1, 2] if rank else [0, 2])
        return str(caught.value)

    for text in pt.run(make, 3, schedule=schedule)[:1]:
        assert text.startswith(
            "[GROUP:SIZE] new_group, group '1', rank 0: expected the same ranks everywhere, got ranks"
        )


def test_ranks_that_try_again_to_make_a_group() -> None:
    def make(rank: int, world: pt.World) -> float:
        if rank == 0:
            with pytest.raises(phalanx.CallTimeout, match="rank 1 did not come to make the group"):
                phalanx.ProcessGroup(world.store, rank, world.size, timedelta(minutes=10))
            world.store.set("again", "")
        world.store.get("again")
        group = phalanx.ProcessGroup(world.store, rank, world.size)
        tensor = torch.ones(1)
        group.allreduce(tensor).wait()
        return tensor.item()

    assert pt.run(make, 2, init=False) == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu, torch.complex64, torch.uint16])
def test_a_message_is_what_it_was_when_it_was_sent(dtype: torch.dtype) -> None:
    def work(rank: int, world: pt.World) -> list[float]:
        tensor = torch.full((4,), 2.0).to(dtype)
        if rank == 0:
            dist.send(tensor, 1)
            tensor.copy_(torch.full((4,), 8.0).to(dtype))
            world.store.set("changed", "")
        else:
            world.store.get("changed")
            dist.recv(tensor := torch.ones(4).to(dtype), 0)
        return tensor.to(torch.complex64).real.tolist()

    assert pt.run(work, 2)[1] == [2.0] * 4


def test_a_deadlock_names_ranks_of_the_world() -> None:
    def work(rank: int, world: pt.World) -> None:
        if rank == 2:
            dist.new_group([2, 3], use_local_synchronization=True)
        elif rank == 3:
            dist.recv(torch.ones(1), 2)

    with pytest.raises(phalanx.Deadlock) as caught:
        pt.run(work, 4)
    assert "rank 2 waits for rank 3 in new_group" in str(caught.value)
    assert "rank 3 waits for rank 2 in recv" in str(caught.value)


def test_ranks_of_an_abandoned_run_end_before_the_caller_goes_on() -> None:
    ended: list[int] = []

    def work(rank: int, world: pt.World) -> None:
        try:
            if rank == 0:
                signal.raise_signal(signal.SIGINT)
            world.barrier()
        finally:
            random.random()
            ended.append(rank)

    before = random.getstate()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pt.run(work, 3)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert sorted(ended) == [0, 1, 2]
    assert random.getstate() == before


def _leaves_while_others_may_come(rank: int, world: pt.World) -> str:
    """Rank 0 leaves after ranks 0 and 1 have disagreed, while the report still waits for rank 2."""
    store = world.store
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
            store.set("called", "")
            store.get("disagreed")
            dist.destroy_process_group()
            store.set("left", "")
        elif rank == 1:
            store.get("called")
            work = dist.barrier(async_op=True)
            store.set("disagreed", "")
            store.get("left")
            assert work is not None
            work.wait()
        else:
            store.get("left")
            dist.barrier()
    except phalanx.PhalanxError as error:
        return error.code
    return "left"


@pytest.mark.parametrize("schedule", ["round robin", "free"])
def test_a_rank_that_leaves_does_not_take_a_mismatch_with_it(schedule: str) -> None:
    assert pt.run(_leaves_while_others_may_come, 3, schedule=schedule) == ["left", "MISMATCH:OP", "MISMATCH:OP"]


def _gives_up_while_others_may_come(rank: int, world: pt.World) -> str:
    if rank == 2:
        world.store.get("told")
        return "absent"
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.barrier()
    except phalanx.PhalanxError as error:
        world.store.set("told", "")
        return error.code
    return "finished"


def test_a_mismatch_comes_before_a_timeout() -> None:
    results = pt.run(_gives_up_while_others_may_come, 3, timeout=timedelta(seconds=0.02))
    assert results == ["MISMATCH:OP", "MISMATCH:OP", "absent"]
