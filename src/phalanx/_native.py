"""The only importer of the native module: all of its names, and tables of its ops by name."""

from __future__ import annotations

from phalanx import _core_ext
from phalanx._core_ext import *  # noqa: F403
from phalanx._core_ext import OPS, OpTraits

OP_NUMBERS = {op.name: number for number, op in enumerate(OPS)}
TRAITS: dict[str, OpTraits] = {op.name: op for op in OPS}
MESSAGE_OPS = frozenset(op.name for op in OPS if op.is_message)

__all__ = ["MESSAGE_OPS", "OP_NUMBERS", "TRAITS"]
__all__ += [name for name in dir(_core_ext) if not name.startswith("_")]
