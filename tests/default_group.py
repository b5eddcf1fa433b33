"""The default group, with the type that it has where its backend is Phalanx."""

from __future__ import annotations

import torch.distributed as dist

import phalanx


def default_group() -> phalanx.ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, phalanx.ProcessGroup)
    return group
