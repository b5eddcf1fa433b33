"""Threads of the program that go on after the function of a child of multiprocessing has returned."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World


def _go_on_in_a_thread(here: Here) -> None:
    here.init()
    is_ending = threading.Event()
    # Python calls it when it begins to wait for threads.
    threading._register_atexit(is_ending.set)  # type: ignore[attr-defined]

    def work() -> None:
        is_ending.wait()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        print(f"sum {tensor.item()}", flush=True)

    threading.Thread(target=work).start()
    # Its thread ends only when Python tells it to.
    ThreadPoolExecutor(1).submit(int).result()


@pytest.mark.parametrize("size", [1, 2])
def test_a_thread_makes_calls_after_the_function_has_returned(size: int, tmp_path: Path) -> None:
    world = World(_go_on_in_a_thread, size, tmp_path, way="child")
    for end in world.ends():
        assert end.exitcode == 0
    assert [world.output(rank) for rank in range(size)] == [f"sum {float(size)}\n"] * size
