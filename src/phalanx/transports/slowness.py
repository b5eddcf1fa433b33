"""How long a call may wait before a warning says for whom."""

from __future__ import annotations

import os

from phalanx.log import logger

__all__ = ["slow_seconds"]

_VARIABLE = "PHALANX_SLOW"
_SLOW = 10.0


def slow_seconds() -> float:
    """How long a call may wait before it says so; 0: for ever."""
    asked = os.environ.get(_VARIABLE, "")
    try:
        return max(float(asked), 0.0) if asked else _SLOW
    except ValueError:
        logger.warning("expected %s to be a number of seconds, got %r; it is %g", _VARIABLE, asked, _SLOW)
        return _SLOW
