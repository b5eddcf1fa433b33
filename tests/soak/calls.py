"""Calls whose results every rank can work out on its own, sync and async. ops.py has the ops.

What a rank puts into a call depends only on (salt, rank, block), so that a peer knows it without being told, and two
calls with salts next to each other never hold the same data: a stale, misplaced or torn result is seen.

A call has three stages: `start` issues it (sync calls are then over), `wait` ends an async one, `check` compares.
Programs of calls can't deadlock if all ranks have them in one order: the first unfinished one always has everybody it
needs on the way, in whatever order ranks wait for the async ones before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Pairs = list[tuple[torch.Tensor, torch.Tensor]]

_patterns: dict[torch.dtype, torch.Tensor] = {}

_SUMS = ("SUM", "MAX", "MIN", "PRODUCT")
_REDUCE_OPS = {
    torch.uint8: (*_SUMS, "BAND", "BOR", "BXOR"),
    torch.int64: (*_SUMS, "BAND", "BOR", "BXOR"),
    torch.bfloat16: (*_SUMS, "AVG"),
    torch.float32: (*_SUMS, "AVG"),
    torch.float64: (*_SUMS, "AVG"),
}
DTYPES = tuple(_REDUCE_OPS)


class WrongDataError(AssertionError):
    """A call ended well and yet holds something else than it must."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a group. `ranks` are global, `me` is the index of this one."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    me: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class What:
    """What a call does. `choice` picks the reduce op, the root or the two ends; `tag` is for point to point."""

    op: str
    count: int
    dtype: torch.dtype
    salt: int
    choice: int
    tag: int
    async_op: bool

    def ends(self, size: int) -> tuple[int, int]:
        """Who sends and who receives, as ranks of the group."""
        source = self.choice % size
        return source, (source + 1 + self.choice // size % (size - 1)) % size

    def members(self, size: int) -> tuple[int, ...]:
        """Who takes part, as ranks of the group."""
        return self.ends(size) if self.op in ("send", "any_source", "exchange") else tuple(range(size))


class Call:
    """One rank's side of one op. It holds the tensors until it is dropped."""

    __slots__ = ("_pairs", "_start", "_works", "what")

    def __init__(self, what: What, start: Callable[[], Sequence[Any]], pairs: Callable[[], Pairs]) -> None:
        self.what = what
        self._start = start
        self._pairs = pairs
        self._works: Sequence[Any] = ()

    def start(self) -> None:
        self._works = self._start()
        if not self.what.async_op:
            self.wait()

    def wait(self, *, by_future: bool = False) -> None:
        for work in self._works:
            if by_future and hasattr(work, "get_future"):
                work.get_future().wait()
            work.wait()
        self._works = ()

    def check(self) -> None:
        for got, wanted in self._pairs():
            if not torch.equal(got, wanted):
                wrong = (got != wanted).nonzero().flatten()
                at = int(wrong[0])
                raise WrongDataError(
                    f"{self.what}: {len(wrong)} of {wanted.numel()} elements are wrong, the first at {at}: "
                    f"expected {wanted[at].item()}, got {got[at].item()}"
                )


def _pattern(count: int, dtype: torch.dtype) -> torch.Tensor:
    longest = _patterns.get(dtype)
    if longest is None or longest.numel() < count:
        longest = _patterns[dtype] = (torch.arange(count) % 7).to(dtype)
    return longest[:count]


def data(what: What, rank: int, block: int = 0, count: int | None = None) -> torch.Tensor:
    """A tensor that nobody else has: of this rank, for this block. Sums of a few stay below what bfloat16 can hold."""
    value = (5 * what.salt + 3 * rank + 13 * block) % 61
    return _pattern(what.count if count is None else count, what.dtype) + value


def blank(what: What, count: int | None = None) -> torch.Tensor:
    return torch.full((what.count if count is None else count,), 101, dtype=what.dtype)


def reduce_op(what: What) -> Any:
    names = _REDUCE_OPS[what.dtype]
    return getattr(dist.ReduceOp, names[what.choice % len(names)])


def reduced(what: What, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """In rank order; bfloat16 is summed up in float32 and rounded once."""
    op = reduce_op(what)
    steps: dict[Any, Callable[..., torch.Tensor]] = {
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.PRODUCT: torch.mul,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }
    wide = [tensor.float() if what.dtype is torch.bfloat16 else tensor for tensor in inputs]
    total = functools.reduce(steps.get(op, torch.add), wide)
    return (total / len(inputs) if op == dist.ReduceOp.AVG else total).to(what.dtype)
