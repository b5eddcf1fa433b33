"""Guarded groups whose ranks can't all share memory: each host compares the calls of its own ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded import init, logged
from ranks import Here, values

import phalanx
from phalanx import _native
from phalanx.guards import guarding

_SIZE = 4


def _be_on_two_hosts(here: Here) -> None:
    """Ranks 0 and 2 are on one host, 1 and 3 on the other: no segment of all four can be opened there."""
    opened: Callable[[str, bytes, int], _native.Segment] = _native.Segment.open

    class Refusing:
        create_memfd = _native.Segment.create_memfd
        create_file = _native.Segment.create_file

        @staticmethod
        def open(path: str, nonce: bytes, size: int) -> _native.Segment:
            if size == _SIZE and here.rank % 2 == 1:
                raise OSError(13, "Permission denied", path)
            return opened(path, nonce, size)

    _native.Segment = Refusing  # type: ignore[misc, assignment]
    guarding.process_namespace = lambda: f"host {here.rank % 2}"  # type: ignore[attr-defined]


def _works(here: Here) -> dict[str, Any]:
    _be_on_two_hosts(here)
    texts = logged()
    init(here)
    tensor = torch.full((3,), float(here.rank))
    dist.all_reduce(tensor)
    received = torch.empty(2)
    # To the next rank, which is on the other host, and to the one after it, which is on this one.
    for step in (1, 2):
        works = [
            dist.isend(torch.full((2,), float(here.rank)), (here.rank + step) % _SIZE),
            dist.irecv(received, (here.rank - step) % _SIZE),
        ]
        for work in works:
            assert work is not None
            work.wait()
        assert received.tolist() == [float((here.rank - step) % _SIZE)] * 2
    dist.destroy_process_group()
    return {"sum": tensor.tolist(), "logged": texts.get_nowait()}


def test_ranks_on_several_hosts_work_and_are_told_who_is_compared(tmp_path: Path) -> None:
    for rank, found in enumerate(values(_works, _SIZE, tmp_path)):
        assert found["sum"] == [6.0] * 3
        ranks = "ranks 0, 2" if rank % 2 == 0 else "ranks 1, 3"
        assert found["logged"].startswith("group 'default_pg' spans several hosts: the calls of ")
        assert ranks in found["logged"]


def _differ(here: Here) -> str:
    _be_on_two_hosts(here)
    init(here)
    dist.barrier()
    with pytest.raises(dist.DistBackendError if here.rank % 2 == 0 else RuntimeError) as caught:
        dist.all_reduce(torch.ones(5 if here.rank == 2 else 4))
    if here.rank % 2 == 0:
        assert isinstance(caught.value, phalanx.Mismatch)
    return str(caught.value)


def test_ranks_of_one_host_are_compared(tmp_path: Path) -> None:
    texts = values(_differ, _SIZE, tmp_path)
    for rank in (0, 2):
        assert texts[rank].startswith("[MISMATCH:COUNT] all_reduce, seq 2, group 'default_pg', rank ")
        assert "rank 1 (global rank 2): all_reduce(SUM, 5 elements of float32)" in texts[rank]
