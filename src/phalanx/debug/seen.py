"""The groups that this process is in, as `debug` sees them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

from phalanx import _native
from phalanx.debug.absence import MOST_RECORDS, Asker
from phalanx.debug.own_box import own_box
from phalanx.transports.identities import Identity
from phalanx.transports.refusals import Refusal
from phalanx.types import GroupInfo

__all__ = ["Seen", "SeenGroups", "WatchedTransport", "native_of"]


class WatchedTransport(Protocol):
    """What `debug` asks of a transport that has a native group."""

    @property
    def native(self) -> _native.GroupEnd | None:
        """None once the group was left."""

    @property
    def identities(self) -> Any: ...
    @property
    def began_ns(self) -> int: ...


def native_of(transport: Any) -> _native.GroupEnd | None:
    """The native group of a transport; None where there is none that could be looked at."""
    group: _native.GroupEnd | None = getattr(transport, "native", None)
    return group


class Seen:
    """A group. It is not kept: a group that no code refers to any more leaves by itself."""

    def __init__(self, transport: WatchedTransport, info: GroupInfo, reference: weakref.ref[WatchedTransport]) -> None:
        self.transport = reference
        self.info = info
        self.identities: list[Identity] = list(transport.identities)
        self.began_ns = transport.began_ns
        self.is_recorded = False
        # What was said of its failure, and of calls that ranks have refused.
        self.said: list[str] | None = None
        self.refusals_told: set[tuple[int, Refusal]] = set()

    @property
    def group(self) -> _native.GroupEnd | None:
        transport = self.transport()
        return None if transport is None else transport.native


class SeenGroups:
    """All of them, by the tokens that the core knows them by.

    The garbage collector may look here in the middle of anything: no locks, and every step is atomic.
    """

    def __init__(self) -> None:
        self._by_token: dict[int, Seen] = {}
        self._tokens = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._by_token)

    def all(self) -> list[Seen]:
        return list(self._by_token.values())

    def add(self, transport: WatchedTransport, info: GroupInfo, group: _native.GroupEnd) -> Seen:
        token = next(self._tokens)
        group.token = token
        reference = weakref.ref(transport, lambda _: self._by_token.pop(token, None))
        seen = self._by_token[token] = Seen(transport, info, reference)
        return seen

    def remove(self, transport: WatchedTransport) -> None:
        for token, seen in list(self._by_token.items()):
            if seen.transport() is transport:
                self._by_token.pop(token, None)

    def forget_all(self) -> None:
        self._by_token = {}

    def find(self, token: int) -> Seen | None:
        return self._by_token.get(token)

    def asker(self, token: int) -> Asker | None:
        """Asks the ranks of a group where they are; None where the group is no more."""
        seen = self.find(token)
        group = None if seen is None else seen.group
        if seen is None or group is None:
            return None
        began = min(each.began_ns for each in self.all())
        return Asker(group, seen.info, seen.identities, own_box().read(MOST_RECORDS), self._path_of, {}, began)

    def _path_of(self, rank: int) -> str:
        """The black box of a rank of the job, where this one shares a group with it."""
        for seen in self.all():
            ranks = list(seen.info.job_ranks)
            group = seen.group
            if rank in ranks and group is not None:
                return group.box_of(ranks.index(rank))
        return ""
