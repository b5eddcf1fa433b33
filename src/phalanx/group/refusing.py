"""What happens to a call that this rank refuses: peers that wait for it are told (transports/refusals.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.collectives.checks import PLAIN_CLASSES
from phalanx.errors import InvalidCall, PhalanxError
from phalanx.group.dispatching import tensors_of
from phalanx.types import GroupInfo

__all__ = ["collective", "explain_missing_memory"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def collective(method: _Method) -> _Method:
    """For collectives of a group. Hot methods do the same in their own frame, which costs nothing."""
    op = method.__name__.removesuffix("_coalesced").removesuffix("_single")

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except InvalidCall as error:
            self._group.refuse_call(error)
            raise
        except RuntimeError as error:
            refused = explain_missing_memory(self._info, op, (*args, *kwargs.values()), error)
            if refused is None:
                raise
            self._group.refuse_call(refused)
            raise refused from error

    return guarded  # type: ignore[return-value]


def explain_missing_memory(info: GroupInfo, op: str, args: tuple[Any, ...], error: RuntimeError) -> InvalidCall | None:
    """What torch means if it raised because a tensor has no memory.

    Tensors within torch.func's transforms are of the plain class. To look at every tensor before a call would cost more
    than the small calls do.
    """
    if not isinstance(error, PhalanxError):
        for tensor in tensors_of(args):
            if type(tensor) not in PLAIN_CLASSES:
                continue
            try:
                tensor.data_ptr()
            except RuntimeError:
                return _no_memory(info, op)
    return None


def _no_memory(info: GroupInfo, op: str) -> InvalidCall:
    return InvalidCall(
        "expected tensors that have memory, got one without, as torch.func and vmap pass them to functions",
        code="INVALID:TENSOR",
        group=info.name,
        rank=info.rank,
        op=op,
        hint=f"call {op} outside of torch.func's transforms and of vmap",
    )
