"""What torch.distributed calls to make a group of the backend "phalanx"."""

from __future__ import annotations

from typing import Any

from phalanx.group.process_group import ProcessGroup


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """The creator registered with torch: `options` names the group, its store, ranks and timeout."""
    return ProcessGroup(
        options.store, options.group_rank, options.group_size, timeout=options.timeout, name=str(options.group_id)
    )
