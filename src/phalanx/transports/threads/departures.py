"""Ranks that make no further call: they left, died, or were told that the group is broken."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx import _native

__all__ = ["Departures"]


class Departures:
    """By rank: how it left, and what it said last. All methods are called with the group's lock held."""

    def __init__(self, size: int) -> None:
        self._leaving = [_native.LEAVING_NO] * size
        self._status = [_native.UNKNOWN_STATUS] * size
        self._dead = [False] * size
        self._gave_up = [False] * size
        self._words = [""] * size
        # Whether any rank is gone.
        self.any = False

    def leave(self, rank: int, leaving: int) -> None:
        self._leaving[rank] = leaving
        self.any = True

    def die(self, rank: int, status: int) -> None:
        self._dead[rank], self._status[rank] = True, status
        self.any = True

    def give_up(self, rank: int) -> None:
        """The rank was told that the group is broken."""
        self._gave_up[rank] = True
        self.any = True

    def say_last_words(self, rank: int, words: str) -> None:
        """The first words stay."""
        self._words[rank] = self._words[rank] or words

    def last_words(self, rank: int) -> str:
        return self._words[rank]

    def has_left(self, rank: int) -> bool:
        """Whether it left or died."""
        return self._leaving[rank] != _native.LEAVING_NO or self._dead[rank]

    def is_gone(self, rank: int) -> bool:
        return self.has_left(rank) or self._gave_up[rank]

    def failure_of(
        self, gone: Sequence[int], rank: int, seq: int, call: _native.Description, where: str
    ) -> _native.Failure:
        """Of a rank that waits, in a call, for ranks that are gone."""
        left = [peer for peer in gone if self.has_left(peer)] or gone
        # Of several the one that has an exception to tell.
        peer = next((peer for peer in left if self._words[peer]), left[0])
        return _native.Failure(
            kind=_native.FAILURE_LOST if self._dead[peer] else _native.FAILURE_LEFT,
            rank=rank,
            peer=peer,
            call=call,
            seq=seq,
            where=where,
            leaving=self._leaving[peer],
            status=self._status[peer],
        )
