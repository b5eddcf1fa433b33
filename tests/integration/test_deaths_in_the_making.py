"""A rank that dies before a group is made or while it is, and the death of the rank that hosts the store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, World

import phalanx


def _lost(call: Callable[[], object], peer: int) -> str:
    with pytest.raises(phalanx.PeerLost) as caught:
        call()
    assert caught.value.peer == peer
    return caught.value.message


@contextlib.contextmanager
def _port() -> Iterator[int]:
    """A port that nobody else is given, and that a store can listen on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _init(here: Here, method: str, port: int) -> None:
    """Through a store that rank 0 hosts."""
    timeout = timedelta(seconds=30)
    if method == "tcp":
        url = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("phalanx", init_method=url, rank=here.rank, world_size=here.size, timeout=timeout)
    else:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(here.rank),
            "WORLD_SIZE": str(here.size),
        }
        dist.init_process_group("phalanx", timeout=timeout)


def _host_dies(here: Here, method: str, port: int) -> str:
    _init(here, method, port)
    rest = dist.new_group([1, 2])
    dist.barrier()
    if here.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = _lost(dist.barrier, 0)
    total = torch.ones(1)
    dist.all_reduce(total, group=rest)
    assert total.item() == 2
    dist.destroy_process_group()
    return lost


@pytest.mark.parametrize("method", ["tcp", "env"])
def test_the_host_of_the_store_dies(method: str, tmp_path: Path) -> None:
    with _port() as port:
        world = World(_host_dies, 3, tmp_path, method, port)
        world.keep_dead()
        ends = world.ends()
    for end in ends[1:]:
        assert end.error is None, end.trace
        assert "rank 0 died (killed by SIGKILL) while rank " in end.value


def _host_dies_in_the_making(here: Here, port: int, ranks: list[int], early: bool) -> str:
    _init(here, "tcp", port)
    dist.barrier()
    if here.rank == 0:
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
    here.tell()
    if early:
        here.hear()
    with pytest.raises(phalanx.PhalanxError) as caught:
        dist.new_group(ranks)
    # A rank that has ended by then would be what the other one is told of.
    gate = Gate(here)
    gate.open(f"told{here.rank}")
    gate.wait("told1", "told2")
    dist.destroy_process_group()
    return f"{caught.value.code} {caught.value}"


@pytest.mark.parametrize("early", [True, False], ids=["before", "during"])
def test_the_host_of_the_store_dies_while_a_group_is_made(early: bool, tmp_path: Path) -> None:
    with _port() as port:
        world = World(_host_dies_in_the_making, 3, tmp_path, port, [0, 1, 2], early)
        world.all_told(1, 2)
        world.keep_dead()
        world.tell(0)
        world.wait_dead(0)
        if early:
            world.tell_all(1, 2)
        ends = world.ends()
    for rank in (1, 2):
        assert ends[rank].error is None, ends[rank].trace
        text = f"rank {rank}: rank 0 died while the group was being made: killed by SIGKILL\n"
        assert ends[rank].value.startswith("PEER_LOST [PEER_LOST] new_group, group '1', ")
        assert text in ends[rank].value


def _host_raises_in_the_making(here: Here, port: int) -> str:
    _init(here, "tcp", port)
    dist.barrier()
    if here.rank == 0:
        here.hear()
        raise ValueError("no more data")
    here.tell()
    lost = _lost(lambda: dist.new_group([0, 1, 2]), 0)
    # A rank that has ended by then would be what the other one is told of.
    gate = Gate(here)
    gate.open(f"told{here.rank}")
    gate.wait("told1", "told2")
    return lost


def test_the_host_of_the_store_raises_while_a_group_is_made(tmp_path: Path) -> None:
    with _port() as port:
        world = World(_host_raises_in_the_making, 3, tmp_path, port, way=["program", "call", "call"])
        world.all_told(1, 2)
        world.tell(0)
        ends = world.ends()
    for end in ends[1:]:
        assert end.error is None, end.trace
        assert "rank 0 ended while the group was being made" in end.value
        assert "the first exception of rank 0: ValueError: no more data" in end.value


def test_a_group_without_the_host_of_the_store_can_not_be_made(tmp_path: Path) -> None:
    with _port() as port:
        world = World(_host_dies_in_the_making, 3, tmp_path, port, [1, 2], True)
        world.all_told(1, 2)
        world.tell(0)
        world.processes[0].join(30)
        world.tell_all(1, 2)
        ends = world.ends()
    for end in ends[1:]:
        assert end.error is None, end.trace
        assert end.value.startswith("GROUP:STORE [GROUP:STORE] group ")
        assert "the store failed while the group was being made: " in end.value
        assert "look for an error on the rank that hosts the store, usually rank 0" in end.value


def _host_dies_in_the_beginning(here: Here, port: int) -> str:
    if here.rank == 0:
        store = dist.TCPStore("127.0.0.1", port, here.size, True, wait_for_workers=False)
        here.tell()
        here.hear()
        os.kill(os.getpid(), signal.SIGKILL)
        del store
    here.hear()
    store = dist.TCPStore("127.0.0.1", port, here.size, False, wait_for_workers=False)
    here.tell()
    with pytest.raises(phalanx.GroupError) as caught:
        dist.init_process_group("phalanx", store=store, rank=here.rank, world_size=here.size)
    return str(caught.value)


def test_the_host_of_the_store_dies_before_the_first_group_is_made(tmp_path: Path) -> None:
    with _port() as port:
        world = World(_host_dies_in_the_beginning, 2, tmp_path, port)
        world.told(0)
        world.tell(1)
        world.told(1)
        world.tell(0)
        end = world.ends()[1]
    assert end.value.startswith("[GROUP:STORE] group "), end.trace


def _dead_member(here: Here, early: bool) -> str:
    here.init()
    dist.barrier()
    if here.rank == 2:
        here.hear()
        os._exit(3)
    here.tell()
    if early:
        here.hear()
    lost = _lost(lambda: dist.new_group([0, 1, 2]), 2)
    # The others can still make one.
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group([0, 1]))
    assert total.item() == 2
    return lost


@pytest.mark.parametrize("early", [True, False], ids=["before", "during"])
def test_a_member_of_a_new_group_is_dead(early: bool, tmp_path: Path) -> None:
    world = World(_dead_member, 3, tmp_path, early)
    world.all_told(0, 1)
    world.keep_dead()
    world.tell(2)
    world.wait_dead(2)
    if early:
        world.tell_all(0, 1)
    for end in world.ends()[:2]:
        assert end.error is None, end.trace
        assert end.value == "rank 2 died while the group was being made: exit code 3"
