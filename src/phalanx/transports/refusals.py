"""Calls that a rank has refused, with InvalidCall, while its peers wait for them: the notes that it leaves for them.

A note is text, because processes share it through the segment (_core/refusal_notes.hpp). It is open until the rank has
made the call after all. `reports` puts it into words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from phalanx import _native
from phalanx.errors import InvalidCall
from phalanx.printable import printable

__all__ = ["HasRefusals", "Refusal", "awaited_refusals", "open_refusals"]

_DIVIDER = "\x1f"
_NO_SEQ = 0
# In place of a peer or tag that was wrong itself.
_UNKNOWN_PEER, _UNKNOWN_TAG = _native.UNKNOWN_PEER, _native.UNKNOWN_TAG
# Bytes: a note has room for 1007, and one that is cut is no note.
_MOST_WHERE, _MOST_MESSAGE, _MOST_HINT = 160, 480, 240
_CUT = "..."
# Characters that tell an exception's message from others.
_ENOUGH = 80
_OPPOSITE = {"send": "recv", "recv": "send"}


class HasRefusals(Protocol):
    """A group: the native one, or what stands for it."""

    def refusals(self, rank: int, /) -> Sequence[str]:
        """The open notes of a rank."""


class Refusal(NamedTuple):
    """A call that a rank did not make because its own arguments were wrong."""

    op: str
    seq: int  # that the call would have had; 0 of a message
    peer: int  # of a message
    tag: int  # likewise
    where: str  # in the program
    error: str  # code and message
    hint: str

    @classmethod
    def of_call(cls, error: InvalidCall, op: str, seq: int) -> Refusal:
        return cls(op, seq, _UNKNOWN_PEER, _UNKNOWN_TAG, *_told(error))

    @classmethod
    def of_message(cls, error: InvalidCall, op: str, peer: int | None, tag: int | None) -> Refusal:
        """None: it is not known, because it is wrong."""
        known_peer = _UNKNOWN_PEER if peer is None else peer
        return cls(op, _NO_SEQ, known_peer, _UNKNOWN_TAG if tag is None else tag, *_told(error))

    @property
    def is_message(self) -> bool:
        return self.op in _OPPOSITE

    def pack(self) -> str:
        return _DIVIDER.join(map(str, self))

    @classmethod
    def unpack(cls, text: str) -> Refusal | None:
        """None where it is no note: peers may write what they like."""
        parts = text.split(_DIVIDER)
        try:
            op, seq, peer, tag, where, error, hint = parts
            return cls(printable(op), int(seq), int(peer), int(tag), *map(printable, (where, error, hint)))
        except ValueError:
            return None

    def is_made_by(self, op: str, peer: int, tag: int) -> bool:
        """Whether a message is the one that was refused, with right arguments."""
        return self.is_message and (self.op, self.peer) == (op, peer) and self.tag in (tag, _UNKNOWN_TAG)

    def is_awaited_by(self, rank: int, op: str, seq: int, tag: int | None) -> bool:
        """Whether a rank that is in this call or message waits for the one that was refused. None: any tag."""
        if not self.is_message:
            return op not in _OPPOSITE and self.seq <= seq
        if _OPPOSITE.get(op) != self.op or (tag is not None and self.tag not in (tag, _UNKNOWN_TAG)):
            return False
        return self.peer == rank or (self.op == "recv" and self.peer == _native.ANY_SOURCE)

    def is_told_by(self, exception: str | None) -> bool:
        """Whether a rank's last exception, as its peers are told, is this one."""
        return exception is not None and self.error[:_ENOUGH].partition("] ")[2] in exception


def _told(error: InvalidCall) -> tuple[str, str, str]:
    """Where the call was made, code and message, and the next step."""
    where = _one_line(_native.origin()[0], _MOST_WHERE)
    return where, f"[{error.code}] {_one_line(error.message, _MOST_MESSAGE)}", _one_line(error.hint or "", _MOST_HINT)


def _one_line(text: str, most: int) -> str:
    encoded = " ".join(text.replace(_DIVIDER, " ").split()).encode(errors="backslashreplace")
    return encoded.decode() if len(encoded) <= most else encoded[:most].decode(errors="ignore") + _CUT


def open_refusals(group: HasRefusals, rank: int) -> list[Refusal]:
    """The calls that a rank has refused and not made since."""
    found = map(Refusal.unpack, group.refusals(rank))
    return [refusal for refusal in found if refusal is not None]


def awaited_refusals(
    group: HasRefusals, rank: int, op: str, seq: int, tag: int | None, missing: Iterable[int]
) -> dict[int, Refusal]:
    """The calls that `missing` ranks have refused, and for which `rank` waits in this call or message."""
    return {
        peer: refusal
        for peer in missing
        for refusal in open_refusals(group, peer)
        if refusal.is_awaited_by(rank, op, seq, tag)
    }
