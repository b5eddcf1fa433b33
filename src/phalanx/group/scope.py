"""The current process group: what calls use that are given none.

A context variable holds the open scopes, innermost last, so every thread and every asyncio task has its own. A task
starts with the scopes that were open where it was created. A thread starts with none.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType
from typing import Any

from torch.distributed import GroupMember
from torch.distributed import ProcessGroup as TorchProcessGroup

from phalanx.errors import GroupError, InvalidCall, InvalidType
from phalanx.group.process_group import ProcessGroup
from phalanx.group.torch_compat.groups import default_group
from phalanx.group.torch_compat.tracing import not_traced

__all__ = ["Scope", "current_process_group", "group_of_call", "process_group"]

_HINT = "pass group=, or make the call within `with phalanx.process_group(group):`"


@not_traced
class Scope:
    """What `process_group` returns. It can be entered any number of times, also within itself."""

    __slots__ = ("_group",)

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __enter__(self) -> ProcessGroup:
        _open.set((*_open.get(), self))
        return self._group

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Closes this scope, and no other: scopes that were entered later stay open."""
        scopes = _open.get()
        for place in reversed(range(len(scopes))):
            if scopes[place] is self:
                _open.set(scopes[:place] + scopes[place + 1 :])
                return
        info = self._group._info
        raise InvalidCall(
            "this scope is not open in this thread or task",
            code="INVALID:SCOPE",
            group=info.name,
            rank=info.rank,
            op="process_group",
            hint="enter and leave a scope in the same thread and task, each time with a `with` block",
        )

    def __repr__(self) -> str:
        return f"process_group({self._group!r})"


_open: ContextVar[tuple[Scope, ...]] = ContextVar("phalanx_process_groups", default=())


@not_traced
def process_group(group: ProcessGroup) -> Scope:
    """Makes a group the current one for a `with` block, in this thread or asyncio task."""
    return Scope(_checked(group, "process_group"))


@not_traced
def current_process_group() -> ProcessGroup | None:
    """The group of the innermost open scope; None if no scope is open in this thread or task."""
    scopes = _open.get()
    return scopes[-1]._group if scopes else None


def group_of_call(group: ProcessGroup | None, op: str) -> ProcessGroup:
    """The group that a call uses: the one it was given, else the current one, else torch's default group."""
    if group is not None:
        return _checked(group, op)
    current = current_process_group()
    if current is not None:
        return current
    default = default_group()
    if default is None:
        raise GroupError(
            "expected a process group, got none: no scope is open here and there is no default group",
            code="GROUP:NONE",
            op=op,
            hint=_HINT,
        )
    if not isinstance(default, ProcessGroup):
        raise GroupError(
            f"expected a Phalanx process group, got the default group, {_describe(default)}",
            code="GROUP:NONE",
            op=op,
            hint=_HINT,
        )
    return default


def _checked(group: Any, op: str) -> ProcessGroup:
    if isinstance(group, ProcessGroup):
        return group
    raise InvalidType(
        f"expected a Phalanx process group, got {_describe(group)}",
        code="INVALID:GROUP",
        op=op,
        hint='pass a phalanx.ProcessGroup, or a group that torch.distributed made with the backend "phalanx"',
    )


def _describe(group: Any) -> str:
    if isinstance(group, TorchProcessGroup):
        return f"a group of the backend {group.name()!r}"
    if group is GroupMember.NON_GROUP_MEMBER:
        return "torch's mark for a group that this rank is not in"
    return f"an object of class {type(group).__name__}"
