"""Calls as ranges in torch's profiler, under the names that torch's own backends have there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
from torch.profiler import record_function

from phalanx.group.torch_compat import ProfilerRange, end_with, not_traced
from phalanx.group.work import NO_TIMEOUT, Work
from phalanx.transports.base import Pending

__all__ = ["call_range", "start_in_range"]

# Seconds for the last steps of a thread that has seen that the call has ended.
_PATIENCE = 1.0


def call_range(op: str, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """The range of a call that ends before it returns."""
    return ProfilerRange(f"phalanx:{op}", list(inputs))


def start_in_range(
    op: str, inputs: Sequence[torch.Tensor], start: Callable[[], Pending | None], results: list[torch.Tensor], peer: int
) -> Work:
    """What `start` begins, as a Work whose range lasts until the call has ended, wherever that is noticed.

    torch takes no tensors for such a range: the shapes are among its arguments.
    """
    span = record_function(f"phalanx:{op}", ", ".join(str(list(tensor.shape)) for tensor in inputs))
    with span:
        return _WorkInRange(results, start(), peer, span)


@not_traced
class _WorkInRange(Work):
    def __init__(
        self, tensors: list[torch.Tensor], pending: Pending | None, source: int, span: record_function
    ) -> None:
        super().__init__(tensors, pending, source)
        over = self._over = threading.Event()
        end_with(span, self.get_future()).add_done_callback(lambda _: over.set())

    def wait(self, timeout: timedelta = NO_TIMEOUT, limit: float | None = None) -> bool:
        pending = self._pending
        try:
            return super().wait(timeout, limit)
        finally:
            # Whoever waited may stop the profiler next.
            if pending is None or pending.ended:
                self._over.wait(_PATIENCE)
