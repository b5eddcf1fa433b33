"""Messages from rank to rank: what is sent, in which spellings, and how it must arrive.

What a message means needs no oracle: the receiver's tensor then holds what the sender's holds, bit for bit, and the
sender's is as it was; messages of the same sender, receiver and tag arrive in the order in which they were sent. Every
process draws the same messages, so that a receiver can make what it is due.
"""

from __future__ import annotations

import itertools
import random
import traceback
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from contract_cases import WITH_GRAD
from contract_data import ARRANGEMENTS, UNCOMMON, arrange, difference, values
from contract_pool import Member
from torch import Tensor

from phalanx.types import REDUCIBLE

__all__ = ["COUNTS", "DTYPES", "Message", "Side", "draw_message", "every_kind", "in_own_order", "pairs", "sides_of"]

DTYPES = (*REDUCIBLE, *UNCOMMON)
HIGHEST_TAG = 2**31 - 1
# Where a transport may change its ways, a byte less and more; and what has to be streamed.
EDGES = [edge + more for edge in (2 << 10, 64 << 10, 256 << 10) for more in (-1, 0, 1)]
STREAMED = [(3 << 20) + 5, 8 << 20]
# Element counts of messages of which many are in flight.
COUNTS = (0, 1, 2, 7, 255, 1037, 1037, 5003, 20_011, 70_001)
SENDS = ("send", "isend", "direct send")
RECEIVES = ("recv", "irecv", "direct recv", "recv any", "irecv any", "direct recv any")
T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """Ranks are those of the group. A complex tensor is the group's own business only where both sides are direct."""

    source: int
    target: int
    dtype: torch.dtype
    count: int
    tag: int = 0
    send: str = "isend"
    receive: str = "irecv"
    of: str = "flat"  # arrangement at the sender
    into: str = "flat"  # arrangement at the receiver
    inference: bool = False
    grad: bool = False
    seed: int = 0

    def sent(self) -> Tensor:
        return self._tensor(self.source, 0, self.of)

    def before(self) -> Tensor:
        """What the receiver has before the message comes."""
        return self._tensor(self.target, 100, self.into)

    def _tensor(self, rank: int, slot: int, arrangement: str) -> Tensor:
        with torch.inference_mode(self.inference):
            tensor = arrange(values(self.dtype, self.count, lane=rank, seed=self.seed + 31 * slot), arrangement)
            return tensor.requires_grad_() if self.grad else tensor


class Side:
    """One rank's side of a message. What it raises is kept for `problem`."""

    def __init__(self, member: Member, message: Message, spelling: str) -> None:
        self.message = message
        self.spelling = spelling
        self.work: Any = None
        self.sends = spelling in SENDS
        self.raised: str | None = None
        self._member = member
        self._source: int | None = None
        self._tensor = message.sent() if self.sends else message.before()

    def start(self) -> Side:
        """The spellings that block have come to their end when this returns."""
        try:
            with torch.inference_mode(self.message.inference):
                self._start(self._member, self.message, self._tensor, self._member.process_group)
        except Exception:
            self.raised = traceback.format_exc()
        return self

    def _start(self, member: Member, message: Message, tensor: Tensor, group: dist.ProcessGroup) -> None:
        tag = message.tag
        match self.spelling:
            case "send":
                # Global ranks, as most programs give them.
                dist.send(tensor, dist.get_global_rank(group, message.target), member.group, tag)
            case "isend":
                self.work = dist.isend(tensor, group=member.group, group_dst=message.target, tag=tag)
            case "direct send":
                self.work = group.send([tensor], message.target, tag)
            case "recv":
                source = dist.get_global_rank(group, message.source)
                self._source = dist.get_group_rank(group, dist.recv(tensor, source, member.group, tag))
            case "irecv":
                self.work = dist.irecv(tensor, group=member.group, group_src=message.source, tag=tag)
            case "direct recv":
                self.work = group.recv([tensor], message.source, tag)
            case "recv any":
                self._source = dist.get_group_rank(group, dist.recv(tensor, group=member.group, tag=tag))
            case "irecv any":
                self.work = dist.irecv(tensor, group=member.group, tag=tag)
            case "direct recv any":
                self.work = group.recv_anysource([tensor], tag)

    def as_op(self) -> dist.P2POp:
        """The side as a part of a batch."""
        peer = self.message.target if self.sends else self.message.source
        function = dist.isend if self.sends else dist.irecv
        return dist.P2POp(function, self._tensor, group=self._member.group, tag=self.message.tag, group_peer=peer)

    def wait(self) -> None:
        if self.work is None:
            return
        try:
            if not self.work.wait() or not self.work.is_completed():
                self.raised = "wait() came back before the end"
            elif self.spelling in ("irecv any", "direct recv any"):
                self._source = self.work._source_rank()
        except Exception:
            self.raised = traceback.format_exc()

    def problem(self) -> str | None:
        problem = self.raised
        if problem is None and self._source is not None and self._source != self.message.source:
            problem = f"it is said to be from rank {self._source}"
        if problem is None:
            with torch.inference_mode(self.message.inference):
                problem = difference(self._tensor, self.message.sent(), nan_is_nan=False)
        return None if problem is None else f"{self.spelling} of {self.message}\n    {problem}"


def sides_of(member: Member, messages: Sequence[Message]) -> tuple[list[Side], list[Side]]:
    """What this rank sends and what it receives, not yet started."""
    sends = [Side(member, message, message.send) for message in messages if message.source == member.rank]
    receives = [Side(member, message, message.receive) for message in messages if message.target == member.rank]
    return sends, receives


def pairs(size: int) -> list[tuple[int, int]]:
    return [(source, target) for source in range(size) for target in range(size) if source != target]


def draw_message(draw: random.Random, source: int, target: int, dtype: torch.dtype, count: int, seed: int) -> Message:
    """Of any arrangement in memory, and spelled so that many can be in flight."""
    inference = draw.random() < 0.15
    grad = not inference and dtype in WITH_GRAD and draw.random() < 0.15
    direct = draw.random() < 0.3
    # torch.distributed makes complex numbers real ones, which rules out lazy conjugation; and where torch conjugates
    # halves it changes some of the bits of NaNs.
    lazy_conj = direct and dtype in (torch.complex64, torch.complex128)
    lazy = not grad and (dtype in (torch.float32, torch.float64) or lazy_conj)
    arrangements = (*ARRANGEMENTS, "lazy") if lazy else ARRANGEMENTS
    return Message(
        source,
        target,
        dtype,
        count,
        send="direct send" if direct else "isend",
        receive="direct recv" if direct else "irecv",
        of=draw.choice(arrangements),
        into=draw.choice(arrangements),
        inference=inference,
        grad=grad,
        seed=seed,
    )


def every_kind(size: int) -> Iterator[Message]:
    """Every dtype, size range and spelling, between all pairs of ranks in turn."""
    draw = random.Random("every kind")
    work = [(dtype, count) for dtype in DTYPES for count in (0, 1, 1037)]
    for num_bytes in EDGES + STREAMED:
        dtypes = (torch.uint8, torch.float32, torch.bfloat16, torch.complex64, torch.int64)
        work += [(dtype, (num_bytes - 1) // dtype.itemsize + 1) for dtype in dtypes]
    for seed, ((dtype, count), (source, target)) in enumerate(zip(work, itertools.cycle(pairs(size)), strict=False)):
        message = draw_message(draw, source, target, dtype, count, seed)
        sends, receives = list(SENDS), list(RECEIVES)
        if dtype.is_complex:
            direct = message.send == "direct send"
            sends, receives = ([s for s in each if s.startswith("direct") == direct] for each in (sends, receives))
        receive = draw.choice(receives)
        # Others may be ahead: where anyone may be the sender nobody else uses the tag.
        tag = 1000 + seed if receive.endswith("any") else draw.choice((0, 1, 7, HIGHEST_TAG))
        yield replace(message, send=draw.choice(sends), receive=receive, tag=tag)


def in_own_order(draw: random.Random, items: Sequence[T], key: Callable[[T], Hashable]) -> list[T]:
    """Any order of the items that keeps the order of those with the same key."""
    queues: dict[Hashable, list[T]] = defaultdict(list)
    for item in reversed(items):
        queues[key(item)].append(item)
    keys = [key(item) for item in items]
    draw.shuffle(keys)
    return [queues[each].pop() for each in keys]
