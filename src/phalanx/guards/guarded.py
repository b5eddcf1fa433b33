"""The group that torch sees in place of a plain one. Its calls are guarded; all else is the plain group's.

The plain group stays as it is: hooks, profilers, dispatch modes and torch's recorders see the calls there.
"""

# torch's stubs give every spelling of a method as an overload.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from phalanx.group import endings
from phalanx.group.torch_compat.standing_in import StandIn
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.guards import watch
from phalanx.guards.calls import GuardedCalls
from phalanx.guards.describing import METHODS

__all__ = ["GuardedGroup"]


@not_traced
class GuardedGroup(StandIn):
    """A group whose calls are compared across the ranks while another backend carries them out."""

    _calls: GuardedCalls
    # Makes guards of groups that come of this one.
    _guard_made: Callable[[ProcessGroup], ProcessGroup]

    @classmethod
    def of(
        cls,
        calls: GuardedCalls,
        methods: Mapping[str, Callable[..., Any]],
        guard_made: Callable[[ProcessGroup], ProcessGroup],
    ) -> GuardedGroup:
        self = cls.around(calls.group)
        self._calls = calls
        self._guard_made = guard_made
        # Callers in Python find them here, without a frame in between; C++ looks in the class.
        vars(self).update(methods)
        return self

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        self._calls.monitored_barrier(*args, **kwargs)

    def start_coalescing(self, device: torch.device) -> None:
        self._calls.start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> Any:
        return self._calls.end_coalescing(device)

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._guard_other(self.plain.split_group(*args, **kwargs))

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return self._guard_other(self.plain.merge_remote_group(*args, **kwargs))

    def _guard_other(self, group: Any) -> Any:
        return self._guard_made(group) if isinstance(group, ProcessGroup) else group

    def abort(self) -> None:
        """Ends the calls under way, on every rank."""
        self._calls.posted.abort("abort() was called")
        self.plain.abort()

    def shutdown(self) -> None:
        try:
            self._leave()
        finally:
            self.plain.shutdown()

    def _leave(self) -> None:
        """The calls from now on are not compared."""
        watch.forget(self._calls)
        endings.leave(self._calls.posted)

    def __repr__(self) -> str:
        return f"<phalanx.{type(self).__name__} around {self.plain!r}>"


def _guarded(name: str) -> Callable[..., Any]:
    def method(self: GuardedGroup, *args: Any, **kwargs: Any) -> Any:
        return vars(self)[name](*args, **kwargs)

    method.__name__ = name
    method.__qualname__ = f"{GuardedGroup.__name__}.{name}"
    return not_traced(method)


for _name in METHODS:
    setattr(GuardedGroup, _name, _guarded(_name))
