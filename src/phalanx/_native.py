"""The only importer of the native module, and the names of its numbers."""

from __future__ import annotations

from phalanx._core_ext import (
    ANY_SOURCE,
    MAX_RANKS,
    UNKNOWN_STATUS,
    Group,
    Peer,
    Pending,
    Segment,
    Tuning,
    affinity,
    close_completions,
    cpu_quota,
    kernel_variant,
    next_completion,
    own_identity,
    reduce_buffers,
    reduces,
    tuning_for,
    writable,
)

__all__ = [
    "ANY_SOURCE",
    "FAILED",
    "FAILURE_ABORTED",
    "FAILURE_LEFT",
    "FAILURE_LOST",
    "FAILURE_MESSAGE",
    "FAILURE_MISMATCH",
    "FAILURE_TIMEOUT",
    "FINISHED",
    "FORKED",
    "LEAVING_EXITING",
    "LEFT",
    "MAX_RANKS",
    "NESTED",
    "NOT_WRITABLE",
    "NO_MEMORY",
    "NO_SPACE",
    "OPS",
    "OP_NUMBERS",
    "PENDING",
    "UNKNOWN_STATUS",
    "WAS_BROKEN",
    "Group",
    "Peer",
    "Pending",
    "Segment",
    "Tuning",
    "affinity",
    "close_completions",
    "cpu_quota",
    "kernel_variant",
    "next_completion",
    "own_identity",
    "reduce_buffers",
    "reduces",
    "tuning_for",
    "writable",
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
    "send",
    "recv",
)
OP_NUMBERS = {name: number for number, name in enumerate(OPS)}
FAILURE_MISMATCH, FAILURE_TIMEOUT, FAILURE_ABORTED, FAILURE_LEFT, FAILURE_LOST, FAILURE_MESSAGE = range(1, 7)
LEAVING_EXITING = 2

# What became of a call, as in _core/ticket.hpp.
FINISHED, FAILED, WAS_BROKEN, FORKED, NESTED, LEFT, NO_MEMORY, PENDING, NO_SPACE, NOT_WRITABLE = range(10)
