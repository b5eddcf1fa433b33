"""A world of threads whose ranks fork: the child has no ranks, and does not disturb those of its parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import phalanx.testing as pt

SCHEDULES: list[dict[str, Any]] = [{}, {"seed": 3}, {"schedule": "free"}]
IDS = ["in order", "random", "free"]


def in_child(function: Callable[[], Any]) -> str:
    """What the function's exception says in a forked child, or "no exception"."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "no exception"
        try:
            function()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with status {status} and said {text!r}"
    return text


def calls_of(world: pt.World, work: Any) -> list[Callable[[], Any]]:
    tensor = torch.ones(1)
    return [
        lambda: dist.all_reduce(tensor),
        lambda: dist.barrier(),
        lambda: dist.all_reduce(tensor, async_op=True),
        lambda: dist.send(tensor, 0),
        lambda: dist.recv(tensor),
        lambda: dist.new_group(),
        lambda: work.wait(),
        lambda: world.store.get("a key that nobody sets"),
        lambda: world.store.set("a key", "value"),
        lambda: world.store.add("a key", 1),
    ]


def fork_and_call(rank: int, world: pt.World) -> tuple[list[str], float]:
    tensor = torch.tensor([rank + 1.0])
    work = dist.all_reduce(tensor, async_op=True) if rank else None
    texts: list[str] = []
    if rank == 1:
        texts = [in_child(call) for call in calls_of(world, work)]
        world.store.set("forked", "")
    if rank == 0:
        world.store.wait(["forked"])
        work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    return texts, tensor.item()


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_calls_in_a_forked_child(options: dict[str, Any]) -> None:
    values = pt.run(fork_and_call, 3, **options)
    assert [value for _, value in values] == [6.0] * 3
    assert len(values[1][0]) == 10
    for text in values[1][0]:
        assert text.startswith("GroupError: [GROUP:FORKED]"), text


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
@pytest.mark.parametrize(("way", "code"), [("_exit", 7), ("exit", 3), ("raise", 1), ("return", 0), ("destroy", 0)])
def test_ways_in_which_a_child_ends(options: dict[str, Any], way: str, code: int) -> None:
    def fork(rank: int, world: pt.World) -> int:
        dist.barrier()
        pid = os.fork()
        if pid == 0:
            if way == "_exit":
                os._exit(7)
            if way == "exit":
                sys.exit(3)
            if way == "raise":
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                raise ValueError("in the child")
            if way == "destroy":
                dist.destroy_process_group()
            return -1
        _, status = os.waitpid(pid, 0)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world.size
        return os.waitstatus_to_exitcode(status)

    assert pt.run(fork, 2, **options) == [code] * 2


def _double(value: int) -> int:
    return 2 * value


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("options", SCHEDULES, ids=IDS)
def test_processes_of_multiprocessing(options: dict[str, Any]) -> None:
    def use_a_pool(rank: int, world: pt.World) -> list[int]:
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool:
            doubled = pool.map(_double, [rank, 10])
        dist.barrier()
        return doubled

    assert pt.run(use_a_pool, 2, **options) == [[0, 20], [2, 20]]


@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("options", SCHEDULES[:2], ids=IDS[:2])
def test_workers_of_a_data_loader(options: dict[str, Any]) -> None:
    def load(rank: int, world: pt.World) -> list[float]:
        dataset = TensorDataset(torch.arange(4.0) + 10 * rank)
        sums = []
        for (batch,) in DataLoader(dataset, batch_size=2, num_workers=1):
            total = batch.sum()
            dist.all_reduce(total)
            sums.append(total.item())
        return sums

    assert pt.run(load, 2, **options) == [[22.0, 30.0]] * 2


@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_can_make_groups_of_processes(tmp_path: Any) -> None:
    def make_a_group() -> None:
        dist.destroy_process_group()
        dist.init_process_group("phalanx", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().wait()
        assert tensor.item() == 1
        dist.destroy_process_group()

    def fork(rank: int, world: pt.World) -> str:
        dist.barrier()
        return in_child(make_a_group) if rank == 1 else ""

    assert pt.run(fork, 2) == ["", "no exception"]


@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_in_a_thread_that_a_rank_has_started() -> None:
    def fork(rank: int, world: pt.World) -> str:
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(in_child(dist.barrier)))
        thread.start()
        thread.join()
        dist.barrier()
        return texts[0]

    assert all("GROUP:FORKED" in text for text in pt.run(fork, 2))
