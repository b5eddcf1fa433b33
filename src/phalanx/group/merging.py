"""How the ranks of a group take part in a merger: the first of them speaks for all and tells them what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx import _native
from phalanx.collectives.checks import fail
from phalanx.collectives.numbers import whole
from phalanx.errors import Mismatch, PeerLost, PhalanxError, kind_of
from phalanx.group import names
from phalanx.group.group import Group
from phalanx.transports.arrivals import Speaker
from phalanx.transports.hello import Merger, Wish
from phalanx.transports.identities import Identity
from phalanx.transports.rendezvous import Known
from phalanx.types import GroupInfo, PrefixStore, Store

__all__ = ["check_size", "merge"]

_OP = "merge_remote_group"
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


def merge(group: Group, store: Store, size: int, timeout: float, name: str, *, named: bool) -> Group:
    """The group of all ranks of this group and of those that come to the same store under the same name.

    `named`: the caller has chosen the name.
    """
    info = group.info
    _agree(group, size, timeout, name, names.problem_of(name) if named else "")
    own, others = _speak(group, store, size, timeout, name) if info.rank == 0 else (Merger(), {})
    try:
        told = Merger.read(group.exchange(_OP, own.text(), timeout + _TO_TELL)[0].encode())
    except BaseException as error:
        if own.prefix:
            _decline(group, store, GroupInfo(name, own.first, size), own.prefix, timeout, error)
        raise
    if told.kind:
        raise kind_of(told.kind)(
            told.message, code=told.code, group=info.name, rank=info.rank, op=_OP, seq=group.seq, hint=told.hint
        )
    # Whoever of this group dies now is found dead by the others of it, who tell all. A first rank that dies before it
    # has told its own group of the merger is found dead by the other first ranks.
    mine = {told.first + rank: identity for rank, identity in enumerate(group.identities)}
    known = Known({**others, **mine}, lambda rank: group.words_of_left(rank - told.first) if rank in mine else None)
    return Group.join(
        PrefixStore(told.prefix, store), GroupInfo(name, told.first + info.rank, size), timeout, "", known
    )


def _agree(group: Group, size: int, timeout: float, name: str, problem: str) -> None:
    """All ranks of this group have come, and want the same."""
    where, _ = _native.origin()
    wishes = Wish.read_all(group.exchange(_OP, Wish(size, name, where, problem).text(), timeout))
    for rank, wish in enumerate(wishes):
        field = "SIZE" if wish.size != wishes[0].size else "NAME" if wish.name != wishes[0].name else ""
        if field:
            raise _mismatch(group, f"MISMATCH:{field}", f"rank {rank} does not want the same group as rank 0", wishes)
    names.check_problems(group.info, _OP, group.seq, [wish.problem for wish in wishes])


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


def _speak(group: Group, store: Store, size: int, timeout: float, name: str) -> tuple[Merger, Mapping[int, Identity]]:
    """What this group is told, and the first ranks of the others."""
    try:
        place = Speaker(store, group.info, name, size, timeout, lambda: group.check_whole(_OP)).find()
    except PhalanxError as error:
        kind = type(error).__name__
        return Merger(kind=kind, code=error.code, message=error.message, hint=error.hint or ""), {}
    return Merger(place.prefix, place.first), place.others


def _decline(group: Group, store: Store, info: GroupInfo, prefix: str, timeout: float, error: BaseException) -> None:
    """Tells the ranks of the other groups, which make the merged group `info`, that this group does not come."""
    reason = error.message if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
    lost = PeerLost(
        f"group {group.info.name!r} could not be merged: {reason}",
        group=info.name,
        rank=info.rank,
        op=_OP,
        hint=error.hint if isinstance(error, PhalanxError) else f"look for an error in group {group.info.name!r}",
    )
    peer = error.peer if isinstance(error, PeerLost) else None
    lost.peer = info.rank + (peer or 0)
    Group.decline(PrefixStore(prefix, store), info, timeout, lost)
