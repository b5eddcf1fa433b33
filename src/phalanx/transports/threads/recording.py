"""The black box of a rank that is a thread: the same records as those of processes, in memory."""

from __future__ import annotations

from phalanx import _native
from phalanx.transports.recording import remember_group
from phalanx.transports.threads.in_flight import CallInFlight, InFlight, MessageInFlight, bytes_of
from phalanx.types import GroupInfo

__all__ = ["Recorder"]


class Recorder:
    """Writes the calls of one rank in one group."""

    def __init__(self, box: _native.BlackBox, info: GroupInfo, identity: str) -> None:
        self._box = box
        self._info = info
        self._identity = identity
        # Its name and description, and how the box knows it.
        self._texts = ("", "")
        self._group = 0

    def record_call(self, call: CallInFlight, timeout: float) -> None:
        """Of a call that has its seq and has not been handed over."""
        assert call.call is not None
        self._record(call, timeout, bytes_of(call.call.inputs), bytes_of(call.call.outputs))

    def record_message(self, message: MessageInFlight, timeout: float) -> None:
        """Of a message that has its number and has not been handed over."""
        sent, received = (message.num_bytes, 0) if message.sends else (0, message.num_bytes)
        self._record(message, timeout, sent, received)

    def _record(self, made: InFlight, timeout: float, sent: int, received: int) -> None:
        # torch tells a group its name after it was made.
        texts = (self._info.name, self._info.desc)
        if self._texts != texts:
            self._texts = texts
            self._group = remember_group(self._box, self._info, identity=self._identity)
        number = self._box.begin(
            self._group, made.description, bytes_in=sent, bytes_out=received, timeout=timeout, is_async=True
        )
        self._box.number(number, made.seq)
        self._box.start(number)
        made.recording = _Record(self._box, number)


class _Record:
    """The record of a call in flight."""

    __slots__ = ("_box", "_number")

    def __init__(self, box: _native.BlackBox, number: int) -> None:
        self._box = box
        self._number = number

    def end(self, *, well: bool, last_arriver: int, source: int) -> None:
        if source != _native.NO_RANK:
            self._box.came_from(self._number, source)
        self._box.end(self._number, well, last_arriver)
