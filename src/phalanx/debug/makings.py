"""Groups that this process is making, in its black box.

The making of a group is a record like that of a call: it says that the rank has come to the meeting, and why the making
failed. As long as a group is being made, the deaths of the processes that are to be its ranks are noted, also where no
group is left that watches them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx import _native
from phalanx.debug.own_box import OwnBox
from phalanx.errors import CallTimeout, PeerLost, PhalanxError
from phalanx.transports.identities import Identity
from phalanx.transports.recording import remember_group
from phalanx.types import GroupInfo

__all__ = ["Makings"]


@dataclass
class _Making:
    venue: str
    number: int
    timeout: float
    record: int = 0  # in the box; 0: there was none yet
    identities: dict[int, Identity] = field(default_factory=dict)  # of the processes that are to come, by rank


class Makings:
    """Those under way, by the object that says what the group is."""

    def __init__(self) -> None:
        self._under_way: dict[int, _Making] = {}

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def begin(self, own: OwnBox, info: GroupInfo, venue: str, number: int, timeout: float) -> None:
        own.come_back()
        self._under_way[id(info)] = making = _Making(venue, number, timeout)
        _native.begin_making()
        if own.box is not None:
            making.record = _record(own.box, info, making)

    def expect(self, own: OwnBox, info: GroupInfo, rank: int, identity: Identity) -> None:
        """The process with this identity is expected as that rank of the group."""
        making = self._under_way.get(id(info))
        if making is not None:
            making.identities[rank] = identity
            if own.box is not None:
                _watch(own, own.box, info, rank, identity)

    def end(self, own: OwnBox, info: GroupInfo) -> None:
        """The group was made."""
        making = self._under_way.pop(id(info), None)
        if making is not None:
            if own.box is not None and making.record:
                own.box.end(making.record, True)
            _native.end_making()

    def fail(self, own: OwnBox, info: GroupInfo, folder: str, error: BaseException) -> None:
        """A process that has no box yet gets one, where a rank is lost and the folder of the job is known."""
        own.come_back()
        making = self._under_way.pop(id(info), None)
        if making is None:
            return
        try:
            failure, blamed = _reason(error, making)
            box = own.box
            if box is None and blamed >= 0 and (folder or own.folder):
                box = own.make(info, folder)
                own.set_rank(info.job_ranks[info.rank], info.size)
            if box is not None and not making.record:
                for rank, identity in making.identities.items():
                    _watch(own, box, info, rank, identity)
            if box is not None:
                # The death came before the failure.
                _native.look_for_deaths()
                record = making.record or _record(box, info, making)
                box.blame(record, failure, blamed)
                box.end(record, False)
        finally:
            _native.end_making()


def _watch(own: OwnBox, box: _native.BlackBox, info: GroupInfo, rank: int, identity: Identity) -> None:
    box.watch_in_making(*identity, info.job_ranks[rank], str(own.folder or ""))


def _record(box: _native.BlackBox, info: GroupInfo, making: _Making) -> int:
    return box.begin_making(remember_group(box, info, venue=making.venue), making.number, making.timeout)


def _reason(error: BaseException, making: _Making) -> tuple[int, int]:
    """Why the making failed, and the rank of the group that is to blame. An error of this rank's own is no reason."""
    if isinstance(error, PeerLost) and error.peer is not None and error.peer >= 0:
        identity = making.identities.get(error.peer)
        peer = None if identity is None else _native.Peer.watch(*identity)
        return _native.FAILURE_LOST if peer is not None and peer.dead else _native.FAILURE_LEFT, error.peer
    if isinstance(error, CallTimeout):
        return _native.FAILURE_TIMEOUT, _native.NO_RANK
    return (_native.FAILURE_MISMATCH if isinstance(error, PhalanxError) else _native.FAILURE_NONE), _native.NO_RANK
