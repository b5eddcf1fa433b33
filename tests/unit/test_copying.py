"""Which calls in flight a new call waits for, where its tensors share memory with their copies."""

from __future__ import annotations

import sys
from typing import Any

import torch

from phalanx.transports.pending import Copying


class _Call:
    """A collective in flight. Waiting for it ends those before it, too."""

    is_message = False

    def __init__(self, copying: Copying, written: torch.Tensor) -> None:
        self.copies = [(written, written.clone())]
        self.ended = False
        self._copying = copying

    def wait_and_finish(self) -> None:
        calls: list[Any] = self._copying.calls
        for call in calls[: calls.index(self) + 1]:
            call.ended = True
        self.finish()
        self._copying.forget(self)  # type: ignore[arg-type]

    def finish(self) -> None:
        pass


def test_a_call_that_needs_the_memory_of_more_copies_than_the_stack_is_deep() -> None:
    num = sys.getrecursionlimit() + 100
    matrix = torch.ones(2, num)
    copying = Copying()
    calls: list[Any] = copying.calls
    calls += [_Call(copying, matrix[:, column]) for column in range(num)]
    assert copying.make_way([matrix]) == []
    assert calls == []


def test_the_very_tensor_of_a_call_stands_for_its_copy() -> None:
    column = torch.ones(2, 3)[:, 0]
    copying = Copying()
    calls: list[Any] = copying.calls
    calls.append(_Call(copying, column))
    ((tensor, copy),) = copying.make_way([column])
    assert tensor is column
    assert copy is calls[0].copies[0][1]
