"""What torch.distributed calls to make a group of the backend "phalanx"."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from phalanx.errors import GroupError
from phalanx.group.joined import MeetingPoint
from phalanx.group.making import new_group
from phalanx.group.process_group import ProcessGroup
from phalanx.group.torch_compat.groups import default_group, without_name
from phalanx.transports.identities import NOBODY
from phalanx.transports.lookout import Known
from phalanx.types import Store

# Where default groups meet, and groups within a world. torch names both by a count that each rank keeps for itself: it
# differs where only the members of a group make it, or where a rank has tried before.
_WORLDS, _WITHIN = "phalanx/worlds", "phalanx/groups"


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """The creator registered with torch: `options` names the group, its store, ranks and timeout.

    A Phalanx group as `pg_options` is the group: torch registers it, and no rank has to meet another.
    """
    # torch lists the ranks of groups within a world only.
    within = list(options.global_ranks_in_group)
    if isinstance(backend_options, ProcessGroup):
        return backend_options.hand_over(options.group_rank, options.group_size, within)
    return ProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        timeout=options.timeout,
        name=str(options.group_id),
        global_ranks=within or range(options.group_size),
        point=_point(options, within),
    )


def create_alone(
    store: Store, rank: int, world_size: int, timeout: timedelta, device: torch.device, options: dict[str, Any]
) -> ProcessGroup:
    """The creator registered with torch.distributed._dist2: groups without a world. The only option is a name."""
    if options.keys() - {"name"} or device.type != "cpu":
        asked = f"the device {device}" if device.type != "cpu" else f"the options {sorted(options)}"
        raise GroupError(
            f"expected the device cpu and no options but name, got {asked}",
            op="new_group",
            hint='call new_group("phalanx", timeout, "cpu"), or with name="..." as well',
        )
    # Groups without a name meet in the order in which they are made.
    return new_group(store=store, rank=rank, world_size=world_size, timeout=timeout, name=options.get("name"))


def _point(options: Any, within: list[int]) -> MeetingPoint | None:
    store, world = without_name(options.store), default_group()
    if store is None:
        return None
    if not within or not isinstance(world, ProcessGroup):
        return MeetingPoint(store, _WITHIN if within else _WORLDS)
    own = world.identities[world.rank()] if world.identities else NOBODY
    if own != NOBODY and own[0] != os.getpid():
        raise GroupError(
            "this process is a fork of a rank, whose default group it does not have",
            code="GROUP:FORKED",
            group=str(options.group_id),
            rank=options.group_rank,
            op="new_group",
            hint="call init_process_group in the child first, or start ranks with spawn",
        )
    identities = dict(enumerate(world.identities[rank] for rank in within)) if world.identities else {}
    return MeetingPoint(store, _WITHIN, Known(identities, lambda rank: world.words_of_left(within[rank])))
