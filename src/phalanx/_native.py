"""The only importer of the native module, and the names of its numbers."""

from __future__ import annotations

from phalanx._core_ext import (
    ANY_SOURCE,
    MAX_RANKS,
    UNKNOWN_STATUS,
    BlackBox,
    Group,
    Peer,
    Pending,
    Segment,
    Tuning,
    affinity,
    answer,
    close_completions,
    close_listener,
    cpu_quota,
    kernel_variant,
    next_completion,
    next_question,
    origin,
    own_identity,
    reduce_buffers,
    reduces,
    set_folders,
    set_slow,
    tuning_for,
    writable,
)

__all__ = [
    "ANY_SOURCE",
    "BY_REDUCER",
    "CHECK_FULL",
    "CHECK_OFF",
    "CHECK_ON",
    "FAILED",
    "FAILURE_ABORTED",
    "FAILURE_LEFT",
    "FAILURE_LOST",
    "FAILURE_MESSAGE",
    "FAILURE_MISMATCH",
    "FAILURE_TIMEOUT",
    "FINISHED",
    "FORKED",
    "IN_BACKWARD",
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
    "BlackBox",
    "Group",
    "Peer",
    "Pending",
    "Segment",
    "Tuning",
    "affinity",
    "answer",
    "close_completions",
    "close_listener",
    "cpu_quota",
    "kernel_variant",
    "next_completion",
    "next_question",
    "origin",
    "own_identity",
    "reduce_buffers",
    "reduces",
    "set_folders",
    "set_slow",
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
CHECK_OFF, CHECK_ON, CHECK_FULL = range(3)
# Of a call's flags, as in _core/location.hpp.
IN_BACKWARD, BY_REDUCER = 2, 4

# What became of a call, as in _core/ticket.hpp.
FINISHED, FAILED, WAS_BROKEN, FORKED, NESTED, LEFT, NO_MEMORY, PENDING, NO_SPACE, NOT_WRITABLE = range(10)
