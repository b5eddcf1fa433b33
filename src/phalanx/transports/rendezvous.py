"""How the ranks of a group find each other through a store and come to share one segment.

1. Every rank comes and says hello: who it is and which CPUs it may use. Ranks meet by the group's members and by how
   many times they have come to make a group of these, which every rank counts for itself. So the same store serves one
   group after another, also while a slow rank still reads the keys of the last meeting.
2. Rank 0 makes the segment, a memfd, and says where it is. Opening it through /proc is the probe whether two ranks
   share a host: no name or variable is trusted for that.
3. Every rank says whether it could open it. If one could not (another container, a hidden /proc), rank 0 tries once
   more with a file in /dev/shm, which is unlinked as soon as all have answered.
4. The last rank to leave removes the keys of the meeting.

A rank that gives up says why, and the meeting has failed for all. A rank that comes to it later goes on to the next one
where others may try again: after a timeout, or a death.

Every wait here ends: by arrival, by the group's or the store's timeout, whichever is shorter, by the end or the failure
of the rank waited for (lookout.py), by the end of the store, or by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from phalanx import _native
from phalanx.errors import CallTimeout, GroupError, PeerLost, PhalanxError
from phalanx.transports import identities, limits, segments
from phalanx.transports.advisers import ask
from phalanx.transports.exchange import Exchange, Key
from phalanx.transports.hello import GivenUp, Hello, Note, Offer, Opening
from phalanx.transports.identities import NOBODY, Identity, own_identity, process_namespace
from phalanx.transports.levels import asked_level
from phalanx.transports.lookout import Known, Lookout, Venue
from phalanx.transports.observers import tell
from phalanx.types import GroupInfo, Store

__all__ = ["Known", "Met", "decline", "join"]

_Made = TypeVar("_Made")
_Value = TypeVar("_Value")
# Two threads of a rank may come for groups of the same members at once.
_counting = threading.Lock()


def _renew_lock() -> None:
    """A thread of the parent may hold it."""
    global _counting
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class Met:
    """What the ranks of a group share once they have met, for the one that makes a transport of it."""

    info: GroupInfo
    segment: _native.Segment
    # The processes of the ranks; NOBODY where they can't be watched from here.
    identities: list[Identity]
    # What each rank told of itself.
    hellos: list[Hello]
    # A folder of the job's own, which rank 0 offers.
    folder: str
    # When this rank began to make the group, on the monotonic clock.
    began_ns: int


def join(
    store: Store,
    info: GroupInfo,
    timeout: float,
    make: Callable[[Met], _Made],
    *,
    scope: str = "",
    known: Known | None = None,
    only_posts: bool = False,
) -> _Made:
    """Meets the other ranks and makes this rank's end of what they share.

    Groups of the same members in one store and scope meet in the order in which they are made. Without a scope, it is
    the group's name. `known` is what the caller knows of the other ranks. With `only_posts` the segment has no room for
    the bytes of calls.
    """
    limits.check_size(info)
    meeting = _Meeting(store, info, timeout, scope, known or Known())
    try:
        with limits.named(info, "the making of the group"):
            # First: what goes wrong from now on is told to the others.
            meeting.come()
            limits.check_handles()
            segment = meeting.open_segment(only_posts)
    except BaseException as error:
        meeting.give_up(error)
        raise
    meeting.tidy()
    met = Met(info, segment, meeting.identities, meeting.hellos, meeting.folder, meeting.began_ns)
    try:
        made = make(met)
    except BaseException as error:
        tell.not_made(info, meeting.folder, error)
        raise
    identities.meet(meeting.venue.numbering, info.members, meeting.identities)
    return made


def decline(store: Store, info: GroupInfo, timeout: float, error: PhalanxError) -> None:
    """Tells the other ranks of a group why this one does not come to make it. Never raises."""
    meeting = _Meeting(store, info, timeout, "", Known())
    # Another rank may have given up before, or the store may be what failed.
    with contextlib.suppress(PhalanxError):
        meeting.come()
    meeting.give_up(error)


class _Meeting:
    """One rank's side of the exchange."""

    def __init__(self, store: Store, info: GroupInfo, timeout: float, scope: str, known: Known) -> None:
        self._info = info
        self._timeout = timeout
        # No rank makes a call in the group before this.
        self.began_ns = time.monotonic_ns()
        self._keys: set[str] = set()
        self.venue = Venue(scope, info.name)
        self._exchange = Exchange(store, info, timeout, lambda: self._lookout.explain_failed_store())
        self._lookout = Lookout(self._exchange, info, self.venue, known)
        self._process = (own_identity(), process_namespace())
        # Of the meeting that this rank comes to.
        self._number = 0
        self._prefix = ""
        self.identities: list[Identity] = [NOBODY] * info.size
        # What each rank told of itself.
        self.hellos: list[Hello] = []
        # A folder of the job's own, which rank 0 offers.
        self.folder = ""

    def come(self) -> None:
        """Counts how many times this rank has come for a group of these members. Meetings that failed are over."""
        key = Key(self.venue.count(self._info.members, self._info.rank), self._info.rank)
        with _counting:
            self._choose(self._exchange.count(key) + 1)
            while (given_up := self._failure()) and given_up.may_try_again:
                self._lookout.expect(self._number, given_up)
                self._choose(self._number + 1)
            self._exchange.set(key.name, str(self._number))
        tell.coming(self._info, self.venue.of(self._info.members), self._number, self._timeout)
        if given_up:
            raise self._lookout.told_by(given_up)
        self._tell_what_is_made()
        self._lookout.watch_known()
        for rank, member in enumerate(self._info.members):
            if (identity := identities.last_met(self.venue.numbering, member)) != NOBODY and rank != self._info.rank:
                tell.expecting(self._info, rank, identity)

    def _choose(self, number: int) -> None:
        self._number = number
        self._prefix = self.venue.meeting(self._info.members, number)

    def _failure(self) -> GivenUp | None:
        """Why another rank gave up this meeting; None: none has."""
        return self._exchange.find(self._given_up_key, GivenUp.read)

    @property
    def _given_up_key(self) -> Key:
        return Key(self._prefix + "given up")

    def _tell_what_is_made(self, gave_up: bool = False) -> None:
        note = Note(self._info.name, list(self._info.members), self._number, *self._process, gave_up)
        self._exchange.set(self.venue.note(self._info.members[self._info.rank]), note.text())

    def give_up(self, error: BaseException) -> None:
        """Tells the other ranks why. What was said first stays: it is what the others give up for."""
        tell.not_made(self._info, self.folder, error)
        if not self._prefix:
            return
        given_up = self._lookout.give_up(error, self._process).text()
        # The store may be what failed.
        with contextlib.suppress(Exception):
            self._tell_what_is_made(gave_up=True)
            for prefix in {self._prefix, *self._lookout.broken_meetings}:
                if not self._exchange.has(prefix + "given up"):
                    self._exchange.set(prefix + "given up", given_up)

    def open_segment(self, only_posts: bool) -> _native.Segment:
        hello = Hello(
            socket.gethostname(),
            _native.affinity(),
            _native.cpu_quota(),
            *self._process,
            asked_level(),
            ask.offer_folder() if self._info.rank == 0 else "",
            only_posts,
        )
        self._say(f"hello/{self._info.rank}", hello.text())
        hellos = self.hellos = self._hear_all("hello", Hello.read)
        self.folder = hellos[0].folder
        self._watch(hellos)
        self._check_purpose(hellos)
        nonce = os.urandom(16)
        options = {"own": self._info.rank == 0, "only_posts": only_posts}
        with segments.made_memfd(hellos, nonce, **options) as made:
            segment, problems = self._open("memfd", made, hellos[0])
        if not problems and segment is not None:
            return segment
        with segments.made_file(hellos, nonce, **options) as made:
            segment, more_problems = self._open("file", made, hellos[0])
        if not more_problems and segment is not None:
            return segment
        raise self._cannot_share(hellos, problems, more_problems)

    def _check_purpose(self, hellos: list[Hello]) -> None:
        """Raises, on every rank, unless all ranks make the same kind of group."""
        posting = [rank for rank, hello in enumerate(hellos) if hello.only_posts]
        if len(posting) in (0, len(hellos)):
            return
        moving = [rank for rank in range(len(hellos)) if rank not in posting]
        raise self._exchange.error(
            "GROUP:PURPOSE",
            "the ranks do not make the same kind of group: "
            f"{self._info.describe(*moving)} to move the bytes of calls, "
            f"{self._info.describe(*posting)} to compare calls that another backend carries out",
            "make the group with the same backend on every rank",
        )

    def tidy(self) -> None:
        """Removes what the exchange left in the store, once nobody will read it any more."""
        self._exchange.remove_with_last(f"{self._prefix}left", self._keys)

    def _watch(self, hellos: list[Hello]) -> None:
        here = process_namespace()
        for rank, hello in enumerate(hellos):
            # Numbers of processes mean nothing in another container.
            if hello.processes == here:
                self.identities[rank] = hello.identity
                self._lookout.watch(rank, hello.identity)

    def _open(self, way: str, made: segments.Made, maker: Hello) -> tuple[_native.Segment | None, dict[int, str]]:
        """Opens the segment that rank 0 offers; also says which ranks could not, and why."""
        offer, segment = made
        problem = ""
        if offer is not None:
            self._say(f"{way}/where", offer.text())
            problem = offer.error
        else:
            offer = self._hear([(f"{way}/where", 0)], Offer.read)[0]
            try:
                if offer.error:
                    raise OSError(offer.error)
                segments.check_path(offer, maker)
                segment = _native.Segment.open(offer.path, bytes.fromhex(offer.nonce), self._info.size)
            except (OSError, RuntimeError) as error:
                if limits.is_limit(error):
                    raise
                problem = str(error)
        self._say(f"{way}/opened/{self._info.rank}", Opening(problem).text())
        answers = self._hear_all(f"{way}/opened", Opening.read)
        return segment, {rank: answer.problem for rank, answer in enumerate(answers) if answer.problem}

    def _cannot_share(self, hellos: list[Hello], memfd: dict[int, str], file: dict[int, str]) -> GroupError:
        hosts = {hello.host for hello in hellos}
        lines = ["the ranks do not share memory, and this version works between the processes of one host only"]
        for rank in sorted(memfd.keys() | file.keys()):
            lines.append(f"  rank {rank} (host {hellos[rank].host}):")
            lines += [f"    {problem}" for problem in (memfd.get(rank), file.get(rank)) if problem]
        if len(hosts) > 1:
            hint = f"start all ranks on one host; these are on {len(hosts)}: {', '.join(sorted(hosts))}"
        else:
            hint = (
                "start all ranks in one container and as one user, or let the containers share /dev/shm "
                "(--ipc=host) or their processes (--pid=host)"
            )
        return self._exchange.error("GROUP:NOT_SHARED", "\n".join(lines), hint)

    def _say(self, name: str, text: str) -> None:
        self._keys.add(self._prefix + name)
        self._exchange.set(self._prefix + name, text)

    def _hear_all(self, topic: str, read: Callable[[bytes], _Value]) -> list[_Value]:
        return self._hear([(f"{topic}/{rank}", rank) for rank in range(self._info.size)], read)

    def _hear(self, names: list[tuple[str, int]], read: Callable[[bytes], _Value]) -> list[_Value]:
        keys = [Key(self._prefix + name, rank) for name, rank in names]
        self._keys.update(key.name for key in keys)
        self._exchange.wait(keys, self)
        return self._exchange.read(keys, read)

    # While it waits.

    def check(self, keys: list[Key]) -> None:
        with self._explaining():
            self._lookout.check(keys)

    def look(self, keys: list[Key], waited: float) -> None:
        self._check_given_up()
        with self._explaining():
            self._lookout.look(keys, waited, self._given_up_key)

    def _check_given_up(self) -> None:
        given_up = self._failure()
        if given_up is not None:
            raise self._lookout.told_by(given_up)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """A rank that is gone may have said before why it gave up."""
        try:
            yield
        except PeerLost:
            self._check_given_up()
            raise

    def absent(self, keys: list[Key]) -> CallTimeout:
        ranks = self._info.describe(*(key.rank for key in keys))
        message = f"gave up after a timeout of {self._exchange.limit:g} s: {ranks} did not come to make the group"
        return CallTimeout(
            "\n".join([message, *self._lookout.describe(keys)]),
            group=self._info.name,
            rank=self._info.rank,
            op="new_group",
            hint="find out whether these ranks were started, reach the same store and make the same groups",
        )
