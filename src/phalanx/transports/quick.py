"""What a transport offers whose plain calls the native front may carry out, without a Python frame of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from phalanx import _native

if TYPE_CHECKING:
    from phalanx.transports.base import Pending

__all__ = ["Quick"]


class Quick(Protocol):
    """The way of plain calls."""

    @property
    def front(self) -> _native.Front:
        """What the native methods of a group look for."""

    def adopt(
        self,
        group: _native.GroupEnd,
        native: _native.CallHandle,
        op: str,
        timeout: float,
        written: Sequence[tuple[int, int]],
    ) -> Pending:
        """A call that the front has begun. The core writes the memory between the addresses in `written`."""
