"""What a rank waits for: the making of a group, a call, or a message."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from phalanx import _native
from phalanx.transports.base import Scheduler
from phalanx.transports.signatures import dtype_code, unlisted_dtype
from phalanx.types import Blocks, Call, GroupInfo

__all__ = ["Awaited", "CallInFlight", "InFlight", "Joining", "MessageInFlight", "bytes_of"]

_ANY_SOURCE = _native.ANY_SOURCE


class Counting(Protocol):
    """Keeps the statistics of a rank (counting.py)."""

    def add_call(self, call: CallInFlight, *, finished: bool, now: float) -> None: ...
    def add_message(self, message: MessageInFlight, *, finished: bool, now: float) -> None: ...


class Recording(Protocol):
    """Marks the record of a call in a black box (recording.py)."""

    def end(self, *, well: bool, last_arriver: int, source: int) -> None: ...


class Shared(Protocol):
    """What the ranks of a group share (hub.py)."""

    info: GroupInfo
    size: int
    scheduler: Scheduler

    def owners_of(self, ranks: Sequence[int]) -> list[int]: ...
    def missing_to_make(self) -> list[int]: ...
    def missing_from(self, seq: int) -> list[int]: ...
    def describe_refusals(self, in_flight: InFlight) -> list[str]: ...


class Awaited(abc.ABC):
    """Something that a rank waits for, until it has ended."""

    __slots__ = ("callbacks", "hub", "op", "owner", "rank", "result", "seq")

    # Of a deadlock, if this is part of one.
    kind: str

    def __init__(self, hub: Shared, owner: int, rank: int, op: str) -> None:
        self.hub = hub
        self.owner = owner  # among the ranks of the run
        self.rank = rank  # within the group
        self.op = op
        self.seq = 0
        self.result = _native.PENDING
        self.callbacks: list[Callable[[], None]] | None = None

    @property
    def ended(self) -> bool:
        return self.result != _native.PENDING

    @abc.abstractmethod
    def missing(self) -> list[int]:
        """The ranks of the group without which it can't end."""

    def describe(self) -> str:
        number = f", seq {self.seq}" if self.seq else ""
        return f"{self.op}{number}, group {self.hub.info.name!r}"

    def waited_for(self) -> list[int]:
        """The ranks of the run without which it can't end."""
        return self.hub.owners_of(self.missing())

    def remarks(self) -> list[str]:
        """Lines about why these ranks do not come."""
        return []

    def end(self, result: int) -> None:
        """Wakes the rank if it waits, and has its callbacks called. No-op once it has ended."""
        if self.ended:
            return
        self._note_end(result)
        scheduler = self.hub.scheduler
        scheduler.wake(self)
        callbacks, self.callbacks = self.callbacks, None
        for callback in callbacks or ():
            scheduler.call_as(self.owner, callback)

    def _note_end(self, result: int) -> None:
        self.result = result


class Joining(Awaited):
    """A rank that has come to make a group."""

    __slots__ = ()

    kind = "JOIN"

    def __init__(self, hub: Shared, owner: int, rank: int) -> None:
        super().__init__(hub, owner, rank, "new_group")

    def missing(self) -> list[int]:
        return self.hub.missing_to_make()


class InFlight(Awaited):
    """A call or message that was handed over."""

    __slots__ = ("counts", "description", "made", "met", "num_bytes", "recording", "where")

    def __init__(
        self, hub: Shared, owner: int, rank: int, description: _native.Description, where: str, num_bytes: int
    ) -> None:
        super().__init__(hub, owner, rank, description.op)
        self.description = description
        self.where = where  # in the program
        # For the statistics: when it was made, and when the last rank that it needs came; the bytes that it moves.
        self.counts: Counting | None = None
        self.made = 0.0
        self.met: float | None = None
        self.num_bytes = num_bytes
        self.recording: Recording | None = None

    @abc.abstractmethod
    def can_end_without(self, gone: Sequence[int]) -> bool:
        """Whether it can end although these ranks, of those that it needs, make no further call."""

    def remarks(self) -> list[str]:
        return self.hub.describe_refusals(self)


class CallInFlight(InFlight):
    """One rank's side of a collective."""

    __slots__ = ("call", "last_arriver")

    kind = "ORDER"

    def __init__(self, hub: Shared, owner: int, rank: int, call: Call) -> None:
        where, flags = _native.origin()
        num_bytes = max(bytes_of(call.inputs), bytes_of(call.outputs))
        super().__init__(hub, owner, rank, call.description.with_flags(flags), where, num_bytes)
        # None once it has ended.
        self.call: Call | None = call
        self.last_arriver = _native.NO_RANK

    def missing(self) -> list[int]:
        return self.hub.missing_from(self.seq)

    def can_end_without(self, gone: Sequence[int]) -> bool:
        return not gone

    def _note_end(self, result: int) -> None:
        finished = result == _native.FINISHED
        if self.counts is not None:
            self.counts.add_call(self, finished=finished, now=self.hub.scheduler.now())
        self.result = result
        self.call = None
        if self.recording is not None:
            self.recording.end(well=finished, last_arriver=self.last_arriver, source=_native.NO_RANK)


class MessageInFlight(InFlight):
    """One rank's side of a message."""

    __slots__ = ("peer", "source", "tag", "tensor")

    kind = "P2P"

    def __init__(
        self, hub: Shared, owner: int, rank: int, *, sends: bool, tensor: torch.Tensor, peer: int, tag: int
    ) -> None:
        where, flags = _native.origin()
        description = _native.Description(
            "send" if sends else "recv",
            dtype=dtype_code(tensor.dtype),
            unlisted_dtype=unlisted_dtype(tensor.dtype),
            count=tensor.numel(),
            sizes=tensor.shape,
            peer=peer,
            tag=tag,
            flags=flags,
        )
        super().__init__(hub, owner, rank, description, where, tensor.nbytes)
        self.tensor = tensor
        self.peer = peer
        self.tag = tag
        # The sender of a message that was received.
        self.source = _native.NO_RANK

    @property
    def sends(self) -> bool:
        return self.op == "send"

    def missing(self) -> list[int]:
        return [self.peer] if self.peer != _ANY_SOURCE else [rank for rank in range(self.hub.size) if rank != self.rank]

    def can_end_without(self, gone: Sequence[int]) -> bool:
        return len(gone) < (1 if self.peer != _ANY_SOURCE else self.hub.size - 1)

    def describe(self) -> str:
        return f"{self.op}, seq {self.seq}, tag {self.tag}, group {self.hub.info.name!r}"

    def _note_end(self, result: int) -> None:
        finished = result == _native.FINISHED
        if self.counts is not None:
            self.counts.add_message(self, finished=finished, now=self.hub.scheduler.now())
        self.result = result
        if self.recording is not None:
            source = self.source if self.peer == _ANY_SOURCE else _native.NO_RANK
            self.recording.end(well=finished, last_arriver=_native.NO_RANK, source=source)


def bytes_of(blocks: Blocks | None) -> int:
    return 0 if blocks is None else sum(tensor.nbytes for tensor in blocks.tensors)
