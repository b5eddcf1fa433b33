"""What may have become of ranks that others wait for while a group is made: they died, ended, gave up, or make another
group.

Nothing here waits, but for the moment in which a process ends, and nobody is accused who may still come (identities.py,
circles.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx import _native
from phalanx.errors import CallTimeout, GroupError, PeerLost, PhalanxError
from phalanx.log import logger
from phalanx.transports import identities
from phalanx.transports.circles import different_groups, find_circle
from phalanx.transports.exchange import Exchange, Key
from phalanx.transports.failures import lost_while_joining
from phalanx.transports.hello import GivenUp, Note, key_of_ranks, quoted
from phalanx.transports.identities import Identity, process_namespace
from phalanx.transports.observers import tell
from phalanx.types import GroupInfo

__all__ = ["Known", "Lookout", "Venue"]

# Ranks that are looked at each time: a large job must not keep its store busy with looking.
_AT_ONCE = 16
# Seconds after which a rank says that those it waits for have made another group of the same name.
_PATIENCE = 5.0
# Seconds that a process may take from the end of its connections to its own end, and between two looks at it.
_LONGEST_END, _BETWEEN_LOOKS = 1.0, 0.001

# The last words of a rank, by its number in all ranks, that has ended and makes no further group; None: it has not
# ended. For a test kit whose ranks end without their processes.
words_of_ended: Callable[[int], str | None] | None = None


@dataclass(frozen=True)
class Known:
    """What a rank knows of those it is about to meet, by their rank in the new group."""

    # Which processes they are, for certain.
    identities: Mapping[int, Identity] = field(default_factory=dict)
    # The last words of one that has left the world that the group belongs to; None: it has not left.
    words_of_left: Callable[[int], str | None] = lambda rank: None


@dataclass(frozen=True)
class Venue:
    """Where in the store ranks meet. Groups without a scope of their own meet by their name."""

    scope: str
    name: str

    def _root(self) -> str:
        return self.scope or quoted(self.name)

    @property
    def numbering(self) -> str:
        """Of its ranks: torch's, or the group's own."""
        return "" if self.scope else self.name

    def count(self, members: Sequence[int], rank: int) -> str:
        """Under it a rank of a group counts how many times it has come for a group of these members."""
        return f"{self.of(members)}/comings/{rank}"

    def of(self, members: Sequence[int]) -> str:
        """Of all meetings of these."""
        return f"{self._root()}/{key_of_ranks(members)}"

    def meeting(self, members: Sequence[int], number: int) -> str:
        return f"{self.of(members)}/{number}/"

    def note(self, rank: int) -> str:
        """Of a rank, of all."""
        return f"{self._root()}/last/{rank}"


class Lookout:
    def __init__(self, exchange: Exchange, info: GroupInfo, venue: Venue, known: Known) -> None:
        self._exchange = exchange
        self._info = info
        self._venue = venue
        self._known = known
        self._peers: dict[int, _native.Peer | None] = {}
        # Those whose death is told once only.
        self._watched: dict[int, Identity] = {}
        self._namespace = process_namespace()
        self._next = 0
        self._has_warned = False
        self._given_up: dict[int, tuple[GivenUp, _native.Peer | None]] = {}
        # Why earlier meetings of these ranks failed, by their numbers.
        self._failures: dict[int, GivenUp] = {}
        # What this rank was told, and the error that says so here.
        self._told: tuple[PhalanxError, GivenUp] | None = None
        # Those of other groups that can't be made either.
        self.broken_meetings: list[str] = []

    def watch_known(self) -> None:
        """The processes that this rank knows before it has heard of them."""
        for rank, identity in self._known.identities.items():
            if rank not in self._peers:
                self.watch(rank, identity)

    def watch(self, rank: int, identity: Identity) -> None:
        if rank != self._info.rank:
            self._peers[rank] = _native.Peer.watch(*identity)
            tell.expecting(self._info, rank, identity)

    def check_alive(self) -> None:
        """Raises where any of the ranks is known to be dead."""
        self.watch_known()
        for rank in range(self._info.size):
            self._check_alive(rank)

    def explain_failed_store(self) -> None:
        """Raises where a rank, which may have hosted the store, is dead or has left.

        The kernel closes the connections of a process before the process counts as dead: this waits in between.
        """
        deadline = time.monotonic() + _LONGEST_END
        self.check_alive()
        while any(peer is not None and peer.ending for peer in self._peers.values()) and time.monotonic() < deadline:
            time.sleep(_BETWEEN_LOOKS)
            self.check_alive()
        for rank in range(self._info.size):
            if rank != self._info.rank and (words := self._words_of(rank)) is not None:
                raise self._ended(rank, words)

    def _check_alive(self, rank: int) -> None:
        peer = self._peers.get(rank)
        if peer is not None and peer.dead:
            identities.forget(self._watched.get(rank, identities.NOBODY))
            words = self._words_of(rank) or ""
            raise lost_while_joining(self._info, rank, peer.status, words=words, replaced_by=peer.replaced_by)

    def check(self, keys: list[Key]) -> None:
        """Raises where a rank that still has something to say is dead. Asks the store about dead ranks only."""
        for key in keys:
            # Before the look at whether it gave up: if it dies in between, its reason counts, not its death.
            peer = self._peers.get(key.rank)
            is_dead = peer is not None and peer.dead
            self._check_given_up(key)
            if is_dead and not self._exchange.has(key.name):
                self._check_failed_before(key.rank)
                self._check_alive(key.rank)

    def _check_given_up(self, key: Key) -> None:
        given_up, writer = self._given_up.get(key.rank, (None, None))
        if given_up is None or writer is None or not writer.dead:
            return
        note = self._note(self._info.members[key.rank])
        if note is not None and note.identity != given_up.identity:
            # Another process has come under that rank.
            del self._given_up[key.rank]
        elif not self._exchange.has(key.name):
            # It has not said it before it died.
            raise self.told_by(given_up)

    def _check_failed_before(self, rank: int) -> None:
        """Raises where this rank ended without an error after an earlier meeting that it had come to had failed: it
        ended because of that failure."""
        if not self._failures or self._words_of(rank) != "":
            return
        last = self._exchange.count(Key(self._venue.count(self._info.members, rank), rank))
        if last in self._failures:
            raise self.told_by(self._failures[last])

    def look(self, keys: list[Key], waited: float, given_up_key: Key) -> None:
        """A closer look at those who still have something to say; in a large group, at some of them each time.

        Under `given_up_key` a rank says that it gave up this meeting.
        """
        missing = self._some_missing(keys)
        for key in missing:
            self._check_ended(key)
            # What can't be read keeps that rank from coming.
            self._exchange.count(Key(self._venue.count(self._info.members, key.rank), key.rank))
        notes = {key.rank: self._note(self._info.members[key.rank]) for key in missing}
        found = {rank: note for rank, note in notes.items() if note is not None}
        for rank, note in found.items():
            self._look_at_process(rank, note)
        self._look_for_circle(missing, given_up_key)
        if not self._has_warned and waited > _PATIENCE:
            self._warn(found)

    def _some_missing(self, keys: list[Key]) -> list[Key]:
        for _ in range(0, len(keys), _AT_ONCE):
            start = self._next % len(keys)
            some = keys[start : start + _AT_ONCE]
            self._next = start + _AT_ONCE
            if not self._exchange.has(*(key.name for key in some)):
                return self._exchange.missing(some)
        return []

    def _check_ended(self, key: Key) -> None:
        words = self._words_of(key.rank)
        if words is not None and not self._exchange.has(key.name):
            self._check_failed_before(key.rank)
            raise self._ended(key.rank, words)

    def _ended(self, rank: int, words: str) -> PeerLost:
        return lost_while_joining(self._info, rank, _native.UNKNOWN_STATUS, dead=False, words=words)

    def _words_of(self, rank: int) -> str | None:
        """The last words of a rank that has ended or left; None: it has not."""
        words = self._known.words_of_left(rank)
        if words is None and words_of_ended is not None and self._info.global_ranks:
            words = words_of_ended(self._info.global_ranks[rank])
        return words

    def _note(self, member: int) -> Note | None:
        """Which group a rank, of all, came to make last."""
        rank = self._info.members.index(member) if member in self._info.members else -1
        return self._exchange.find(Key(self._venue.note(member), rank), Note.read)

    def _look_at_process(self, rank: int, note: Note) -> None:
        if rank in self._known.identities or note.processes != self._namespace:
            return
        if identities.has_met(self._venue.numbering, self._info.members[rank], note.identity):
            self._watched[rank] = note.identity
            self.watch(rank, note.identity)
        elif rank in self._watched:
            # Another process has come under that rank.
            del self._watched[rank], self._peers[rank]

    def _look_for_circle(self, missing: list[Key], given_up_key: Key) -> None:
        own = self._info.members[self._info.rank]
        keys = {self._info.members[key.rank]: key for key in missing}
        notes: dict[int, Note] = {}

        def waits_for(member: int) -> list[int]:
            if member == own:
                return list(keys)
            note = self._note(member)
            if note is None or note.gave_up or note.name != self._info.name or member not in note.members:
                return []
            notes[member] = note
            # This rank first, which closes the circle.
            others = sorted((other for other in note.members if other != member), key=lambda other: other != own)
            return [other for other in others[:_AT_ONCE] if not self._has_come(note, other)]

        circle = find_circle(own, waits_for)
        if not circle:
            return
        # Ranks go on while this one looks. If each of them still makes the group that its note names, and after that
        # the next one still has not come there, then nobody has gone on.
        first, *others = circle[1:]
        has_gone_on = (
            any(self._note(member) != notes[member] for member in circle[1:])
            or self._exchange.has(keys[first].name)
            or any(self._has_come(notes[member], other) for member, other in zip(circle[1:], others, strict=False))
            or self._exchange.has(given_up_key.name)
        )
        if has_gone_on:
            return
        self.broken_meetings = [
            self._venue.meeting(notes[member].members, notes[member].number) for member in circle[1:]
        ]
        raise different_groups(self._info, [self._info, *(notes[member].info_of(member) for member in circle[1:])])

    def _has_come(self, note: Note, member: int) -> bool:
        key = self._venue.count(note.members, note.members.index(member))
        return self._exchange.count(Key(key)) >= note.number

    def describe(self, keys: list[Key]) -> list[str]:
        """Lines about ranks that did not come in time: which group they came to make last."""
        lines = []
        for key in keys[:_AT_ONCE]:
            note = self._note(self._info.members[key.rank])
            if note is not None:
                which = f"group {note.name!r} of ranks {note.members}"
                lines.append(f"  {self._info.describe(key.rank)} last came to make {which}")
        return lines

    def _warn(self, notes: dict[int, Note]) -> None:
        others = {rank: note for rank, note in notes.items() if self._is_another(note)}
        if others:
            self._has_warned = True
            made = ", ".join(f"{self._info.describe(rank)}: ranks {note.members}" for rank, note in others.items())
            logger.warning(
                "new_group, group %r, rank %d: has waited %g s for ranks that last came to make another group of this "
                "name (%s); this rank makes one of ranks %s. Check that all of them also make this group.",
                self._info.name,
                self._info.rank,
                _PATIENCE,
                made,
                list(self._info.members),
            )

    def _is_another(self, note: Note) -> bool:
        return note.name == self._info.name and note.members != list(self._info.members)

    def expect(self, number: int, given_up: GivenUp) -> None:
        """The meeting with this number has failed. Its ranks may come to this one; if one ends instead, this is why."""
        self._failures[number] = given_up
        if given_up.member in self._info.members and given_up.processes == self._namespace:
            rank = self._info.members.index(given_up.member)
            self._given_up[rank] = given_up, _native.Peer.watch(*given_up.identity)

    def give_up(self, error: BaseException, process: tuple[Identity, str]) -> GivenUp:
        """What the other ranks are told of the error that ends the making of the group here."""
        own = self._info.members[self._info.rank]
        if self._told is not None and self._told[0] is error:
            identity, processes = process
            return replace(self._told[1], member=own, identity=identity, processes=processes)
        return GivenUp(
            own,
            own,
            type(error).__name__,
            str(getattr(error, "code", "")),
            error.message if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"[:1000],
            str(getattr(error, "hint", None) or ""),
            error.peer if isinstance(error, PeerLost) and error.peer is not None else -1,
            str(getattr(error, "exception", None) or ""),
            "\n".join(getattr(error, "frames", ())),
            *process,
        )

    def told_by(self, given_up: GivenUp) -> PhalanxError:
        """The error of a rank that learns that another one gave up."""
        error = _told_by(self._info, given_up)
        self._told = error, given_up
        if given_up.kind == "PeerLost" and 0 <= given_up.peer < self._info.size:
            self._forget_dead(given_up.peer)
        return error

    def _forget_dead(self, rank: int) -> None:
        """Another rank has found its death, which is told here, too, before this rank has found it by itself."""
        identity = identities.last_met(self._venue.numbering, self._info.members[rank])
        if rank in self._known.identities or identity == identities.NOBODY:
            return
        process = _native.Peer.watch(*identity)
        if process is not None and process.dead:
            identities.forget(identity)


def _told_by(info: GroupInfo, given_up: GivenUp) -> PhalanxError:
    rank = info.members.index(given_up.finder) if given_up.finder in info.members else -1
    finder = info.describe(rank) if rank >= 0 else f"rank {given_up.finder} of all"
    if given_up.kind == "GroupError":
        return GroupError(
            given_up.message, code=given_up.code, group=info.name, rank=info.rank, op="new_group", hint=given_up.hint
        )
    if given_up.kind == "PeerLost" and given_up.peer != info.rank:
        error = PeerLost(given_up.message, group=info.name, rank=info.rank, op="new_group", hint=given_up.hint)
        error.peer, error.exception = given_up.peer, given_up.exception or None
        error.frames = tuple(given_up.frames.splitlines())
        return error
    message = f"{finder} gave up making the group: {given_up.message}"
    if rank == info.rank:
        message = f"this rank gave up making the group before: {given_up.message}"
    if given_up.kind == "CallTimeout":
        return CallTimeout(message, group=info.name, rank=info.rank, op="new_group", hint=given_up.hint)
    lost = PeerLost(
        message,
        group=info.name,
        rank=info.rank,
        op="new_group",
        hint=f"fix the error on {finder}; the other ranks waited for it",
    )
    lost.peer, lost.exception = rank, given_up.message
    return lost
