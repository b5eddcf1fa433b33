"""Times small calls of one version for versions.py, and prints them as JSON. PHALANX_VERSION_AT is its folder."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

_FOLDER = os.environ["PHALANX_VERSION_AT"]
if _FOLDER:
    # An editable install puts a finder of its own before the path.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable" not in type(finder).__module__]
    sys.path.insert(0, _FOLDER)

import torch  # noqa: E402  # after the path is set
import torch.distributed as dist  # noqa: E402
from torch.multiprocessing.spawn import start_processes  # noqa: E402

BLOCKS = 31


def _rank_main(rank: int, folder: str, num: int) -> None:
    import phalanx  # registers the backend

    assert not _FOLDER or phalanx.__file__.startswith(_FOLDER), phalanx.__file__
    torch.set_num_threads(1)
    dist.init_process_group("phalanx", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    one, two = torch.zeros(1), torch.zeros(2)

    def all_reduce() -> None:
        dist.all_reduce(one)

    def ping_pong() -> None:
        if rank == 0:
            dist.send(two, 1)
            dist.recv(two, 1)
        else:
            dist.recv(two, 0)
            dist.send(two, 0)

    def async_then_wait() -> None:
        work = dist.all_reduce(one, async_op=True)
        assert work is not None
        work.wait()

    calls = {
        "all_reduce 4 B": all_reduce,
        "ping-pong 8 B": ping_pong,
        "all_reduce 4 B, async then wait": async_then_wait,
    }
    times = {name: _time(call, num) for name, call in calls.items()}
    if rank == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


def _time(call: Callable[[], None], num: int) -> float:
    blocks = []
    for _ in range(BLOCKS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num):
            call()
        blocks.append((time.perf_counter() - start) / num * 1e6)
    return statistics.median(blocks)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank_main, (folder, int(sys.argv[1])), nprocs=2, start_method="fork")
