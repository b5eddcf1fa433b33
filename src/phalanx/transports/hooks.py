"""Hooks for observers above: they see groups come, fail and go. None of them may raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx import _native
from phalanx.errors import PhalanxError
from phalanx.transports.identities import Identity
from phalanx.types import GroupInfo

__all__ = ["Observer", "observe", "observer"]


class Observer:
    """Sees nothing. An observer overrides what it wants to see.

    A `group` is what `failures` explains: the native group, or what stands for it.
    """

    def offer_folder(self) -> str:
        """For the first rank of a group that is being made: a folder of the job's own; empty: none."""
        return ""

    def coming(self, info: GroupInfo, place: str, number: int, timeout: float) -> None:
        """This rank comes to a meeting, to make a group; `joined` or `not_made` follows.

        All ranks of the group know the meeting by its place and its number there.
        """

    def expecting(self, info: GroupInfo, rank: int, identity: Identity) -> None:
        """The process with this identity was, or is, that rank of the group that is being made."""

    def not_made(self, info: GroupInfo, folder: str, error: BaseException) -> None:
        """The making of a group has failed on this rank; the others are about to be told. `folder` is what the first
        rank offers, as far as this rank knows."""

    def joined(self, transport: Any, info: GroupInfo, folder: str) -> None:
        """A group of processes was made, and has made no call. `folder` is what its first rank offers."""

    def renamed(self, transport: Any, info: GroupInfo) -> None:
        """The group has got the name that people know."""

    def leaving(self, transport: Any) -> None:
        """The group is about to be left."""

    def left(self) -> None:
        """All groups were left, and the process goes on."""

    def raised(self, exception: BaseException, words: str) -> None:
        """Nobody has caught it. `words` are what peers will be told of it; empty: nothing."""

    def ending(self) -> None:
        """The process ends; its groups are about to be left."""

    def exiting(self) -> None:
        """The process ends; all groups were left."""

    def started(self, info: GroupInfo, op: str, seq: int, inputs: Sequence[torch.Tensor]) -> None:
        """A call is about to be made, in a group whose calls are looked at closely (Check::full)."""

    def absent(self, group: Any, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
        """Lines that say where these ranks are, who did not come to a call."""
        return []

    def lost(self, group: Any, info: GroupInfo, peer: int) -> list[str]:
        """Lines that say what a rank did last that is gone."""
        return []

    def recorded(
        self, group: Any, info: GroupInfo, failure: _native.Failure
    ) -> Mapping[int, Mapping[int, _native.MadeCall]]:
        """By rank and number: what is recorded of the collectives about which ranks disagree, after the last one that
        is known to agree."""
        return {}

    def failed(self, error: PhalanxError) -> None:
        """A group has failed on this rank; the error is about to be raised."""


_observers: list[Observer] = [Observer()]


def observe(new: Observer) -> None:
    """There is one at a time."""
    _observers[:] = [new]


def observer() -> Observer:
    return _observers[0]
