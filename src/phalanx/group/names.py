"""The names that this process has given to groups that are open: two of them in one report could not be told apart."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from phalanx.errors import GroupError
from phalanx.transports import threads

__all__ = ["check_free", "find", "release", "take"]

# By world and rank, where ranks are threads of one process, and by name.
_taken: WeakValueDictionary[tuple[object, int, str], Any] = WeakValueDictionary()


def find(name: str) -> Any:
    """The open group of this name; None if the name is free."""
    return _taken.get(_key(name))


def check_free(name: str, op: str) -> None:
    if find(name) is not None:
        raise GroupError(
            f"the name {name!r} is taken: this rank is in an open group of that name",
            code="GROUP:NAME",
            group=name,
            op=op,
            hint="shut down the other group first, or choose another name",
        )


def take(name: str, group: object) -> None:
    _taken[_key(name)] = group


def release(group: object) -> None:
    """The group is no longer open. Its name may have changed since it was taken, and its world may have ended."""
    for key in [key for key, holder in _taken.items() if holder is group]:
        _taken.pop(key, None)


def _key(name: str) -> tuple[object, int, str]:
    world = threads.place.world
    return world, 0 if world is None else world.environment()[1], name
