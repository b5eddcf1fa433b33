"""How much is compared between ranks, as the environment asks for it."""

from __future__ import annotations

import os

from torch.distributed import DebugLevel, get_debug_level

from phalanx import _native
from phalanx.errors import GroupError

__all__ = ["asked_level", "logs_creation"]

_VARIABLE = "PHALANX_CHECK"
_LEVELS = {"off": _native.CHECK_OFF, "on": _native.CHECK_ON, "full": _native.CHECK_FULL}


def asked_level() -> int:
    """What this process asks for: TORCH_DISTRIBUTED_DEBUG=DETAIL is full, and only PHALANX_CHECK=off is off."""
    asked = os.environ.get(_VARIABLE, "").lower()
    if not asked:
        return _native.CHECK_FULL if get_debug_level() == DebugLevel.DETAIL else _native.CHECK_ON
    if asked not in _LEVELS:
        raise GroupError(
            f"expected {_VARIABLE} to be one of {', '.join(_LEVELS)}, got {asked!r}",
            hint=f"unset {_VARIABLE}, or set it to one of these",
        )
    return _LEVELS[asked]


def logs_creation() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks to be told of groups that are made: INFO and DETAIL."""
    return bool(get_debug_level() != DebugLevel.OFF)
