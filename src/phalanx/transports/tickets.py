"""One rank's side of a call or message where ranks are threads."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from phalanx import _native
from phalanx.transports.signatures import Facts, facts_of
from phalanx.types import Call

__all__ = ["Ticket", "misfit_of_splits", "result_of"]


class Counting(Protocol):
    """Keeps the statistics of the rank (counting.py)."""

    def add(self, ticket: Ticket, *, finished: bool, now: float) -> None: ...


class Shared(Protocol):
    """What the ranks of a group share, as a ticket sees it."""

    @property
    def name(self) -> str: ...
    def owners_waited_for(self, ticket: Ticket) -> list[int]: ...
    def describe_refusals(self, ticket: Ticket) -> list[str]: ...


class Ticket:
    """From the moment it is handed over until it has ended."""

    __slots__ = (
        "call",
        "callbacks",
        "count",
        "counts",
        "dtype",
        "facts",
        "flags",
        "last_arriver",
        "made",
        "meeting",
        "met",
        "on_end",
        "op",
        "owner",
        "peer",
        "rank",
        "result",
        "seq",
        "size",
        "source",
        "tag",
        "tensor",
        "where",
    )

    def __init__(self, meeting: Shared, owner: int, rank: int, op: str) -> None:
        self.meeting = meeting
        self.owner = owner  # among all ranks
        self.rank = rank  # within the group
        self.op = op
        self.seq = 0
        self.result = _native.PENDING
        self.source = -1
        self.last_arriver = _native.NO_RANK  # of a collective for which all have come
        self.callbacks: list[Callable[[], None]] | None = None
        # Told whether it ended well.
        self.on_end: Callable[[bool], None] | None = None
        # For the statistics: when it was made, and when the last rank that it needs came; the bytes that it moves.
        self.counts: Counting | None = None
        self.made = 0.0
        self.met: float | None = None
        self.size = 0
        self.where = ""
        self.flags = 0
        # Of a collective.
        self.call: Call | None = None
        self.facts: Facts = ()
        # Of a message.
        self.peer = -1
        self.tag = 0
        self.tensor: torch.Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.count = 0

    @property
    def ended(self) -> bool:
        return self.result != _native.PENDING

    @property
    def kind(self) -> str:
        """Of a deadlock, if this is part of one."""
        return "JOIN" if self.op == "new_group" else "P2P" if self.op in ("send", "recv") else "ORDER"

    def describe(self) -> str:
        number = f", seq {self.seq}" if self.seq else ""
        tag = f", tag {self.tag}" if self.kind == "P2P" else ""
        return f"{self.op}{number}{tag}, group {self.meeting.name!r}"

    def waited_for(self) -> list[int]:
        """The ranks, among all, without which it can't end."""
        return self.meeting.owners_waited_for(self)

    def remarks(self) -> list[str]:
        """Lines about why those do not come without which it can't end."""
        return self.meeting.describe_refusals(self)

    def take_facts(self) -> None:
        """Of a collective that has its seq."""
        assert self.call is not None
        self.facts = facts_of(self.call, self.seq, self.where, self.flags)

    def set_result(self, result: int) -> None:
        """The hash of what the call before gave, if that is compared."""
        self.facts = (*self.facts[:7], result, *self.facts[8:])

    def agrees_with(self, other: Ticket, check: int) -> bool:
        """Whether the two calls fit together."""
        assert self.call is not None
        assert other.call is not None
        if _signature(self.call) != _signature(other.call):
            return False
        return check != _native.CHECK_FULL or self.has_shape_of(other)

    def has_shape_of(self, other: Ticket) -> bool:
        """Where both are known and ranks may not differ."""
        (listed, _, mine), (_, _, theirs) = self.facts[8], other.facts[8]
        return bool(listed or self.facts[5] < 0 or mine == theirs)


def _signature(call: Call) -> tuple[Any, ...]:
    return call.op, call.reduce_op, call.root, call.dtype, call.count, call.layout


def result_of(call: Call, rank: int) -> int:
    """A hash of what must be equal on all ranks when the call has ended; 0 for other ops."""
    if call.op not in ("all_reduce", "all_gather", "broadcast"):
        return 0
    blocks = call.inputs if call.op == "broadcast" and call.root == rank else call.outputs
    if blocks is None:
        return 0
    with torch.inference_mode():
        flat = [tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1) for tensor in blocks.tensors]
        return zlib.crc32(b"".join(bytes(tensor.view(torch.uint8).tolist()) for tensor in flat if tensor.numel()))


def misfit_of_splits(calls: Sequence[Call]) -> tuple[int, int, int, int] | None:
    """The first two ranks one of which sends what the other does not expect, and the bytes sent and expected."""
    if calls[0].op != "all_to_all":
        return None
    sent = [_block_sizes(call, inputs=True) for call in calls]
    expected = [_block_sizes(call, inputs=False) for call in calls]
    for sender, sizes in enumerate(sent):
        for receiver, size in enumerate(sizes):
            if size != expected[receiver][sender]:
                return sender, receiver, size, expected[receiver][sender]
    return None


def _block_sizes(call: Call, inputs: bool) -> list[int]:
    """Bytes of each block."""
    blocks = call.inputs if inputs else call.outputs
    assert blocks is not None
    width = blocks.tensors[0].element_size()
    if blocks.sizes is not None:
        return [size * width for size in blocks.sizes]
    if blocks.listed:
        each = len(blocks.tensors) // blocks.num
        tensors = [blocks.tensors[i * each : (i + 1) * each] for i in range(blocks.num)]
        return [sum(tensor.numel() for tensor in block) * width for block in tensors]
    return [sum(tensor.numel() for tensor in blocks.tensors) // blocks.num * width] * blocks.num
