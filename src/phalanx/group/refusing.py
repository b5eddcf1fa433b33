"""What happens to a call that this rank refuses: peers that wait for it are told (transports/refusals.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx import _native
from phalanx.errors import InvalidCall

__all__ = ["collective", "quick"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def collective(method: _Method) -> _Method:
    """For methods of a `Carrier` that make a collective."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except InvalidCall as error:
            self._refuse_call(error)
            raise

    return guarded  # type: ignore[return-value]


def quick(method: _Method) -> _Method:
    """For methods whose plain calls the native front carries out. The method gets the others."""
    made: _Method = _native.front_method(method.__name__, method)
    return made
