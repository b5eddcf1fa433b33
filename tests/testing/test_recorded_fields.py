"""What records of calls say, on both transports: device, engine, root, sender, last arriver, group and host."""

from __future__ import annotations

import json
import socket
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import World, run


def _program(rank: int, world: World) -> dict[str, Any]:
    both = dist.new_group([0, 1], group_desc="both ranks")
    dist.broadcast(torch.ones(2), 1, group=both)
    if rank == 0:
        # Rank 1 comes when this one waits: the message tells it that the call was made.
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.send(torch.ones(1), 1)
        assert work is not None
        work.wait()
        dist.recv(torch.ones(3), tag=3)
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1))
        dist.send(torch.ones(3), 0, tag=3)
    dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        trace: dict[str, Any] = json.loads(phalanx.dump(folder, format="json").read_text())
    return trace


@pytest.mark.parametrize("processes", [False, True])
def test_what_is_known_of_a_call(processes: bool) -> None:
    traces = run(_program, 2, processes=processes)
    for rank, trace in enumerate(traces):
        calls = {entry["profiling_name"].partition(" ")[0]: entry for entry in trace["entries"]}
        assert trace["phalanx"]["host"] == socket.gethostname()[:63]
        assert {entry["engine"] for entry in trace["entries"]} == {"shm" if processes else "threads"}
        assert calls["gloo:all_reduce"]["device"] == "cpu"
        assert calls["gloo:barrier"]["device"] is None
        broadcast = calls["gloo:broadcast"]
        assert (broadcast["root"], broadcast["sender"]) == (1, -1)
        assert broadcast["process_group"] == ["both ranks", "both ranks"]
        if rank == 0:
            assert calls["gloo:all_reduce"]["last_arriver"] == 1
            received = calls["gloo:recv"]
            assert (received["root"], received["peer"], received["tag"], received["sender"]) == (-1, -1, 3, 1)
        else:
            assert calls["gloo:recv"]["sender"] == -1
            assert calls["gloo:all_reduce"]["last_arriver"] == (-1 if processes else 1)
