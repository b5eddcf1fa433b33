"""What a rank that makes a group says of a peer that dies, or goes on, while it looks at that peer."""

from __future__ import annotations

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
    lookout.expect(GivenUp(1, 1, "PeerLost", "PEER_LOST", reason, "", 2, "", "", _PROCESS, process_namespace()))
    lookout.watch_known()
    with pytest.raises(PeerLost) as caught:
        _check_until_it_raises(lookout, num_looks + 1)
    assert caught.value.peer == 2
    assert caught.value.message == reason


class _GoesOn(dist.HashStore):
    """A store in which rank 1 goes on to its next group just before rank 0 reads rank 1's note."""

    def __init__(self, venue: Venue, next_note: Note, said: list[str]) -> None:
        super().__init__()
        self._venue, self._note, self._said = venue, next_note, said

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self._venue.note(1) in keys:
            for key in self._said:
                self.set(key, "{}")
            self.set(self._venue.count(self._note.members, self._note.members.index(1)), str(self._note.number))
            self.set(self._venue.note(1), self._note.text())
        return super().multi_get(keys)


def _look_at_rank_1(next_members: list[int], next_number: int, said: list[str]) -> Lookout:
    """Rank 0 of group [0, 1, 2] waits for the key "opened/1" of rank 1."""
    venue, info = Venue("", "g"), GroupInfo("g", 0, 3, [0, 1, 2])
    process = (_PROCESS, process_namespace())
    store = _GoesOn(venue, Note("g", next_members, next_number, *process), said)
    store.set_timeout(timedelta(seconds=5))
    store.set(venue.count(info.members, 0), "1")
    store.set(venue.note(1), Note("g", [0, 1, 2], 1, *process).text())
    lookout = Lookout(Exchange(store, info, 5, lambda: None), info, venue, Known())
    lookout.look([Key("opened/1", 1)], 0.0)
    return lookout


@pytest.mark.parametrize(("members", "number"), [([0, 1, 2], 2), ([0, 1], 1)], ids=["same ranks", "other ranks"])
def test_a_rank_that_came_and_makes_its_next_group_is_not_accused(members: list[int], number: int) -> None:
    assert _look_at_rank_1(members, number, said=["opened/1"]).broken_meetings == []


def test_a_rank_that_makes_another_group_instead_is_accused() -> None:
    with pytest.raises(GroupError, match="each waits for the other"):
        _look_at_rank_1([0, 1], 1, said=[])
