"""new_group: groups as objects, from a store, a URL or the environment, beside and without torch's default group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, values
from ranks import run as run_ranks
from test_splitting import on_both, run, sum_of

import phalanx
import phalanx.testing as pt
import programs


def _worlds(rank: int, world: pt.World) -> list[float]:
    """Three worlds in one process, with different ranks and sizes, and no default group."""
    everyone = phalanx.new_group(store=world.store, rank=rank, world_size=4, name="all")
    side = phalanx.new_group(
        store=dist.PrefixStore(str(rank % 2), world.store), rank=rank // 2, world_size=2, name=f"side {rank % 2}"
    )
    alone = phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
    assert (everyone.rank(), side.rank(), alone.rank()) == (rank, rank // 2, 0)
    return [sum_of(group, rank) for group in (alone, side, everyone)]


@on_both
def test_many_worlds_in_one_process(way: str) -> None:
    assert run(_worlds, way) == [[0, 2, 6], [1, 4, 6], [2, 2, 6], [3, 4, 6]]


def _beside(rank: int, world: pt.World) -> list[Any]:
    """Beside torch's default group, in the same store, in the other order of ranks."""
    group = phalanx.new_group(store=world.store, rank=world.size - 1 - rank, world_size=world.size)
    tensor = torch.tensor([rank + 1])
    dist.all_reduce(tensor)
    gathered = [torch.zeros(1) for _ in range(world.size)]
    group.allgather([gathered], [torch.tensor([float(rank)])]).wait()
    assert dist.get_backend() == "phalanx"
    with pytest.raises(ValueError, match=r"not registered|Unable to find|not found|is not part"):
        dist.get_global_rank(group, 0)
    return [tensor.item(), [one.item() for one in gathered]]


@pytest.mark.parametrize("processes", [False, True])
def test_beside_the_default_group(processes: bool) -> None:
    assert pt.run(_beside, ranks=3, processes=processes) == [[6, [2.0, 1.0, 0.0]]] * 3


def test_in_threads_the_world_is_the_environment() -> None:
    def program(rank: int, world: pt.World) -> tuple[int, int, float]:
        with phalanx.new_group() as group:
            return group.rank(), group.size(), sum_of(group, rank)

    assert pt.run(program, ranks=3, init=False) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]


_PROGRAM = r"""
import os, torch, phalanx
from datetime import timedelta
for name in (None, "again", None):
    with phalanx.new_group(timeout=timedelta(seconds=30), name=name) as group:
        tensor = torch.ones(1)
        group.allreduce(tensor).wait()
        line = f"{group.rank()} {group.size()} {tensor.item()} {group.group_name} {group.timeout}"
        os.write(1, f"{line}\n".encode())
"""


def test_from_the_environment(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = programs.run(["torchrun", "--nproc-per-node=2", "--standalone", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{rank} 2 2.0 {name} 0:00:30" for name in ("phalanx", "again", "phalanx") for rank in (0, 1)
    )


def _by_url(here: Here, url: str) -> float:
    query = f"?rank={here.rank}&world_size={here.size}"
    with phalanx.new_group(init_method=url + query) as group:
        first = sum_of(group, 1)
    with phalanx.new_group(init_method=url + query, name="again") as group:
        return first + sum_of(group, 1)


def test_from_a_url(tmp_path: Path) -> None:
    assert values(_by_url, 2, tmp_path, f"file://{tmp_path}/url") == [4, 4]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert values(_by_url, 2, tmp_path, f"tcp://127.0.0.1:{port}") == [4, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": dist.HashStore()}, "new_group, group 'phalanx': expected rank and world_size with a store"),
        ({"store": dist.HashStore(), "rank": 0}, "got no world_size"),
        ({"store": dist.HashStore(), "rank": 1, "world_size": 1}, "expected a rank in 0..0, got 1"),
        ({"store": dist.HashStore(), "rank": 0, "world_size": "one"}, "expected a world size as an integer, got 'one'"),
        ({"store": "file:///x", "rank": 0, "world_size": 1}, "expected a torch.distributed.Store, got 'file:///x'"),
        ({"store": dist.HashStore(), "init_method": "env://"}, "expected a store or an init_method, got both"),
        ({"store": dist.HashStore(), "rank": 0, "world_size": 1, "name": ""}, "expected a name as a str"),
        ({"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": 5}, "expected a timeout above zero"),
        ({}, "torch found no store at 'env://': "),
        ({"init_method": "nowhere://x"}, "torch found no store at 'nowhere://x': "),
        ({"init_method": 7}, "torch found no store at 7: "),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(phalanx.GroupError) as caught:
        phalanx.new_group(**options)
    assert message in str(caught.value)
    assert "\n  Next: " in str(caught.value)


def test_a_name_that_is_taken() -> None:
    with phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name="mine"):
        with pytest.raises(phalanx.GroupError) as caught:
            phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name="mine")
        assert str(caught.value) == (
            "[GROUP:NAME] new_group, group 'mine': the name 'mine' is taken: this rank is in an open group of that "
            "name\n  Next: shut down the other group first, or choose another name"
        )
    # Free again, also once the group was dropped.
    group = phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name="mine")
    del group
    phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, name="mine").shutdown()


def test_a_key_that_others_use() -> None:
    store = dist.HashStore()
    store.set("mine/0/comings/0", "something else")
    with pytest.raises(phalanx.GroupError) as caught:
        phalanx.new_group(store=store, rank=0, world_size=1, name="mine")
    assert caught.value.code == "GROUP:STORE_KEY"
    assert "did not understand the key 'mine/0/comings/0' of rank 0 in the store" in str(caught.value)


def test_groups_of_one_name_meet_in_the_order_in_which_they_are_made() -> None:
    def program(rank: int, world: pt.World) -> list[float]:
        groups = [phalanx.new_group(store=world.store, rank=rank, world_size=2) for _ in range(3)]
        return [sum_of(group, number + rank) for number, group in enumerate(groups)]

    assert pt.run(program, ranks=2, init=False) == [[1, 3, 5]] * 2


def _from_threads(here: Here) -> list[float]:
    """Two worlds of a process, made at once by two threads."""
    sums: dict[str, float] = {}

    def make(name: str) -> None:
        group = phalanx.new_group(store=here.store(name), rank=here.rank, world_size=here.size, name=name)
        sums[name] = sum_of(group, 1)
        group.shutdown()

    threads = [threading.Thread(target=make, args=(name,)) for name in ("one", "two")]
    for thread in threads[:: 1 if here.rank else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    return [sums["one"], sums["two"]]


def test_threads_make_groups_at_once(tmp_path: Path) -> None:
    assert values(_from_threads, 2, tmp_path) == [[2, 2], [2, 2]]


def _lost_in_one_world(here: Here) -> list[str]:
    """Rank 2 of the first world dies; rank 0 of the second one is another process, which lives."""
    first = phalanx.new_group(store=here.store("first"), rank=here.rank, world_size=3, name="first")
    if here.rank == 2:
        first.barrier().wait()
        os.kill(os.getpid(), signal.SIGKILL)
    second = phalanx.new_group(store=here.store("second"), rank=1 - here.rank, world_size=2, name="second")
    first.barrier().wait()
    with pytest.raises(phalanx.PeerLost) as caught:
        first.barrier().wait()
    assert sum_of(second, 1) == 2
    return [str(caught.value.peer), caught.value.group or ""]


def test_a_death_breaks_the_worlds_that_the_dead_was_in_only(tmp_path: Path) -> None:
    ends = run_ranks(_lost_in_one_world, 3, tmp_path)
    for end in ends[:2]:
        assert end.error is None, end.trace
        assert end.value == ["2", "first"]


def test_nothing_is_registered() -> None:
    code = textwrap.dedent(
        """
        import torch, torch.distributed as dist, phalanx
        from torch.distributed import distributed_c10d as c10d
        group = phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1)
        group.allreduce(torch.ones(1)).wait()
        assert not dist.is_initialized() and not c10d._world.pg_map and c10d._world.default_pg is None
        print("ended")
        """
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)


def test_the_timeout_is_that_of_the_calls() -> None:
    with phalanx.new_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7)) as group:
        assert group.timeout == timedelta(seconds=7)
