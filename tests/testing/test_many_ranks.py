"""What a rank costs does not grow with the number of ranks."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import phalanx.testing as pt


def _reduce_often(rank: int, world: pt.World) -> None:
    for _ in range(10):
        dist.all_reduce(torch.ones(256))


def _bytecodes_per_rank(ranks: int) -> float:
    """How many Python carries out. Unlike times they are the same on every machine."""
    num = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num
        num += event == "opcode"
        return count

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count

    before = threading.gettrace()
    threading.settrace(begin)
    try:
        pt.run(_reduce_often, ranks)
    finally:
        threading.settrace(before)
    return num / ranks


def test_a_rank_does_not_look_at_all_others() -> None:
    # The first run loads code.
    pt.run(_reduce_often, 2)
    assert _bytecodes_per_rank(64) < 1.05 * _bytecodes_per_rank(8)
