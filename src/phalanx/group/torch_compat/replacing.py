"""Another group in place of one that torch has made: in all that torch.distributed knows of groups."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _unregister_process_group
from torch.distributed import GroupMember, Store, distributed_c10d

__all__ = ["has_plain_groups", "members_of", "name_of", "replace", "store_of", "timeout_of", "wrap_making"]

_HELPER = "_new_process_group_helper"
_TABLES = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "pg_coalesce_state",
    # Since torch 2.15: what keeps a recorder on the group, whose hooks are on the plain one.
    "pg_flight_recorder_hooks",
)


def wrap_making(wrap: Callable[[ProcessGroup, Store, timedelta | None, list[int]], ProcessGroup]) -> None:
    """From now on torch registers what `wrap` makes of each group that it makes. Calling it again changes nothing.

    `wrap` gets the group, its store, its timeout and its ranks in the default group; of that one, none.
    """
    make = getattr(distributed_c10d, _HELPER)
    if hasattr(make, "wraps_groups"):
        return
    takes = inspect.signature(make)

    @wraps(make)
    def make_wrapped(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        group, store = made
        if group is GroupMember.NON_GROUP_MEMBER or store is None:
            return made
        given = takes.bind(*args, **kwargs).arguments
        # torch writes down the group's ranks only after this.
        wrapped = wrap(group, store, given.get("timeout"), list(given.get("global_ranks_in_group") or ()))
        if wrapped is not group:
            replace(group, wrapped)
        return wrapped, store

    make_wrapped.wraps_groups = True  # type: ignore[attr-defined]
    setattr(distributed_c10d, _HELPER, make_wrapped)


def replace(old: ProcessGroup, new: ProcessGroup) -> None:
    """torch.distributed, functional collectives included, uses `new` wherever it used `old`."""
    world = distributed_c10d._world
    for name in _TABLES:
        table = getattr(world, name, None)
        if table and old in table:
            entries = [(new if group is old else group, value) for group, value in table.items()]
            table.clear()
            table.update(entries)
    for groups in world.tags_to_pg.values():
        groups[:] = [new if group is old else group for group in groups]
    if world.default_pg is old:
        distributed_c10d._update_default_pg(new)
    registered = world.pg_names.get(new)
    if registered is not None:
        _unregister_process_group(registered)
        _register_process_group(registered, new)


def has_plain_groups() -> bool:
    """Whether torch knows groups whose calls its own class carries out."""
    return any(type(group) is ProcessGroup for group in list(distributed_c10d._world.pg_map))


def store_of(group: ProcessGroup) -> Store | None:
    """The store that torch made the group with."""
    known = distributed_c10d._world.pg_map.get(group)
    return None if known is None else known[1]


def members_of(group: ProcessGroup) -> list[int]:
    """The group's ranks in the default group; empty where torch does not know them."""
    ranks: dict[int, int] = distributed_c10d._world.pg_group_ranks.get(group, {})
    return sorted(ranks, key=lambda rank: ranks[rank])


def name_of(group: ProcessGroup) -> str:
    """As people know it: torch's own names are numbers."""
    for attribute in ("group_desc", "group_name"):
        # A group written in Python need not keep them.
        with contextlib.suppress(RuntimeError):
            name = str(getattr(group, attribute) or "undefined")
            if name != "undefined":
                return name
    return str(distributed_c10d._world.pg_names.get(group, "without a name"))


def timeout_of(group: ProcessGroup) -> timedelta:
    """That of the first backend that has one; else torch's default."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return distributed_c10d.default_pg_timeout
