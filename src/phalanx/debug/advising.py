"""What black boxes, peers and /proc tell about ranks: answers for the transports."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx import _native
from phalanx.debug.absence import Asker, describe_absent, last_calls
from phalanx.debug.own_box import own_box
from phalanx.debug.posted import recorded_calls
from phalanx.debug.seen import SeenGroups
from phalanx.transports.advisers import Adviser
from phalanx.transports.posting import PostedCalls
from phalanx.types import GroupInfo

__all__ = ["Advising"]


class Advising(Adviser):
    def __init__(self, groups: SeenGroups) -> None:
        self._groups = groups
        self._recorded: weakref.WeakKeyDictionary[PostedCalls, Mapping[int, Mapping[int, _native.MadeCall]]] = (
            weakref.WeakKeyDictionary()
        )

    def offer_folder(self) -> str:
        return own_box().offer_folder()

    def absent(self, group: Any, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
        if not isinstance(group, _native.GroupEnd):
            return []
        ask = not group.failure().asked
        return self._say_once(group, lambda asker: describe_absent(asker, op, seq, missing, stacks=True, ask=ask))

    def lost(self, group: Any, info: GroupInfo, peer: int) -> list[str]:
        if not isinstance(group, _native.GroupEnd):
            return []
        return self._say_once(group, lambda asker: last_calls(asker, peer))

    def recorded(
        self, group: Any, info: GroupInfo, failure: _native.Failure
    ) -> Mapping[int, Mapping[int, _native.MadeCall]]:
        if not isinstance(group, PostedCalls):
            return {}
        # A group fails once, and each of its calls in flight asks.
        if group not in self._recorded:
            self._recorded[group] = recorded_calls(group, info, failure)
        return self._recorded[group]

    def _say_once(self, group: _native.GroupEnd, describe: Callable[[Asker], list[str]]) -> list[str]:
        """A group fails once, and says the same at every further call."""
        seen = self._groups.find(group.token)
        if seen is None:
            return []
        if seen.said is None:
            asker = self._groups.asker(group.token)
            seen.said = [] if asker is None else describe(asker)
        return seen.said
