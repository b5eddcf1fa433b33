"""The names that this process has given to groups that are open: two of them in one report could not be told apart."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from phalanx.errors import GroupError
from phalanx.transports import threads

__all__ = ["Key", "check_free", "describe_taken", "problem_of", "release", "take"]

# Errors name several groups, and ranks tell each other of them.
_MOST_CHARACTERS = 1000

# By world and rank, where ranks are threads of one process, and by name.
Key = tuple[object, int, str]
_taken: WeakValueDictionary[Key, Any] = WeakValueDictionary()


def problem_of(name: object) -> str:
    """Why this can't be the name of a group; empty: it can."""
    if not isinstance(name, str) or not name:
        return f"expected a name as a str that is not empty, got {name!r}"
    if len(name) > _MOST_CHARACTERS:
        return f"expected a name of at most {_MOST_CHARACTERS} characters, got one of {len(name)}"
    try:
        name.encode()
    except UnicodeEncodeError:
        return f"expected a name that can be encoded as UTF-8, got {name!r}"
    return ""


def describe_taken(name: str) -> str:
    """What a rank tells the others where it can't use the name again; empty where it can."""
    return f"the name {name!r} is taken: it is in an open group of that name" if _key(name) in _taken else ""


def check_free(name: str, op: str) -> None:
    if _key(name) in _taken:
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
    """The group is no longer open."""
    if _taken.get(key) is group:
        _taken.pop(key, None)


def _key(name: str) -> Key:
    run = threads.this_thread.run
    return run, 0 if run is None else run.environment()[1], name
