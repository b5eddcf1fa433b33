"""Schedules: who chooses the next rank, and a short string for the choices that were made."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

from phalanx.types import REDUCE_OP_NAMES

__all__ = ["Policy", "RandomChoice", "Recorded", "Replay", "RoundRobin", "Trace", "decode"]


class Policy(Protocol):
    """Chooses who goes on.

    `at_calls`: also before each call of a rank, not only where one has to wait.
    """

    at_calls: bool

    def choose(self, num_ready: int) -> int:
        """An index into the threads that can go on, which are in the order in which they became ready."""


class RoundRobin:
    """Who has waited longest."""

    at_calls = False

    def choose(self, num_ready: int) -> int:
        return 0


class RandomChoice:
    """Anybody."""

    at_calls = True

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, num_ready: int) -> int:
        return self._random.randrange(num_ready)


class Replay:
    """The choices of an earlier run; after them, and where they can't be made, who has waited longest."""

    def __init__(self, choices: Sequence[int], at_calls: bool) -> None:
        self.at_calls = at_calls
        self._choices = choices
        self._next = 0

    def choose(self, num_ready: int) -> int:
        index = self._choices[self._next] if self._next < len(self._choices) else 0
        self._next += 1
        return index if index < num_ready else 0


class Trace:
    """What happened in a run: which rank came to which communication point, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[int, tuple[Any, ...]]] = []

    def add(self, rank: int, what: tuple[Any, ...]) -> None:
        self.events.append((rank, what))

    def fingerprint(self) -> int:
        return zlib.crc32(repr(self.events).encode())

    def first_difference(self, other: Trace) -> str | None:
        """Where another run of the same program went another way."""
        for number, (one, two) in enumerate(zip(self.events, other.events, strict=False)):
            if one != two:
                return f"at event {number}: {_event(*one)}, then {_event(*two)}"
        if len(self.events) != len(other.events):
            longer = max(self.events, other.events, key=len)
            common = min(len(self.events), len(other.events))
            return f"{len(self.events)} events, then {len(other.events)}: {_event(*longer[common])} in one of them only"
        return None


def _event(rank: int, what: tuple[Any, ...]) -> str:
    op, group, *rest, dtype, count = what
    names = ("peer", "tag") if op in ("send", "recv") else ("root", "reduce op")
    texts = [REDUCE_OP_NAMES[value] if name == "reduce op" else value for name, value in zip(names, rest, strict=True)]
    more = "".join(f", {name} {text}" for name, text, value in zip(names, texts, rest, strict=True) if value >= 0)
    return f"rank {rank} came to {op} in group {group!r} ({count} elements of {dtype}{more})"


class Recorded(NamedTuple):
    """The choices that were made in a run, and what they were made in."""

    ranks: int
    at_calls: bool
    choices: list[int]
    fingerprint: int

    def encode(self) -> str:
        """As a short string."""
        last = max((number for number, choice in enumerate(self.choices, 1) if choice), default=0)
        numbers = [2 * self.ranks + self.at_calls, self.fingerprint, len(self.choices), *self.choices[:last]]
        packed = zlib.compress(b"".join(map(_varint, numbers)), 9)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(text: str) -> Recorded:
    """What was encoded. Raises ValueError where it is no such string."""
    try:
        packed = zlib.decompress(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        numbers = _numbers(packed)
        ranks, fingerprint, num_choices, *choices = numbers
        if ranks < 2 or num_choices < len(choices):
            raise ValueError("numbers that make no sense")
    except (binascii.Error, zlib.error, ValueError, IndexError) as error:
        raise ValueError(f"expected a schedule as a failed run prints it, got {text!r} ({error})") from None
    return Recorded(ranks // 2, bool(ranks % 2), choices + [0] * (num_choices - len(choices)), fingerprint)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _numbers(packed: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number, shift = 0, 0
    return numbers
