"""PHALANX_GUARD: whether every group that the program makes is guarded."""

from __future__ import annotations

import os

__all__ = ["VARIABLE", "is_asked"]

VARIABLE = "PHALANX_GUARD"
_WORDS = {"": False, "0": False, "off": False, "1": True, "on": True}


def is_asked() -> bool:
    """Whether the program asks for it. Raises ValueError for an unknown word."""
    word = os.environ.get(VARIABLE, "")
    asked = _WORDS.get(word.strip().lower())
    if asked is None:
        known = ", ".join(word for word in _WORDS if word)
        raise ValueError(f"expected {VARIABLE} to be one of {known}, got {word!r}")
    return asked
