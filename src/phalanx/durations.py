"""Timeouts in seconds. Whatever takes one reads it here."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

__all__ = ["read_limit", "read_timeout"]

# Seconds. Deadlines in the core are never further away.
_LONGEST = 1e9
# torch keeps timeouts as microseconds in 64 bits, and then as milliseconds or as seconds of little precision: the
# extremes of timedelta come out of its options and stores as something else.
_EXTREMES = [
    (((extreme // timedelta(microseconds=1) + 2**63) % 2**64 - 2**63) / 1e6, extreme.total_seconds())
    for extreme in (timedelta.max, timedelta.min)
]
_PRECISION = 30 * 86400.0


def read_timeout(timeout: Any) -> float:
    """Of a timeout that somebody has set; infinite where there is no limit. Raises TypeError and ValueError."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"expected a timeout as a datetime.timedelta, got {timeout!r}")
    seconds = _seconds(timeout)
    if seconds <= 0:
        text = "timedelta.min" if seconds == timedelta.min.total_seconds() else f"{seconds:g} s"
        raise ValueError(f"expected a timeout above zero, got {text}")
    return seconds if seconds < _LONGEST else math.inf


def read_limit(timeout: timedelta) -> float:
    """Of a store, for which zero means that there is no limit."""
    seconds = _seconds(timeout)
    return seconds if 0 < seconds < _LONGEST else math.inf


def _seconds(timeout: timedelta) -> float:
    """Of what the caller gave to torch, where that was an extreme of timedelta."""
    seconds = timeout.total_seconds()
    return next((extreme for wrapped, extreme in _EXTREMES if abs(seconds - wrapped) < _PRECISION), seconds)
