"""A guard makes no asynchronous call synchronous: who begins one goes on, and a peer may come later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guarded import init
from ranks import Here, World

_CALLS: dict[str, Callable[[int], dist.Work | None]] = {
    "isend": lambda rank: dist.isend(torch.ones(1000), 1),
    "irecv": lambda rank: dist.irecv(torch.ones(1000), 1),
    "irecv from anybody": lambda rank: dist.irecv(torch.ones(1000)),
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(1000), async_op=True),
    "sparse all_reduce": lambda rank: dist.all_reduce(torch.ones(1000).to_sparse(), async_op=True),
    "barrier": lambda rank: dist.barrier(async_op=True),
}
_OTHER_SIDES: dict[str, Callable[[int], object]] = {
    "isend": lambda rank: dist.recv(torch.ones(1000), 0),
    "irecv": lambda rank: dist.send(torch.ones(1000), 0),
    "irecv from anybody": lambda rank: dist.send(torch.ones(1000), 0),
}


def _begin(here: Here, name: str) -> None:
    """Rank 1 comes when rank 0 says that it has gone on."""
    init(here)
    dist.barrier()
    if here.rank == 0:
        work = _CALLS[name](0)
        assert work is not None
        here.tell()
        work.wait()
        assert work.is_completed()
        return
    here.hear()
    other: Callable[[int], object] | None = _OTHER_SIDES.get(name)
    if other is None:
        late = _CALLS[name](1)
        assert late is not None
        late.wait()
    else:
        other(1)


@pytest.mark.parametrize("name", _CALLS)
def test_who_begins_a_call_goes_on(name: str, tmp_path: Path) -> None:
    world = World(_begin, 2, tmp_path, name)
    world.told(0)
    world.tell(1)
    for end in world.ends():
        assert end.error is None, end.trace
