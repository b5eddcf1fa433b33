"""The statistics of a rank that is a thread, by the clock of its scheduler."""

from __future__ import annotations

from phalanx.statistics import OpStatistics
from phalanx.transports.tickets import Ticket
from phalanx.types import Blocks

__all__ = ["Counts", "size_of"]

_NOTHING = OpStatistics(0, 0, 0.0, 0.0)


class Counts:
    """The calls of one rank in one group. One thread writes at a time; any thread may read."""

    def __init__(self) -> None:
        self._by_op: dict[str, OpStatistics] = {}
        # When the last collective ended: the next one begins then, or when it is made.
        self._ended = 0.0

    def add(self, ticket: Ticket, *, finished: bool, now: float) -> None:
        """The ticket ends now."""
        began = ticket.made
        if ticket.call is not None:
            began, self._ended = max(began, self._ended), now
        met = now if ticket.met is None else max(ticket.met, began)
        before = self._by_op.get(ticket.op, _NOTHING)
        # Replaced as a whole: a reader sees all of it or nothing.
        self._by_op[ticket.op] = OpStatistics(
            before.calls + 1,
            before.bytes + (ticket.size if finished else 0),
            before.waiting + (met - began),
            before.moving + (now - met),
        )

    def read(self) -> dict[str, OpStatistics]:
        return dict(self._by_op)


def size_of(ticket: Ticket) -> int:
    """Bytes of what the rank gives or gets, whichever is more."""
    if ticket.call is not None:
        return max(_size(ticket.call.inputs), _size(ticket.call.outputs))
    assert ticket.tensor is not None
    return ticket.tensor.nbytes


def _size(blocks: Blocks | None) -> int:
    return 0 if blocks is None else sum(tensor.nbytes for tensor in blocks.tensors)
