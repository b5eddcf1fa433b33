"""The names that this process has given to groups that are open: two of them in one report could not be told apart."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from phalanx.errors import GroupError
from phalanx.transports import threads

__all__ = ["MOST_CHARACTERS", "Key", "check_free", "find", "problem_of", "release", "take"]

# Errors name several groups, and ranks tell each other of them.
MOST_CHARACTERS = 1000

# The rank whose group it is, where ranks are threads of one process, and the name.
Key = tuple[int, int, str]
_taken: WeakValueDictionary[Key, Any] = WeakValueDictionary()


def problem_of(name: object) -> str:
    """Why this can't be the name of a group; empty: it can."""
    if not isinstance(name, str) or not name:
        return f"expected a name as a str that is not empty, got {name!r}"
    if len(name) > MOST_CHARACTERS:
        return f"expected a name of at most {MOST_CHARACTERS} characters, got one of {len(name)}"
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"expected a name that can be encoded as UTF-8, got {name!r}"
    return ""


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


def take(name: str, group: object) -> Key:
    """The key with which to release it."""
    key = _key(name)
    _taken[key] = group
    return key


def release(key: Key, group: object) -> None:
    """The group is open no more."""
    if _taken.get(key) is group:
        del _taken[key]


def _key(name: str) -> Key:
    world = threads.place.world
    return (0, 0, name) if world is None else (id(world), world.environment()[1], name)
