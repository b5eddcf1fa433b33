"""The names that this process has given to groups that are open: two of them in one report could not be told apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

from phalanx.errors import GroupError
from phalanx.transports import threads
from phalanx.types import GroupInfo

__all__ = ["check_free", "check_problems", "problem_of", "release", "take"]

# By world and rank, where ranks are threads of one process, and by name.
_taken: WeakValueDictionary[tuple[object, int, str], Any] = WeakValueDictionary()


def check_free(name: str, op: str) -> None:
    if _key(name) in _taken:
        raise GroupError(
            f"the name {name!r} is taken: this rank is in an open group of that name",
            code="GROUP:NAME",
            group=name,
            op=op,
            hint="shut down the other group first, or choose another name",
        )


def problem_of(name: str) -> str:
    """What a rank tells the others where it can't use the name; empty where it can."""
    return f"the name {name!r} is taken: it is in an open group of that name" if _key(name) in _taken else ""


def check_problems(info: GroupInfo, op: str, seq: int, problems: Iterable[str]) -> None:
    """Raises if any rank has a problem with the name. `problems` are those of all ranks, so all of them raise."""
    lines = [f"  {info.describe(rank)}: {problem}" for rank, problem in enumerate(problems) if problem]
    if lines:
        raise GroupError(
            "\n".join(["no group was made", *lines]),
            code="GROUP:NAME",
            group=info.name,
            rank=info.rank,
            op=op,
            seq=seq,
            hint="shut down the other group of that name first, or choose another name",
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
