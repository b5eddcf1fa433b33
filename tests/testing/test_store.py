"""The store of ranks that are threads: whoever waits lets the others go on."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt

_SCHEDULES = ["round robin", "random", "free"]


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_ranks_that_wait_for_keys(schedule: str) -> None:
    def pass_on(rank: int, world: pt.World) -> bytes:
        if rank == world.size - 1:
            world.store.set(f"from {rank}", "x")
            return b""
        value = world.store.get(f"from {rank + 1}")
        world.store.set(f"from {rank}", value + b"x")  # type: ignore[arg-type]
        return value

    assert pt.run(pass_on, 3, schedule=schedule) == [b"xx", b"x", b""]


@pytest.mark.parametrize("schedule", _SCHEDULES)
@pytest.mark.parametrize("prefixed", [False, True])
def test_every_method(schedule: str, prefixed: bool) -> None:
    def use(rank: int, world: pt.World) -> Any:
        # Any: torch's stubs lack some of the methods.
        store: Any = dist.PrefixStore("p", world.store) if prefixed else world.store
        store.add("arrived", 1)
        while store.add("arrived", 0) < world.size:
            pass
        if rank == 0:
            store.multi_set(["a", "b"], ["1", "2"])
            store.append("c", "3")
            store.append("c", "4")
            assert store.compare_set("d", "", "5") == b"5"
            assert store.compare_set("d", "6", "7") == b"5"
            store.set("ready", "")
        else:
            while not store.check(["ready"]):
                pass
        store.wait(["a", "b", "c"])
        return store.multi_get(["a", "b", "c", "d"])

    assert pt.run(use, 3, schedule=schedule) == [[b"1", b"2", b"34", b"5"]] * 3


def test_keys_that_are_deleted() -> None:
    def delete(rank: int, world: pt.World) -> list[Any]:
        world.store.set("a", "1")
        before = world.store.num_keys()
        return [world.store.delete_key("a"), world.store.delete_key("a"), before - world.store.num_keys()]

    assert pt.run(delete, 1) == [[True, False, 1]]


@pytest.mark.parametrize("given", ["wait", "store"])
def test_timeouts_take_no_time(given: str) -> None:
    def wait(rank: int, world: pt.World) -> str:
        if given == "store":
            world.store.set_timeout(timedelta(minutes=30))
        with pytest.raises(dist.DistStoreError) as caught:
            world.store.wait(["a", "never"], *([timedelta(minutes=30)] if given == "wait" else []))
        return str(caught.value)

    assert pt.run(wait, 1) == ["gave up after a timeout of 1800 s: nobody has set 'a', 'never' in the store"]


def test_keys_that_nobody_sets_are_a_deadlock() -> None:
    def wait(rank: int, world: pt.World) -> None:
        world.store.get("key") if rank == 0 else dist.barrier()

    with pytest.raises(phalanx.Deadlock) as caught:
        pt.run(wait, 2)
    assert caught.value.code == "DEADLOCK:STORE"
    assert "rank 0 waits in the store, for 'world/key'" not in str(caught.value)
    assert "rank 0 waits in the store, for 'key' (test_store.py:" in str(caught.value)


def test_a_key_that_a_rank_did_not_set_before_it_ended() -> None:
    def wait(rank: int, world: pt.World) -> None:
        if rank == 0:
            world.store.get("key")

    with pytest.raises(phalanx.Deadlock) as caught:
        pt.run(wait, 3)
    assert caught.value.code == "DEADLOCK:EXIT"
    assert "ranks 1, 2 have ended" in str(caught.value)


def test_two_looks_are_not_in_vain() -> None:
    def look(rank: int, world: pt.World) -> None:
        if rank == 0:
            assert [world.store.check(["a"]) for _ in range(100)] == [False] * 100
            work = dist.irecv(torch.ones(1), 1)
            assert work is not None
            assert [work.is_completed() for _ in range(100)] == [False] * 100
            dist.send(torch.ones(1), 1)
            work.wait()
        else:
            dist.recv(torch.ones(1), 0)
            dist.send(torch.ones(1), 0)

    for seed in range(3):
        pt.run(look, 2, seed=seed)
    pt.run(look, 2)


@pytest.mark.parametrize("schedule", ["round robin", "random"])
def test_looking_in_vain_is_a_deadlock(schedule: str) -> None:
    def look(rank: int, world: pt.World) -> None:
        while not world.store.check(["never"]):
            pass

    with pytest.raises(
        phalanx.Deadlock, match=r"(?s)DEADLOCK:POLL.*rank 1 looks again and again, in vain .test_store.py:"
    ):
        pt.run(look, 2, schedule=schedule)


def test_looking_in_vain_ends_where_ranks_run_freely() -> None:
    def look(rank: int, world: pt.World) -> None:
        while not world.store.check(["never"]):
            pass

    with pytest.raises(pt.Stuck, match=r"did not communicate for 0\.3 s"):
        pt.run(look, 1, schedule="free", stuck_after=0.3)


def test_a_store_with_a_prefix() -> None:
    def use(rank: int, world: pt.World) -> list[Any]:
        store = dist.PrefixStore("p", world.store)
        store.set("a", "1")
        before = store.num_keys()
        store.set_timeout(timedelta(minutes=5))
        with pytest.raises(dist.DistStoreError, match="gave up after a timeout of 300 s"):
            store.get("never")
        return [store.delete_key("a"), store.delete_key("a"), before - store.num_keys()]

    assert pt.run(use, 1) == [[True, False, 1]]


def test_a_key_that_is_deleted_before_it_is_read() -> None:
    def use(rank: int, world: pt.World) -> None:
        if rank == 0:
            world.store.get("k")
        else:
            world.store.set("k", "1")
            world.store.delete_key("k")
            world.store.wait(["go"])

    with pytest.raises(phalanx.Deadlock, match="rank 0 waits in the store, for 'k'"):
        pt.run(use, 2)


def test_waiting_again_and_again_is_no_progress() -> None:
    def retry(rank: int, world: pt.World) -> None:
        while True:
            with contextlib.suppress(dist.DistStoreError):
                world.store.wait(["never"], timedelta(seconds=1))

    with pytest.raises(pt.Stuck, match=r"did not communicate for 0\.5 s"):
        pt.run(retry, 1, stuck_after=0.5)


@pytest.mark.parametrize("how", ["compare_set", "get", "num_keys", "check"])
def test_every_way_to_look_lets_others_come(how: str) -> None:
    def work(rank: int, world: pt.World) -> None:
        store = world.store
        if rank == 1:
            store.wait(["begun"])
            store.set("door", "open")
            return
        if how in ("get", "compare_set"):
            store.set("door", "closed")
        num_keys = store.num_keys() + 1
        store.set("begun", "")
        while True:
            if how == "compare_set" and store.compare_set("door", "open", "mine") == b"mine":
                return
            if how == "get" and store.get("door") == b"open":
                return
            if how == "num_keys" and store.num_keys() > num_keys:
                return
            if how == "check" and store.check(["door"]):
                return

    pt.run(work, 2)


def test_polling_until_a_time_has_gone_by() -> None:
    def poll(rank: int, world: pt.World) -> None:
        tensor = torch.ones(1)
        if rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
            return
        work, end = dist.irecv(tensor, 1), time.monotonic() + 0.3
        assert work is not None
        while not work.is_completed() and time.monotonic() < end:
            pass
        dist.send(tensor, 1)
        work.wait()

    pt.run(poll, 2)


def test_groups_made_from_it() -> None:
    def make(rank: int, world: pt.World) -> float:
        group = phalanx.ProcessGroup(world.store, rank, world.size)
        tensor = torch.ones(1)
        group.allreduce(tensor).wait()
        return tensor.item()

    assert pt.run(make, 3, init=False, seed=1) == [3.0] * 3


def test_garbage_under_the_key_of_a_group() -> None:
    def make(rank: int, world: pt.World) -> str:
        world.store.set(f"odd/0-1/comings/{rank}", "garbage")
        with pytest.raises(phalanx.GroupError) as caught:
            phalanx.ProcessGroup(world.store, rank, world.size, name="odd")
        return str(caught.value).splitlines()[0]

    texts = pt.run(make, 2, init=False)
    for rank, text in enumerate(texts):
        key = f"the key 'odd/0-1/comings/{rank}' of rank {rank}"
        assert text == (
            f"[GROUP:STORE_KEY] group 'odd', rank {rank}: did not understand {key} in the store: "
            "expected a number, got b'garbage'"
        )
