"""Schedules: who chooses the next rank, and a short string for the choices that were made."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from random import Random
from typing import Protocol

__all__ = ["Policy", "RandomChoice", "Replay", "RoundRobin", "Trace", "decode", "encode"]


class Policy(Protocol):
    """Chooses who goes on.

    `at_calls`: also before each call of a rank, not only where one has to wait.
    """

    at_calls: bool

    def choose(self, ready: list[int]) -> int:
        """An index into the ranks that can go on, which are in the order in which they came to that."""


class RoundRobin:
    """Who has waited longest."""

    at_calls = False

    def choose(self, ready: list[int]) -> int:
        return 0


class RandomChoice:
    """Anybody."""

    at_calls = True

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, ready: list[int]) -> int:
        return self._random.randrange(len(ready))


class Replay:
    """The choices of an earlier run; after them, and where they can't be made, who has waited longest."""

    def __init__(self, choices: Sequence[int], at_calls: bool) -> None:
        self.at_calls = at_calls
        self._choices = choices
        self._next = 0

    def choose(self, ready: list[int]) -> int:
        index = self._choices[self._next] if self._next < len(self._choices) else 0
        self._next += 1
        return index if index < len(ready) else 0


class Trace:
    """What happened in a run: which rank came to which communication point, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str]] = []

    def add(self, rank: int, what: str) -> None:
        self.events.append((rank, what))

    def fingerprint(self) -> int:
        return zlib.crc32(repr(self.events).encode())

    def first_difference(self, other: Trace) -> str | None:
        """Where another run of the same program went another way."""
        for number, (one, two) in enumerate(zip(self.events, other.events, strict=False)):
            if one != two:
                return f"at event {number}: rank {one[0]} came to {one[1]}, then rank {two[0]} to {two[1]}"
        if len(self.events) != len(other.events):
            return f"{len(self.events)} events, then {len(other.events)}"
        return None


def encode(ranks: int, at_calls: bool, choices: Sequence[int], fingerprint: int) -> str:
    """The choices, and what they were made in, as a short string."""
    last = max((number for number, choice in enumerate(choices, 1) if choice), default=0)
    numbers = [2 * ranks + at_calls, fingerprint, len(choices), *choices[:last]]
    packed = zlib.compress(b"".join(map(_varint, numbers)), 9)
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(text: str) -> tuple[int, bool, list[int], int]:
    """What `encode` was given. Raises ValueError where it is no such string."""
    try:
        packed = zlib.decompress(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        numbers = _numbers(packed)
        ranks, fingerprint, num_choices, *choices = numbers
        if ranks < 2 or num_choices < len(choices):
            raise ValueError("numbers that make no sense")
    except (binascii.Error, zlib.error, ValueError, IndexError) as error:
        raise ValueError(f"expected a schedule as a failed run prints it, got {text!r} ({error})") from None
    return ranks // 2, bool(ranks % 2), choices + [0] * (num_choices - len(choices)), fingerprint


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
