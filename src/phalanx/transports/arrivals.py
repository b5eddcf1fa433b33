"""How groups that were started apart find each other through a store, to be merged.

The first rank of each group speaks for it: it writes the group's arrival into a log in the store. Everybody reads the
log in its order and comes to the same result: as soon as the groups that have come have as many ranks together as they
want, they are merged, in their order in the log. A group that gives up, or that others find dead, departs: that is
written into the log, too, and counts if the group was not merged before. So the same log serves one merger after
another, also after failures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from phalanx import _native
from phalanx.errors import CallTimeout, Deadlock, GroupError, PeerLost, PhalanxError, kind_of
from phalanx.transports import threads
from phalanx.transports.exchange import Exchange, Key
from phalanx.transports.hello import Arrival, Departure, quoted, read_arrival_or_departure
from phalanx.transports.identities import NOBODY, Identity, own_identity, process_namespace
from phalanx.types import GroupInfo, Store

__all__ = ["MergerPlan", "Speaker"]

_OP = "merge_remote_group"
_SIZES = "pass the number of ranks of all groups together as size, the same on every rank"
_LOST = "look for an error on the ranks of that group, then merge the others again"
_ABSENT = "find out whether the other groups were made, reach the same store and merge under the same name"


class MergerPlan(NamedTuple):
    """Under which keys the ranks of the merged group meet, and which rank the first rank of this group has there.

    `speakers` are the first ranks of all groups: their ranks there, and their identities where they can be watched.
    """

    prefix: str
    first: int
    speakers: list[tuple[int, Identity]]


class Speaker:
    """Speaks for a group that is to be merged into one of `whole` ranks."""

    def __init__(
        self, store: Store, info: GroupInfo, name: str, whole: int, timeout: float, check_own: Callable[[], None]
    ) -> None:
        """`check_own` raises where the group itself can't go on."""
        self._store = store
        self._info = info
        self._whole = whole
        self._root = f"phalanx/merges/{quoted(name)}"
        self._exchange = Exchange(store, info, timeout, on_failure=lambda: None)
        self._check_own = check_own
        self._token = os.urandom(8).hex()
        self._num_read = 0
        # The groups that have come and wait, and what has become of this group.
        self._waiting: list[Arrival] = []
        self.plan: MergerPlan | None = None
        self._error: PhalanxError | None = None
        self._peers: dict[str, _native.Peer | None] = {}

    def find(self) -> MergerPlan:
        """Waits for the other groups. Raises GroupError, PeerLost or CallTimeout.

        Where it raises and `plan` is set, the other groups have gone there all the same.
        """
        run = threads.this_thread.run
        thread = -1 if run is None else run.environment()[1]
        identity, processes = (own_identity(), process_namespace()) if run is None else (NOBODY, "")
        own = Arrival(self._token, self._info.name, self._info.size, self._whole, identity, processes, thread)
        try:
            # A group that died before this one came does not count.
            self._read()
            self._find_dead()
            self._write(own)
            while True:
                self._read()
                if self._error is not None:
                    raise self._error
                if self.plan is not None:
                    return self.plan
                self._wait()
        except BaseException as error:
            self._depart(error)
            raise

    def _write(self, entry: Arrival | Departure) -> None:
        """At the end of the log."""
        while not self._exchange.claim(self._next(), entry.text()):
            self._read()

    def _next(self) -> Key:
        return Key(f"{self._root}/{self._num_read + 1}")

    def _read(self) -> None:
        while (entry := self._exchange.find(self._next(), read_arrival_or_departure)) is not None:
            self._num_read += 1
            if isinstance(entry, Departure):
                self._let_go(entry)
            else:
                self._let_come(entry)

    def _let_come(self, arrival: Arrival) -> None:
        self._waiting.append(arrival)
        num = sum(one.size for one in self._waiting)
        if any(one.whole != arrival.whole for one in self._waiting):
            lines = [f"  {one.describe()} wants {one.whole} in all" for one in self._waiting]
            text = "\n".join(["the groups do not agree how many ranks there are in all", *lines])
            self._let_go(Departure(self._tokens(), GroupError.__name__, text, _SIZES))
        elif num > arrival.whole:
            verdict = f"expected groups of {arrival.whole} ranks in all, got {num}"
            self._let_go(Departure(self._tokens(), GroupError.__name__, "\n".join([verdict, *self._came()]), _SIZES))
        elif num == arrival.whole:
            if self._token in self._tokens():
                # Of this merger alone: the number of its last entry in the log.
                self.plan = self._plan_of_all(f"{self._root}/made/{self._num_read}")
            self._waiting.clear()

    def _plan_of_all(self, prefix: str) -> MergerPlan:
        first, own, speakers, here = 0, 0, [], process_namespace()
        for one in self._waiting:
            if one.token == self._token:
                own = first
            if one.processes == here and one.identity != NOBODY:
                speakers.append((first, one.identity))
            first += one.size
        return MergerPlan(prefix, own, speakers)

    def _let_go(self, departure: Departure) -> None:
        if self._token in departure.tokens and self._token in self._tokens():
            self._error = kind_of(departure.kind)(
                departure.message,
                code="GROUP:SIZE" if departure.kind == GroupError.__name__ else None,
                group=self._info.name,
                rank=self._info.rank,
                op=_OP,
                hint=departure.hint,
            )
        self._waiting = [one for one in self._waiting if one.token not in departure.tokens]

    def _tokens(self) -> list[str]:
        return [one.token for one in self._waiting]

    def _came(self) -> list[str]:
        return [f"  {one.describe()}" for one in self._waiting]

    def _depart(self, error: BaseException) -> None:
        """Tells the other groups not to wait for this one, which gives up."""
        # It may have been interrupted before it has read what it wrote itself. The store may be what has failed.
        with contextlib.suppress(PhalanxError):
            self._read()
        if self._token not in self._tokens() or self._error is not None:
            return
        if isinstance(error, CallTimeout) and not isinstance(error, Deadlock):
            own = Departure([self._token], CallTimeout.__name__, "", "")
        else:
            reason = error.message if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
            text = f"group {self._info.name!r} could not be merged: {reason}"
            own = Departure(self._tokens(), PeerLost.__name__, text, _LOST)
        with contextlib.suppress(PhalanxError):
            self._write(own)

    def _wait(self) -> None:
        """For the next entry."""
        if threads.this_thread.run is None:
            self._exchange.wait([self._next()], self)
            return
        try:
            self._store.wait([self._next().name], timedelta(seconds=min(self._exchange.limit, 1e9)))
        except Deadlock:
            # Threads do not look around while they wait.
            if not self._find_dead():
                raise
        except PhalanxError:
            raise
        except RuntimeError:
            raise self.absent([self._next()]) from None

    def _find_dead(self) -> bool:
        """Whether a group that has come has lost its first rank: then all groups that wait give up."""
        for arrival in self._waiting:
            if arrival.token != self._token and self._is_dead(arrival):
                text = f"rank 0 of {arrival.describe()} ended while the groups were being merged"
                self._write(Departure(self._tokens(), PeerLost.__name__, text, _LOST))
                return True
        return False

    def _is_dead(self, arrival: Arrival) -> bool:
        run = threads.this_thread.run
        if run is not None:
            return arrival.thread >= 0 and run.has_ended(arrival.thread)
        if arrival.processes != process_namespace() or arrival.identity == NOBODY:
            return False
        if arrival.token not in self._peers:
            self._peers[arrival.token] = _native.Peer.watch(*arrival.identity)
        peer = self._peers[arrival.token]
        return peer is not None and peer.dead

    # While it waits.

    def check(self, keys: list[Key]) -> None:
        """Between two looks there is nothing to find."""

    def look(self, keys: list[Key], waited: float) -> None:
        self._check_own()
        self._find_dead()

    def absent(self, keys: list[Key]) -> CallTimeout:
        num = self._whole - sum(one.size for one in self._waiting)
        verdict = f"gave up after a timeout of {self._exchange.limit:g} s: {num} of {self._whole} ranks did not come"
        return CallTimeout(
            "\n".join([f"{verdict} to be merged; these came:", *self._came()]),
            group=self._info.name,
            rank=self._info.rank,
            op=_OP,
            hint=_ABSENT,
        )
