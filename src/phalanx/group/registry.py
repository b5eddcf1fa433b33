"""What torch.distributed calls to make a group of the backend "phalanx"."""

from __future__ import annotations

from typing import Any

from phalanx.group.process_group import ProcessGroup
from phalanx.group.torch_compat import default_group
from phalanx.transports.rendezvous import Identity


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """The creator registered with torch: `options` names the group, its store, ranks and timeout."""
    return ProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        timeout=options.timeout,
        name=str(options.group_id),
        global_ranks=options.global_ranks_in_group,
        known=_known(options.global_ranks_in_group),
    )


def _known(global_ranks: list[int]) -> dict[int, Identity]:
    """Who the ranks of a new group are, as far as the default group knows: by their rank in the new one."""
    world = default_group()
    if not isinstance(world, ProcessGroup):
        return {}
    identities = world.identities
    return {rank: identities[global_rank] for rank, global_rank in enumerate(global_ranks) if identities}
