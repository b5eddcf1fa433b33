"""One rank's side of a call or message where ranks are threads."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from phalanx import _native
from phalanx.transports.signatures import dtype_code, dtype_of, unlisted_dtype
from phalanx.types import Call

__all__ = ["Ticket", "result_of", "splits_of"]


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
        "_description",
        "_made_call",
        "call",
        "callbacks",
        "counts",
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
        # Of a call or message that is handed over.
        self._description: _native.Description | None = None
        # Of a collective, and, once it has its seq, as reports tell of it.
        self.call: Call | None = None
        self._made_call: _native.MadeCall | None = None
        # Of a message.
        self.peer = -1
        self.tag = 0
        self.tensor: torch.Tensor | None = None

    @property
    def ended(self) -> bool:
        return self.result != _native.PENDING

    @property
    def kind(self) -> str:
        """Of a deadlock, if this is part of one."""
        return "JOIN" if self.op == "new_group" else "P2P" if self.op in _native.MESSAGE_OPS else "ORDER"

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

    def describe_with(self, flags: int) -> None:
        """Of a call or message whose tensors are there."""
        if self.call is not None:
            self._description = self.call.description.with_flags(flags)
            return
        assert self.tensor is not None
        self._description = _native.Description(
            self.op,
            dtype=dtype_code(self.tensor.dtype),
            unlisted_dtype=unlisted_dtype(self.tensor.dtype),
            count=self.tensor.numel(),
            sizes=self.tensor.shape,
            peer=self.peer,
            tag=self.tag,
            flags=flags,
        )

    @property
    def description(self) -> _native.Description:
        assert self._description is not None
        return self._description

    @property
    def made_call(self) -> _native.MadeCall:
        assert self._made_call is not None
        return self._made_call

    def set_made(self, result: int = 0) -> None:
        """Of a collective that has its seq. `result` is the hash of what the call before gave, if that is compared."""
        self._made_call = _native.MadeCall(self.description, seq=self.seq, result=result, where=self.where)

    def agrees_with(self, other: Ticket, check: int) -> bool:
        """Whether the two calls fit together."""
        if not self.description.agrees_with(other.description):
            return False
        return check != _native.CHECK_FULL or self.has_shape_of(other)

    def has_shape_of(self, other: Ticket) -> bool:
        """Where ranks may not differ."""
        shape = self.description.shape
        return shape.may_differ or shape == other.description.shape

    def fits(self, received: Ticket) -> bool:
        """Whether a message has the dtype and number of elements that are received."""
        sent, expected = self.description, received.description
        return dtype_of(sent) == dtype_of(expected) and sent.count == expected.count


def _traits_of(call: Call) -> _native.OpTraits:
    return _native.OPS[_native.OP_NUMBERS[call.op]]


def result_of(call: Call) -> int:
    """A hash of what must be equal on all ranks when the call has ended; 0 for other ops."""
    # The root of a broadcast writes nothing.
    blocks = call.inputs if call.outputs is None else call.outputs
    if blocks is None or not _traits_of(call).shared_result:
        return 0
    with torch.inference_mode():
        flat = [tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1) for tensor in blocks.tensors]
        return zlib.crc32(b"".join(bytes(tensor.view(torch.uint8).tolist()) for tensor in flat if tensor.numel()))


def splits_of(calls: Sequence[Call]) -> _native.Splits | None:
    """The first two ranks one of which sends what the other does not expect."""
    if not _traits_of(calls[0]).exchanges_sizes:
        return None
    sent = [_block_sizes(call, inputs=True) for call in calls]
    expected = [_block_sizes(call, inputs=False) for call in calls]
    for sender, sizes in enumerate(sent):
        for receiver, size in enumerate(sizes):
            if size != expected[receiver][sender]:
                return _native.Splits(
                    sender=sender, receiver=receiver, bytes_sent=size, bytes_expected=expected[receiver][sender]
                )
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
