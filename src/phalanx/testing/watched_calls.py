"""The calls of a rank that is a process, as the process that runs the tests sees them, and faults that happen to them.

Two parts, because they may do different things:

- `CallCounts` is an observer: it is told of calls and counts them, in memory that all processes of a run share. It
  can't disturb a call.
- `FaultyTransport` is around the rank's transport: a fault happens before a call, and may raise, delay the call, or
  kill the process. An observer could not do that: what it raises never reaches the program.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from phalanx.testing.faults import Fault, let_happen
from phalanx.transports.base import Pending, Transport
from phalanx.transports.observers import Observer
from phalanx.transports.wrapping import TransportAround
from phalanx.types import Call, GroupInfo

__all__ = ["CallCounts", "Faults", "SharedCounts"]

# Seconds after which a deliberately delayed rank reports progress.
_BETWEEN_STEPS = 0.1


class SharedCounts:
    """How many times each rank entered a call or returned from one: odd while it is inside."""

    def __init__(self, folder: str, ranks: int) -> None:
        path = Path(folder, "progress")
        if not path.exists():
            path.write_bytes(bytes(8 * ranks))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * ranks)
        self._ranks = ranks

    def add(self, rank: int) -> None:
        (count,) = struct.unpack_from("q", self._memory, 8 * rank)
        struct.pack_into("q", self._memory, 8 * rank, count + 1)

    def read(self) -> tuple[int, ...]:
        return struct.unpack(f"{self._ranks}q", self._memory[:])


class CallCounts(Observer):
    """Counts the calls of a rank."""

    wants_calls = True

    def __init__(self, counts: SharedCounts, rank: int) -> None:
        self._counts = counts
        self._rank = rank

    def call_began(self, info: GroupInfo, op: str) -> None:
        self._counts.add(self._rank)

    def call_ended(self, info: GroupInfo, op: str) -> None:
        self._counts.add(self._rank)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """For a rank that is not stuck although it is in no call."""
        self._counts.add(self._rank)
        try:
            yield
        finally:
            self._counts.add(self._rank)


class Faults:
    """What happens to a rank, by the number of its call over all its groups, counted from 1."""

    def __init__(self, counts: CallCounts) -> None:
        self._counts = counts
        self.by_call: dict[int, list[Fault]] = {}
        self.num_calls = 0

    def wrap(self, transport: Transport, info: GroupInfo) -> Transport:
        return FaultyTransport(transport, self).as_transport()

    def come_to_call(self) -> None:
        self.num_calls += 1
        let_happen(self.by_call.get(self.num_calls, ()), self._sleep, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            with self._counts.inside():
                time.sleep(min(left, _BETWEEN_STEPS))


class FaultyTransport(TransportAround):
    """A transport to whose calls faults happen."""

    def __init__(self, transport: Transport, faults: Faults) -> None:
        super().__init__(transport)
        self._faults = faults

    def run(self, call: Call, timeout: float) -> None:
        self._faults.come_to_call()
        self._transport.run(call, timeout)

    def start(self, call: Call, timeout: float) -> Pending | None:
        self._faults.come_to_call()
        return self._transport.start(call, timeout)

    def start_message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float) -> Pending | None:
        self._faults.come_to_call()
        return self._transport.start_message(sends, tensor, peer, tag, timeout)
