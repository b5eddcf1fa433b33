"""The names that this process has given to groups that are open: two of them in one report could not be told apart."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from phalanx.errors import GroupError
from phalanx.transports import threads

__all__ = ["check_free", "find", "release", "take"]

# By the rank whose group it is, where ranks are threads of one process, and the name.
_taken: WeakValueDictionary[tuple[int, int, str], Any] = WeakValueDictionary()


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


def release(name: str, group: object) -> None:
    """The group is open no more."""
    if _taken.get(_key(name)) is group:
        del _taken[_key(name)]


def _key(name: str) -> tuple[int, int, str]:
    world = threads.place.world
    return (0, 0, name) if world is None else (id(world), world.environment()[1], name)
