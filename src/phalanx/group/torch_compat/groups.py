"""The groups that torch.distributed knows."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch._C._distributed_c10d import ProcessGroup
from torch.distributed import GroupMember, PrefixStore, Store, distributed_c10d
from torch.distributed.distributed_c10d import GroupName

__all__ = ["GroupName", "default_group", "without_name"]


def _keep_recorder_off(backend: str) -> None:
    """From 2.15 on torch attaches its flight recorder to every group that has devices, but for some backends.

    The recorder asks the group for its C++ backends, and a group written in Python has none: making the group would
    fail. Groups of this backend keep records of their own.
    """
    attach = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    @wraps(attach)
    def attach_to_others(group: ProcessGroup, *args: Any, **kwargs: Any) -> None:
        if group.name() != backend:
            attach(group, *args, **kwargs)

    distributed_c10d._maybe_attach_flight_recorder = attach_to_others  # type: ignore[attr-defined]


_keep_recorder_off("phalanx")


def default_group() -> ProcessGroup | None:
    """torch.distributed's default group, if there is one."""
    return GroupMember.WORLD


def without_name(store: Store) -> Store | None:
    """The store that all groups of a world share, of one that torch gives to a group; None: torch has changed.

    torch puts two prefixes before it, the group's name and the device type.
    """
    for _ in range(2):
        if not isinstance(store, PrefixStore):
            return None
        store = store.underlying_store
    return store
