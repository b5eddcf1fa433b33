"""The statistics of a rank that is a thread, by the clock of its scheduler."""

from __future__ import annotations

from phalanx.statistics import OpStatistics
from phalanx.transports.threads.in_flight import CallInFlight, InFlight, MessageInFlight

__all__ = ["Counts"]

_NOTHING = OpStatistics(0, 0, 0.0, 0.0)


class Counts:
    """The calls of one rank in one group. One thread writes at a time; any thread may read."""

    def __init__(self) -> None:
        self._by_op: dict[str, OpStatistics] = {}
        # When the last collective ended: the next one begins then, or when it is made.
        self._ended = 0.0

    def add_call(self, call: CallInFlight, *, finished: bool, now: float) -> None:
        """The call ends now."""
        began, self._ended = max(call.made, self._ended), now
        self._add(call, began, finished, now)

    def add_message(self, message: MessageInFlight, *, finished: bool, now: float) -> None:
        """The message ends now."""
        self._add(message, message.made, finished, now)

    def _add(self, ending: InFlight, began: float, finished: bool, now: float) -> None:
        met = now if ending.met is None else max(ending.met, began)
        before = self._by_op.get(ending.op, _NOTHING)
        # Replaced as a whole: a reader sees all of it or nothing.
        self._by_op[ending.op] = OpStatistics(
            before.calls + 1,
            before.bytes + (ending.num_bytes if finished else 0),
            before.waiting + (met - began),
            before.moving + (now - met),
        )

    def read(self) -> dict[str, OpStatistics]:
        return dict(self._by_op)
