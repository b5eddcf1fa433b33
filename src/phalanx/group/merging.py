"""How the ranks of a group take part in a merger: the first of them speaks for all and tells them what came of it."""

from __future__ import annotations

from typing import Any

from phalanx import _native
from phalanx.collectives.checks import fail
from phalanx.collectives.numbers import whole
from phalanx.errors import CallTimeout, GroupError, Mismatch, PeerLost, PhalanxError
from phalanx.group.group import Group
from phalanx.transports.arrivals import Place, Speaker
from phalanx.transports.hello import Merger, Wish
from phalanx.transports.rendezvous import Known
from phalanx.types import GroupInfo, PrefixStore, Store

__all__ = ["check_size", "merge"]

_OP = "merge_remote_group"
_KINDS: dict[str, type[PhalanxError]] = {kind.__name__: kind for kind in (CallTimeout, GroupError, PeerLost)}
# Seconds that the others give the first rank beyond the timeout, to tell them of it.
_TO_TELL = 10.0


def check_size(info: GroupInfo, size: Any) -> int:
    """Of the merged group."""
    number = whole(info, _OP, "SIZE", "the size", size)
    if number < info.size:
        fail(
            info,
            _OP,
            "SIZE",
            f"expected at least the {info.size} ranks of this group as the size of the merged one, got {number}",
            "pass the number of ranks of all groups together",
        )
    return number


def merge(group: Group, store: Store, size: int, timeout: float, name: str) -> Group:
    """The group of all ranks of this group and of those that come to the same store under the same name."""
    info = group.info
    _agree(group, size, timeout, name)
    told = Merger()
    if info.rank == 0:
        told = _speak(group, store, size, timeout, name)
    told = Merger.read(group.exchange(_OP, told.text(), timeout + _TO_TELL)[0].encode())
    if told.kind:
        raise _KINDS.get(told.kind, GroupError)(
            told.message, code=told.code, group=info.name, rank=info.rank, op=_OP, seq=group.seq, hint=told.hint
        )
    # Whoever of this group dies now is found dead by the others of it, who tell all.
    own = {told.first + rank: identity for rank, identity in enumerate(group.identities)}
    known = Known(own, lambda rank: group.words_of_left(rank - told.first) if rank in own else None)
    return Group.join(
        PrefixStore(told.prefix, store), GroupInfo(name, told.first + info.rank, size), timeout, "", known
    )


def _agree(group: Group, size: int, timeout: float, name: str) -> None:
    """All ranks of this group have come, and want the same."""
    where, _ = _native.origin()
    wishes = [Wish.read(text.encode()) for text in group.exchange(_OP, Wish(size, name, where).text(), timeout)]
    for rank, wish in enumerate(wishes):
        field = "SIZE" if wish.size != wishes[0].size else "NAME" if wish.name != wishes[0].name else ""
        if field:
            raise _mismatch(group, f"MISMATCH:{field}", f"rank {rank} does not want the same group as rank 0", wishes)


def _mismatch(group: Group, code: str, verdict: str, wishes: list[Wish]) -> Mismatch:
    lines = [
        f"  rank {rank} passed size {wish.size} and the name {wish.name!r}"
        + (f", at {wish.where}" if wish.where else "")
        for rank, wish in enumerate(wishes)
    ]
    return Mismatch(
        "\n".join([verdict, *lines]),
        code=code,
        group=group.info.name,
        rank=group.info.rank,
        op=_OP,
        seq=group.seq,
        hint="pass the same size and name on all ranks; no group was made, and this one still works",
    )


def _speak(group: Group, store: Store, size: int, timeout: float, name: str) -> Merger:
    try:
        place: Place = Speaker(store, group.info, name, size, timeout, lambda: group.check_whole(_OP)).find()
    except PhalanxError as error:
        kind = type(error).__name__
        return Merger(kind=kind, code=error.code, message=error.message, hint=error.hint or "")
    return Merger(place.prefix, place.first)
