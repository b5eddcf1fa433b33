"""What a rank that makes a group says of one that dies while it looks at it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from phalanx import _native
from phalanx.errors import PeerLost
from phalanx.transports.exchange import Exchange, Key
from phalanx.transports.hello import GivenUp
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
