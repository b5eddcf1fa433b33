"""The black box of a rank that is a thread: the same records as those of processes, in memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from phalanx import _native
from phalanx.transports.tickets import Ticket
from phalanx.types import Blocks, GroupInfo

__all__ = ["Recorder", "remember_group"]


def remember_group(box: _native.BlackBox, info: GroupInfo, *, identity: str = "", place: str = "") -> int:
    """The group in the box, for its records.

    No other group of the job has this identity. A group that is being made has none yet, and a place where its ranks
    meet.
    """
    return box.remember_group(
        info.name, info.rank, _runs_of(info.job_ranks), description=info.desc, identity=identity, place=place
    )


def _runs_of(ranks: Iterable[int]) -> str:
    """Numbers that follow each other are one run, "4-7": a box has little room."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class Recorder:
    """Writes the calls of one rank in one group."""

    def __init__(self, box: _native.BlackBox, info: GroupInfo, identity: str) -> None:
        self._box = box
        self._info = info
        self._identity = identity
        # Its name and description, and how the box knows it.
        self._texts = ("", "")
        self._group = 0

    def record(self, ticket: Ticket, timeout: float) -> None:
        """Of a ticket that has its seq and has not been handed over."""
        # torch tells a group its name after it was made.
        texts = (self._info.name, self._info.desc)
        if self._texts != texts:
            self._texts = texts
            self._group = remember_group(self._box, self._info, identity=self._identity)
        call = ticket.call
        sent, received = (_bytes_of(call.inputs), _bytes_of(call.outputs)) if call is not None else _moved(ticket)
        number = self._box.begin(
            self._group, ticket.description, bytes_in=sent, bytes_out=received, timeout=timeout, is_async=True
        )
        self._box.number(number, ticket.seq)
        self._box.start(number)
        ticket.on_end = partial(self._end, ticket, number)

    def _end(self, ticket: Ticket, number: int, well: bool) -> None:
        if ticket.call is None and ticket.peer == _native.ANY_SOURCE and ticket.source != _native.NO_RANK:
            self._box.came_from(number, ticket.source)
        self._box.end(number, well, ticket.last_arriver)


def _moved(ticket: Ticket) -> tuple[int, int]:
    """Bytes that a message sends and receives."""
    assert ticket.tensor is not None
    return (ticket.tensor.nbytes, 0) if ticket.op == "send" else (0, ticket.tensor.nbytes)


def _bytes_of(blocks: Blocks | None) -> int:
    return 0 if blocks is None else sum(tensor.nbytes for tensor in blocks.tensors)
