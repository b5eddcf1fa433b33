"""The adviser is asked what transports can't know by themselves: where the job keeps its files, where an absent rank
is, what a lost rank did last.

There is one at a time. An adviser that raises is taken for one that has no answer, with a line in the log; the run goes
on. Events are told to observers instead (observers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from phalanx import _native
from phalanx.log import logger
from phalanx.transports.deadlocks import Cycle
from phalanx.types import GroupInfo

__all__ = ["Adviser", "ask", "take_advice_of"]

_Answer = TypeVar("_Answer")


class Adviser:
    """Has no answers. An adviser overrides the questions that it can answer.

    A `group` is what `failures` explains: the native group, or what stands for it.
    """

    def offer_folder(self) -> str:
        """For the first rank of a group that is being made: a folder of the job's own; empty: none."""
        return ""

    def absent(self, group: Any, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
        """Lines that say where these ranks are, which did not come to a call."""
        return []

    def deadlock(self, group: Any, info: GroupInfo) -> Cycle | None:
        """The deadlock because of which a call of this group has run into its timeout."""
        return None

    def lost(self, group: Any, info: GroupInfo, peer: int) -> list[str]:
        """Lines that say what a rank that is gone did last."""
        return []

    def recorded(
        self, group: Any, info: GroupInfo, failure: _native.Failure
    ) -> Mapping[int, Mapping[int, _native.MadeCall]]:
        """By rank and number: what is recorded of the collectives about which ranks disagree, after the last one that
        is known to agree."""
        return {}


_NEUTRAL = Adviser()
_adviser = _NEUTRAL


def take_advice_of(adviser: Adviser) -> None:
    """Asks this adviser from now on, instead of the one before."""
    global _adviser
    _adviser = adviser


class _Careful(Adviser):
    """Asks the adviser. Never raises."""

    def offer_folder(self) -> str:
        return _answer(_adviser.offer_folder, _NEUTRAL.offer_folder)

    def absent(self, group: Any, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
        return _answer(_adviser.absent, _NEUTRAL.absent, group, info, op, seq, missing)

    def deadlock(self, group: Any, info: GroupInfo) -> Cycle | None:
        return _answer(_adviser.deadlock, _NEUTRAL.deadlock, group, info)

    def lost(self, group: Any, info: GroupInfo, peer: int) -> list[str]:
        return _answer(_adviser.lost, _NEUTRAL.lost, group, info, peer)

    def recorded(
        self, group: Any, info: GroupInfo, failure: _native.Failure
    ) -> Mapping[int, Mapping[int, _native.MadeCall]]:
        return _answer(_adviser.recorded, _NEUTRAL.recorded, group, info, failure)


def _answer(question: Callable[..., _Answer], neutral: Callable[..., _Answer], *args: Any) -> _Answer:
    try:
        return question(*args)
    except Exception as error:
        logger.warning("the adviser raised in %s(): %r", question.__qualname__, error, exc_info=error)
        return neutral(*args)


ask = _Careful()
