"""How much is compared between ranks, as the environment asks for it."""

from __future__ import annotations

import os

from torch.distributed import DebugLevel, get_debug_level

from phalanx import _native
from phalanx.errors import GroupError

__all__ = ["FULL", "NAMES", "OFF", "ON", "asked_level", "logs_creation"]

OFF, ON, FULL = _native.CHECK_OFF, _native.CHECK_ON, _native.CHECK_FULL

_VARIABLE = "PHALANX_CHECK"
_LEVELS = {"off": OFF, "on": ON, "full": FULL}
NAMES = {level: name for name, level in _LEVELS.items()}


def asked_level() -> int:
    """What this process asks for: TORCH_DISTRIBUTED_DEBUG=DETAIL is full, and only PHALANX_CHECK=off is off."""
    asked = os.environ.get(_VARIABLE, "").lower()
    if not asked:
        return FULL if get_debug_level() == DebugLevel.DETAIL else ON
    if asked not in _LEVELS:
        raise GroupError(
            f"expected {_VARIABLE} to be one of {', '.join(_LEVELS)}, got {asked!r}",
            hint=f"unset {_VARIABLE}, or set it to one of these",
        )
    return _LEVELS[asked]


def logs_creation() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks to be told of groups that are made: INFO and DETAIL."""
    return bool(get_debug_level() != DebugLevel.OFF)
