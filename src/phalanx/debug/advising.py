"""What black boxes, peers and /proc tell about ranks: answers for the transports."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx import _native
from phalanx.debug.absence import MOST_RECORDS, Asker, describe_absent, last_calls
from phalanx.debug.own_box import own_box
from phalanx.debug.posted import recorded_calls
from phalanx.debug.seen import SeenGroups
from phalanx.debug.wait_watch import WaitWatch
from phalanx.transports.advisers import Adviser
from phalanx.transports.deadlocks import Cycle
from phalanx.transports.posting import PostedCalls
from phalanx.types import GroupInfo

__all__ = ["Advising"]

_MOST_KEPT = 1000


class Advising(Adviser):
    def __init__(self, groups: SeenGroups, waits: WaitWatch) -> None:
        self._groups = groups
        self._waits = waits
        # By the identity of the group: a group fails once, and says the same at every further call.
        self._deadlocks: dict[str, Cycle | None] = {}
        os.register_at_fork(after_in_child=self._deadlocks.clear)
        self._recorded: weakref.WeakKeyDictionary[PostedCalls, Mapping[int, Mapping[int, _native.MadeCall]]] = (
            weakref.WeakKeyDictionary()
        )

    def offer_folder(self) -> str:
        return own_box().offer_folder()

    def absent(self, group: Any, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
        if isinstance(group, PostedCalls):
            return _look_for_absent(group, info, op, seq, missing)
        if not isinstance(group, _native.GroupEnd):
            return []
        ask = not group.failure().asked
        return self._say_once(group, lambda asker: describe_absent(asker, op, seq, missing, stacks=True, ask=ask))

    def deadlock(self, group: Any, info: GroupInfo) -> Cycle | None:
        identity: str = getattr(group, "identity", "")
        if identity not in self._deadlocks:
            finding = self._waits.finding_of(identity)
            if finding is not None and finding.cycle.is_sure:
                self._waits.tell(finding)
            while len(self._deadlocks) >= _MOST_KEPT:
                self._deadlocks.pop(next(iter(self._deadlocks)), None)
            self._deadlocks[identity] = None if finding is None else finding.cycle
        return self._deadlocks[identity]

    def lost(self, group: Any, info: GroupInfo, peer: int) -> list[str]:
        if isinstance(group, PostedCalls):
            return last_calls(_asker_of(group, info), peer)
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


def _look_for_absent(group: PostedCalls, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
    """Of a group that only posts. It says the same at every further call once it has failed."""
    if group.said is not None:
        return group.said
    lines = describe_absent(_asker_of(group, info), op, seq, missing, stacks=group.has_failed)
    if group.has_failed:
        group.said = lines
    return lines


def _asker_of(group: PostedCalls, info: GroupInfo) -> Asker:
    ranks = list(info.job_ranks)

    def path_of(rank: int) -> str:
        return group.box_of(ranks.index(rank)) if rank in ranks else ""

    return Asker(group, info, group.identities, own_box().read(MOST_RECORDS), path_of, {}, group.began_ns)
