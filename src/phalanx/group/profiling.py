"""Calls as ranges in torch's profiler, under the names that torch's own backends have there.

A range ends in the thread that began it, before the call of ours returns in which it began: torch's profiler crashes
where a range outlives it (decision 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from phalanx.group.torch_compat.tracing import ProfilerRange, is_profiling, not_traced
from phalanx.group.work import Work
from phalanx.transports.base import Pending

__all__ = ["call_range", "work_of"]


def call_range(op: str, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """A range for as long as the profiler is on."""
    return ProfilerRange(f"phalanx:{op}", list(inputs)) if is_profiling() else nullcontext()


def work_of(tensors: list[torch.Tensor], pending: Pending | None, source: int = -1) -> Work:
    """The work of a call that was begun."""
    kind = ProfiledWork if is_profiling() else Work
    return kind(tensors, pending, source)


@not_traced
class ProfiledWork(Work):
    """One whose waits are ranges, too."""

    def _wait(self, seconds: float | None, limit: float | None = None) -> bool:
        if self.pending is None:
            return True
        with ProfilerRange("phalanx:wait", []):
            return super()._wait(seconds, limit)
