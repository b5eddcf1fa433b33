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
    Statistics,
    Tuning,
    affinity,
    answer,
    begin_making,
    close_completions,
    close_listener,
    cpu_quota,
    end_making,
    kernel_variant,
    leave_completions,
    look_for_deaths,
    next_completion,
    next_question,
    origin,
    own_identity,
    own_program,
    progress_error,
    push_completion,
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
    "LEAVING_REPLACED",
    "LEFT",
    "MAKING",
    "MAX_RANKS",
    "NESTED",
    "NOT_WRITABLE",
    "NO_MEMORY",
    "NO_SPACE",
    "OPS",
    "OP_NUMBERS",
    "PENDING",
    "REST_MOVING",
    "REST_NOTHING",
    "REST_WAITING",
    "UNKNOWN_STATUS",
    "WAS_BROKEN",
    "BlackBox",
    "Group",
    "Peer",
    "Pending",
    "Segment",
    "Statistics",
    "Tuning",
    "affinity",
    "answer",
    "begin_making",
    "close_completions",
    "close_listener",
    "cpu_quota",
    "end_making",
    "kernel_variant",
    "leave_completions",
    "look_for_deaths",
    "next_completion",
    "next_question",
    "origin",
    "own_identity",
    "own_program",
    "progress_error",
    "push_completion",
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
    "split_group",
    "merge_remote_group",
)
OP_NUMBERS = {name: number for number, name in enumerate(OPS)}
# In place of an op, in records of black boxes: the making of a group (_core/black_box.hpp).
MAKING = 255
FAILURE_MISMATCH, FAILURE_TIMEOUT, FAILURE_ABORTED, FAILURE_LEFT, FAILURE_LOST, FAILURE_MESSAGE = range(1, 7)
LEAVING_EXITING, LEAVING_REPLACED = 2, 3
# What is left of a group's calls in flight, as in _core/lane.hpp.
REST_NOTHING, REST_MOVING, REST_WAITING = range(3)
CHECK_OFF, CHECK_ON, CHECK_FULL = range(3)
# Of a call's flags, as in _core/location.hpp.
IN_BACKWARD, BY_REDUCER = 2, 4

# What became of a call, as in _core/ticket.hpp.
FINISHED, FAILED, WAS_BROKEN, FORKED, NESTED, LEFT, NO_MEMORY, PENDING, NO_SPACE, NOT_WRITABLE = range(10)
