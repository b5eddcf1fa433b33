"""What ranks tell each other while they make a group, through a store or a group that they have, and how it is read.

Anybody may write to a store: another job, another program on the same port, another version of Phalanx. Nothing from it
is used before it has been read here: each value becomes a dataclass whose fields have the right types and ranges, or
`UnreadableError` is raised.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

from phalanx import _native
from phalanx.phrases import runs_of
from phalanx.transports import levels
from phalanx.transports.identities import Identity
from phalanx.types import GroupInfo

__all__ = [
    "PROTOCOL",
    "Arrival",
    "Departure",
    "GivenUp",
    "Hello",
    "Merger",
    "Note",
    "Offer",
    "Opening",
    "Proposal",
    "UnreadableError",
    "Wish",
    "count_of",
    "key_of_ranks",
    "quoted",
    "read_arrival_or_departure",
]

# Changes with the keys and with what is under them.
PROTOCOL = 6
_LONGEST_KEY = 64
_LONGEST_TEXT = 65536
_MOST_NUMBERS = 65536


class UnreadableError(ValueError):
    """A value in the store is not what a rank of this version writes there."""


def quoted(name: str) -> str:
    """A name as one part of a key."""
    return quote(name, safe=" ")


def key_of_ranks(members: Sequence[int]) -> str:
    """The same for the same ranks in the same order: `0-3,7`, or a hash where that would be long."""
    text = runs_of(members)
    return text if len(text) <= _LONGEST_KEY else hashlib.sha256(text.encode()).hexdigest()[:32]


def count_of(value: bytes) -> int:
    """Of a key that counts how often a rank has come."""
    if re.fullmatch(rb"[0-9]{1,15}", value) is None:
        raise UnreadableError(f"expected a number, got {_excerpt(value)}")
    return int(value)


@dataclass(frozen=True)
class _Told(ABC):
    """A JSON object with these fields."""

    def text(self) -> str:
        return json.dumps({"protocol": PROTOCOL, **vars(self)})

    @classmethod
    def read_all(cls, texts: Iterable[str]) -> list[Self]:
        """Most ranks tell the same, which is read once."""
        known: dict[str, Self] = {}
        return [known.get(text) or known.setdefault(text, cls.read(text.encode())) for text in texts]

    @classmethod
    @abstractmethod
    def read(cls, value: bytes) -> Self:
        """What a rank told; UnreadableError where no rank of this version did."""


@dataclass(frozen=True)
class Hello(_Told):
    """Who a rank is, and what it wants the group to be like."""

    host: str
    cpus: list[int]
    quota: int
    identity: Identity
    processes: str
    level: int
    folder: str
    only_posts: bool = False  # it posts its calls, and another engine moves their bytes

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        return cls(
            fields.text("host"),
            fields.numbers("cpus", 2**20),
            fields.number("quota", 0, 2**31),
            fields.identity(),
            fields.text("processes"),
            fields.number("level", levels.OFF, levels.FULL),
            fields.text("folder"),
            fields.flag("only_posts"),
        )


@dataclass(frozen=True)
class Note(_Told):
    """Which group a rank came to make last, and which process it is: what others look at who wait for it elsewhere."""

    name: str
    members: list[int]
    number: int
    identity: Identity
    processes: str
    gave_up: bool = False

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        return cls(
            fields.text("name"),
            fields.numbers("members", 2**31),
            fields.number("number", 1, 10**15),
            fields.identity(),
            fields.text("processes"),
            fields.flag("gave_up"),
        )

    def info_of(self, rank: int) -> GroupInfo:
        """The group as a rank, of all, means it."""
        return GroupInfo(self.name, self.members.index(rank), len(self.members), self.members)


@dataclass(frozen=True)
class Offer(_Told):
    """Where the segment is, as rank 0 says; or why there is none."""

    path: str = ""
    nonce: str = ""
    error: str = ""

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        offer = cls(fields.text("path"), fields.text("nonce"), fields.text("error"))
        if not offer.error and re.fullmatch(r"[0-9a-f]{32}", offer.nonce) is None:
            raise UnreadableError(f"expected a nonce of 32 hexadecimal digits, got {_excerpt(value)}")
        return offer


@dataclass(frozen=True)
class Proposal(_Told):
    """The smaller group that a rank wants to be made: its ranks in the group that is split, and its name.

    `where` is the place in the program that asks for it, `problem` why the rank can't take part after all, and `offer`
    what the transport says of the memory that it has made for it.
    """

    ranks: list[int]
    name: str
    where: str
    problem: str = ""
    offer: str = ""

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        ranks = fields.numbers("ranks", _native.MAX_RANKS)
        return cls(ranks, *(fields.text(name) for name in ("name", "where", "problem", "offer")))


@dataclass(frozen=True)
class Wish(_Told):
    """The size and name of the merged group that a rank wants, and from where it asks, in the program.

    `problem` is why the rank can't take part after all, and `code` that of the error which says so.
    """

    size: int
    name: str
    where: str
    problem: str = ""
    code: str = ""

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        texts = (fields.text(name) for name in ("name", "where", "problem", "code"))
        return cls(fields.number("size", 1, 2**31), *texts)


@dataclass(frozen=True)
class Opening(_Told):
    """Why a rank could not open the segment; empty: it could."""

    problem: str

    @classmethod
    def read(cls, value: bytes) -> Self:
        return cls(_Fields(value).text("problem"))


@dataclass(frozen=True)
class Arrival(_Told):
    """A group has come to be merged with others: how many ranks it has, and how many it wants there to be in all.

    `token` is that of this arrival alone. `identity` and `processes` are of its first rank; `thread` is that rank's
    number where ranks are threads, else -1.
    """

    token: str
    name: str
    size: int
    whole: int
    identity: Identity
    processes: str
    thread: int = -1

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        return cls(
            fields.text("token"),
            fields.text("name"),
            fields.number("size", 1, _native.MAX_RANKS),
            fields.number("whole", 1, 2**31),
            fields.identity(),
            fields.text("processes"),
            fields.number("thread", -1, 2**31),
        )

    def describe(self) -> str:
        return f"group {self.name!r} of {self.size} rank{'s' if self.size > 1 else ''}"


@dataclass(frozen=True)
class Departure(_Told):
    """Groups that came will not be merged, if they were not before: an error of this class tells them why."""

    # Those of their arrivals.
    tokens: list[str]
    kind: str
    message: str
    hint: str

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        return cls(fields.texts("tokens"), fields.text("kind"), fields.text("message"), fields.text("hint"))


def read_arrival_or_departure(value: bytes) -> Arrival | Departure:
    return Departure.read(value) if "tokens" in _Fields(value).names else Arrival.read(value)


@dataclass(frozen=True)
class Merger(_Told):
    """What the first rank of a group tells the others of it: under which keys the merged group meets, and the rank that
    the first rank has there; or the error that it raises.

    `speakers` are the first ranks of all groups: their ranks there, and their identities where they can be watched."""

    prefix: str = ""
    first: int = 0
    speakers: list[tuple[int, Identity]] = field(default_factory=list)
    kind: str = ""
    code: str = ""
    message: str = ""
    hint: str = ""

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        where = fields.text("prefix"), fields.number("first", 0, 2**31), fields.known("speakers")
        return cls(*where, *(fields.text(name) for name in ("kind", "code", "message", "hint")))


@dataclass(frozen=True)
class GivenUp(_Told):
    """Why a rank, of all, gave up making the group: its own error, or what another one told it."""

    member: int
    # The rank, of all, whose error it was.
    finder: int
    kind: str
    code: str
    message: str
    hint: str
    peer: int
    exception: str
    frames: str
    identity: Identity
    processes: str

    @property
    def may_try_again(self) -> bool:
        """Whether the same ranks may well meet the next time."""
        return self.kind in ("CallTimeout", "PeerLost")

    @classmethod
    def read(cls, value: bytes) -> Self:
        fields = _Fields(value)
        return cls(
            fields.number("member", 0, 2**31),
            fields.number("finder", 0, 2**31),
            fields.text("kind"),
            fields.text("code"),
            fields.text("message"),
            fields.text("hint"),
            fields.number("peer", -1, _native.MAX_RANKS - 1),
            fields.text("exception"),
            fields.text("frames"),
            fields.identity(),
            fields.text("processes"),
        )


class _Fields:
    """Takes the fields of a JSON object, each of which must have its type and range."""

    def __init__(self, value: bytes) -> None:
        try:
            fields = json.loads(value)
        except (ValueError, RecursionError):
            raise UnreadableError(f"expected JSON, got {_excerpt(value)}") from None
        if not isinstance(fields, dict):
            raise UnreadableError(f"expected a JSON object, got {_excerpt(value)}")
        self._value = value
        self._fields = fields
        protocol = fields.get("protocol")
        if protocol != PROTOCOL or isinstance(protocol, bool):
            other = f"version {protocol}" if type(protocol) is int else "no version"
            raise UnreadableError(
                f"expected version {PROTOCOL} of the protocol, which this version of Phalanx speaks, got {other} in "
                f"{_excerpt(value)}"
            )

    @property
    def names(self) -> set[str]:
        return set(self._fields)

    def text(self, name: str) -> str:
        text = self._take(name, str, "a text")
        if len(text) > _LONGEST_TEXT:
            raise self._wrong(name, f"at most {_LONGEST_TEXT} characters")
        return str(text)

    def texts(self, name: str) -> list[str]:
        texts = self._take(name, list, "a list of texts")
        if len(texts) > _MOST_NUMBERS or not all(type(text) is str and len(text) <= _LONGEST_TEXT for text in texts):
            raise self._wrong(name, "a list of texts")
        return texts  # type: ignore[no-any-return]

    def flag(self, name: str) -> bool:
        return bool(self._take(name, bool, "true or false"))

    def number(self, name: str, lowest: int, highest: int) -> int:
        number = self._take(name, int, "a number")
        if not lowest <= number <= highest:
            raise self._wrong(name, f"a number in {lowest}..{highest}")
        return int(number)

    def numbers(self, name: str, below: int) -> list[int]:
        numbers = self._take(name, list, "a list of numbers")
        if not 0 < len(numbers) <= _MOST_NUMBERS or not all(type(n) is int and 0 <= n < below for n in numbers):
            raise self._wrong(name, f"1 to {_MOST_NUMBERS} numbers in 0..{below - 1}")
        return numbers  # type: ignore[no-any-return]

    def identity(self) -> Identity:
        return self._identity("identity", self._fields.get("identity"))

    def known(self, name: str) -> list[tuple[int, Identity]]:
        """Ranks and their identities."""
        pairs = self._take(name, list, "ranks with identities")
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int or not 0 <= pair[0] < 2**31:
                raise self._wrong(name, "ranks with identities")
        return [(rank, self._identity(name, numbers)) for rank, numbers in pairs]

    def _identity(self, name: str, numbers: Any) -> Identity:
        expected = "process number, start time and program"
        if type(numbers) is not list or len(numbers) != 3 or not all(type(n) is int for n in numbers):
            raise self._wrong(name, expected)
        pid, start, program = numbers
        if not (0 <= pid < 2**31 and 0 <= start < 2**64 and 0 <= program < 2**64):
            raise self._wrong(name, expected)
        return pid, start, program

    def _take(self, name: str, kind: type, expected: str) -> Any:
        if type(self._fields.get(name)) is not kind:
            raise self._wrong(name, expected)
        return self._fields[name]

    def _wrong(self, name: str, expected: str) -> UnreadableError:
        return UnreadableError(f"expected {expected} as {name!r}, got {_excerpt(self._value)}")


def _excerpt(value: bytes) -> str:
    return repr(value if len(value) <= 100 else value[:100] + b"...")
