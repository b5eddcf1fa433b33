"""What tests of guards share: groups of other backends that are guarded, and what is logged meanwhile."""

from __future__ import annotations

import logging
import queue
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Here

import phalanx
from phalanx.debug.observing import install
from phalanx.guards.guarded import GuardedGroup
from phalanx.guards.guarding import guard_all
from phalanx.log import logger

__all__ = ["LONG", "init", "init_plain", "logged", "lost"]

# Seconds: the timeout of groups whose calls only the guard may end.
LONG = 600


def init(here: Here, timeout: float = LONG, backend: str = "gloo") -> dist.ProcessGroup:
    """As with PHALANX_GUARD=1: every group that the process makes from now on is guarded."""
    install()
    guard_all()
    group = init_plain(here, timeout, backend)
    assert isinstance(group, GuardedGroup)
    return group


def init_plain(here: Here, timeout: float = LONG, backend: str = "gloo") -> dist.ProcessGroup:
    dist.init_process_group(
        backend, store=here.store(), rank=here.rank, world_size=here.size, timeout=timedelta(seconds=timeout)
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def logged() -> queue.SimpleQueue[str]:
    """What Phalanx logs from now on, in the order in which it comes."""
    texts: queue.SimpleQueue[str] = queue.SimpleQueue()
    handler = logging.Handler()
    handler.emit = lambda record: texts.put(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    return texts


def lost(call: Any, *args: Any) -> dict[str, Any]:
    """The PeerLost that the call raises, without the caller's own rank."""
    with pytest.raises(phalanx.PeerLost) as caught:
        call(*args)
    error = caught.value
    assert isinstance(error, dist.DistBackendError)
    head, _, said = str(error).partition(f"rank {error.rank}: ")
    return {
        "peer": error.peer,
        "exception": error.exception,
        "head": head,
        "said": said.removeprefix("the group is broken: "),
    }
