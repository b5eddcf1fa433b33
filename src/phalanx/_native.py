"""The only importer of the native module, and the names of its numbers."""

from __future__ import annotations

from phalanx._core_ext import (
    MAX_RANKS,
    Group,
    Segment,
    Tuning,
    affinity,
    cpu_quota,
    kernel_variant,
    reduce_buffers,
    reduces,
    tuning_for,
)

__all__ = [
    "BUSY",
    "FAILED",
    "FAILURE_ABORTED",
    "FAILURE_LEFT",
    "FAILURE_MISMATCH",
    "FAILURE_TIMEOUT",
    "FINISHED",
    "FORKED",
    "LEFT",
    "MAX_RANKS",
    "NESTED",
    "NO_MEMORY",
    "OPS",
    "WAS_BROKEN",
    "Group",
    "Segment",
    "Tuning",
    "affinity",
    "cpu_quota",
    "kernel_variant",
    "reduce_buffers",
    "reduces",
    "tuning_for",
]

# By number, as in _core/layout.hpp.
OPS = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
)
FAILURE_MISMATCH, FAILURE_TIMEOUT, FAILURE_ABORTED, FAILURE_LEFT = 1, 2, 3, 4

# What Group.run returns.
FINISHED, FAILED, WAS_BROKEN, FORKED, NESTED, BUSY, LEFT, NO_MEMORY = range(8)
