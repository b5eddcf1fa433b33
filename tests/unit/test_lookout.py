"""What a rank that makes a group says of a peer that dies, or goes on, while it looks at that peer."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx import _native
from phalanx.errors import GroupError, PeerLost
from phalanx.transports.exchange import Exchange, Key
from phalanx.transports.hello import GivenUp, Note
from phalanx.transports.identities import Identity, process_namespace
from phalanx.transports.lookout import Known, Lookout, Venue
from phalanx.types import GroupInfo

_PROCESS: Identity = (1, 2, 3)


class _Dying:
    """A process that dies after some looks at it."""

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks
        self.status = _native.UNKNOWN_STATUS
        self.replaced_by = None

    @property
    def dead(self) -> bool:
        self._num_looks -= 1
        return self._num_looks < 0


def _check_until_it_raises(lookout: Lookout, most: int) -> None:
    for _ in range(most):
        lookout.check([Key("hello/1", 1), Key("hello/2", 2)])


@pytest.mark.parametrize("num_looks", range(4))
def test_a_rank_that_gave_up_and_dies_between_two_looks_is_not_the_cause(
    num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 was told that rank 2 is lost, gave up the meeting before, and ends."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    info = GroupInfo("g", 0, 3, [0, 1, 2])
    process = _Dying(num_looks)
    monkeypatch.setattr(_native.Peer, "watch", lambda *identity: process)
    exchange = Exchange(store, info, 5, lambda: None)
    lookout = Lookout(exchange, info, Venue("", "g"), Known({1: _PROCESS}))
    reason = "rank 2 ended while the group was being made"
    lookout.expect(1, GivenUp(1, 1, "PeerLost", "PEER_LOST", reason, "", 2, "", "", _PROCESS, process_namespace()))
    lookout.watch_known()
    with pytest.raises(PeerLost) as caught:
        _check_until_it_raises(lookout, num_looks + 1)
    assert caught.value.peer == 2
    assert caught.value.message == reason


@pytest.mark.parametrize("is_dead", [False, True], ids=["left", "dead"])
@pytest.mark.parametrize(
    ("last_meeting", "words", "expected"),
    [
        (1, "", "group 'other' could not be merged"),
        (0, "", "rank 1 (ended|died) while the group was being made(:|$)"),
        (1, "ValueError: bad", r"rank 1 ended while the group was being made\n.* exception.*: ValueError: bad"),
    ],
    ids=["it was told of the failure", "it came to no meeting", "its own error"],
)
def test_a_rank_that_ends_after_a_failed_meeting(
    is_dead: bool, last_meeting: int, words: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 gave up the first meeting, rank 1 was told and ended, and rank 0 comes late: to the second meeting."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    info = GroupInfo("g", 0, 3, [0, 1, 2])
    if last_meeting:
        store.set(_VENUE.count([0, 1, 2], 1), str(last_meeting))
    monkeypatch.setattr(_native.Peer, "watch", lambda *identity: _Dying(0 if is_dead else 100))
    known = Known({1: _PROCESS}, lambda rank: words if rank == 1 else None)
    lookout = Lookout(Exchange(store, info, 5, lambda: None), info, _VENUE, known)
    reason = "group 'other' could not be merged"
    lookout.expect(1, GivenUp(2, 2, "PeerLost", "PEER_LOST", reason, "", 2, "", "", (4, 5, 6), "elsewhere"))
    lookout.watch_known()
    keys = [Key("hello/1", 1), Key("hello/2", 2)]
    with pytest.raises(PeerLost) as caught:
        lookout.check(keys) if is_dead else lookout.look(keys, 0.0, _GIVEN_UP)
    assert re.match(expected, caught.value.message)


class _Unconnected(dist.HashStore):
    """A store whose server is gone."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


class _Ending(_Dying):
    """A process whose connections the kernel has closed, and that is dead a few looks later."""

    ending = True


def _ask_failed_store(known: Known) -> None:
    store = _Unconnected()
    store.set_timeout(timedelta(seconds=5))
    info = GroupInfo("g", 0, 3, [0, 1, 2])
    exchange = Exchange(store, info, 5, lambda: lookout.explain_failed_store())
    lookout = Lookout(exchange, info, _VENUE, known)
    exchange.has("hello/1")


@pytest.mark.parametrize("num_looks", range(4))
def test_a_store_fails_because_the_rank_that_hosts_it_is_just_dying(
    num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _Ending(num_looks)
    monkeypatch.setattr(_native.Peer, "watch", lambda *identity: process)
    with pytest.raises(PeerLost, match="rank 1 died while the group was being made") as caught:
        _ask_failed_store(Known({1: _PROCESS}))
    assert caught.value.peer == 1


def test_a_store_fails_because_the_rank_that_hosts_it_has_left() -> None:
    with pytest.raises(PeerLost, match="first exception of rank 2: ValueError: bad") as caught:
        _ask_failed_store(Known({}, lambda rank: "ValueError: bad" if rank == 2 else None))
    assert caught.value.peer == 2


def test_a_store_fails_whose_host_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    process = _Ending(100)
    process.ending = False
    monkeypatch.setattr(_native.Peer, "watch", lambda *identity: process)
    with pytest.raises(GroupError, match="the store failed while the group was being made: Connection reset by peer"):
        _ask_failed_store(Known({1: _PROCESS}))


class _GoesOn(dist.HashStore):
    """A store in which ranks go on just before rank 0 reads the note of rank `seen`: `changes` are set then."""

    def __init__(self, venue: Venue, seen: int, changes: dict[str, str]) -> None:
        super().__init__()
        self._key, self._changes = venue.note(seen), changes
        self.set_timeout(timedelta(seconds=5))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self._key in keys:
            for key, value in self._changes.items():
                self.set(key, value)
        return super().multi_get(keys)


_VENUE = Venue("", "g")
_KEY, _GIVEN_UP = Key("opened/1", 1), Key("given up")


def _note(members: list[int], number: int = 1) -> str:
    return Note("g", members, number, _PROCESS, process_namespace()).text()


def _came(members: list[int], member: int, number: int = 1) -> dict[str, str]:
    """What the store has when a rank has come to make a group."""
    return {
        _VENUE.count(members, members.index(member)): str(number),
        _VENUE.note(member): _note(members, number),
    }


def _look(members: list[int], seen: int, before: dict[str, str], changes: dict[str, str]) -> Lookout:
    """Rank 0 makes a group of these members and waits for the key of rank 1."""
    info = GroupInfo("g", 0, len(members), members)
    store = _GoesOn(_VENUE, seen, changes)
    for key, value in {**before, **_came(members, 0)}.items():
        store.set(key, value)
    lookout = Lookout(Exchange(store, info, 5, lambda: None), info, _VENUE, Known())
    lookout.look([_KEY], 0.0, _GIVEN_UP)
    return lookout


@pytest.mark.parametrize(
    ("members", "number", "said"),
    [([0, 1, 2], 2, _KEY), ([0, 1], 1, _KEY), ([0, 1, 2], 2, _GIVEN_UP)],
    ids=["same ranks", "other ranks", "after it gave up"],
)
def test_a_rank_that_goes_on_to_its_next_group_is_not_accused(members: list[int], number: int, said: Key) -> None:
    changes = {said.name: "{}", **_came(members, 1, number)}
    assert _look([0, 1, 2], 1, _came([0, 1, 2], 1), changes).broken_meetings == []


def test_a_rank_that_makes_another_group_instead_is_accused() -> None:
    with pytest.raises(GroupError, match="each waits for the other"):
        _look([0, 1, 2], 1, _came([0, 1, 2], 1), _came([0, 1], 1))


def test_ranks_that_meet_elsewhere_while_one_looks_are_not_accused() -> None:
    """Rank 1 makes [1, 2], then [0, 1]; rank 2 makes [1, 2], then [0, 2]: both come to rank 0 in the end."""
    goes_on = {**_came([1, 2], 2), **_came([0, 2], 2)}
    assert _look([0, 1], 2, _came([1, 2], 1) | {_VENUE.note(2): _note([0, 2])}, goes_on).broken_meetings == []


def test_a_circle_of_three_is_found() -> None:
    with pytest.raises(GroupError, match="each waits for the next, and the last for the first"):
        _look([0, 1], 2, _came([1, 2], 1) | _came([0, 2], 2), {})
