"""Calls as ranges in torch's profiler, under the names that torch's own backends have there.

A range ends in the thread that began it, before the call of ours returns in which it began: torch's profiler crashes
where a range outlives it (decision 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from phalanx.group.torch_compat import ProfilerRange, not_traced
from phalanx.group.work import Work

__all__ = ["ProfiledWork", "call_range"]


def call_range(op: str, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    return ProfilerRange(f"phalanx:{op}", list(inputs))


@not_traced
class ProfiledWork(Work):
    """One whose waits are ranges, too."""

    def _wait(self, seconds: float | None, limit: float | None = None) -> bool:
        if self.pending is None:
            return True
        with call_range("wait", []):
            return super()._wait(seconds, limit)
