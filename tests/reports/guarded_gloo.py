"""The default group as a Gloo group, guarded or not, for programs that run as processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

import phalanx.testing as pt
from phalanx.debug.observing import install
from phalanx.guards.guarded import GuardedGroup
from phalanx.guards.guarding import guard_all

__all__ = ["TIMEOUT", "all_guarded", "guarded", "plain"]

# Seconds: of the groups' calls, and far more than a guard needs.
TIMEOUT = 60
_HELPER = "_new_process_group_helper"


@contextlib.contextmanager
def all_guarded() -> Iterator[None]:
    """Groups that are made here are guarded, as with PHALANX_GUARD=1; those that this process makes later are not."""
    make = getattr(distributed_c10d, _HELPER)
    install()
    guard_all()
    try:
        yield
    finally:
        setattr(distributed_c10d, _HELPER, make)


@contextlib.contextmanager
def plain(rank: int, world: pt.World) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("world", world.store),
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    yield
    # After an exception the harness does it, which then has last words for the peers.
    dist.destroy_process_group()


@contextlib.contextmanager
def guarded(rank: int, world: pt.World) -> Iterator[None]:
    with all_guarded(), plain(rank, world):
        assert isinstance(dist.group.WORLD, GuardedGroup)
        yield
