"""How the ranks of a group take part in a merger: the first of them speaks for all and tells them what came of it."""

from __future__ import annotations

from typing import Any

from phalanx import _native
from phalanx.collectives.checks import fail
from phalanx.collectives.numbers import whole
from phalanx.errors import PeerLost, PhalanxError, kind_of
from phalanx.group import names
from phalanx.group.agreeing import check_problems, mismatch
from phalanx.group.group import Group
from phalanx.transports.arrivals import MergerPlan, Speaker
from phalanx.transports.hello import Merger, Wish
from phalanx.transports.lookout import Known
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
    with group.steps(_OP):
        _agree(group, store, size, timeout, name, named)
        told = _find_plan(group, store, size, timeout, name)
    if told.kind:
        raise kind_of(told.kind)(
            told.message, code=told.code, group=info.name, rank=info.rank, op=_OP, seq=group.seq, hint=told.hint
        )
    # Whoever of this group dies now is found dead by the others of it, who tell all. The first ranks are watched by
    # all: with them, all of a group may be gone.
    own = {told.first + rank: identity for rank, identity in enumerate(group.identities)}
    known = Known(
        dict(told.speakers) | own, lambda rank: group.words_of_left(rank - told.first) if rank in own else None
    )
    return Group.join(
        PrefixStore(told.prefix, store), GroupInfo(name, told.first + info.rank, size), timeout, "", known
    )


def _agree(group: Group, store: Store, size: int, timeout: float, name: str, named: bool) -> None:
    """All ranks of this group have come, and want the same."""
    where, _ = _native.origin()
    problem, code = names.describe_taken(name) if named else "", "GROUP:NAME"
    if not isinstance(store, Store):
        problem, code = f"expected a torch.distributed.Store, got {store!r}", "GROUP"
    # A rank that can't take part tells the others, which wait for it.
    wishes = Wish.read_all(group.exchange(_OP, Wish(size, name, where, problem, code).text(), timeout))
    code = next((wish.code for wish in wishes if wish.problem), "")
    hint = "fix what these ranks name, then merge again on all ranks: the group itself still works"
    check_problems(group.info, _OP, group.seq, [wish.problem for wish in wishes], code, hint)
    for rank, wish in enumerate(wishes):
        field = "SIZE" if wish.size != wishes[0].size else "NAME" if wish.name != wishes[0].name else ""
        if field:
            verdict = f"rank {rank} does not want the same group as rank 0"
            passed = [(f"size {one.size} and the name {one.name!r}", one.where) for one in wishes]
            hint = "pass the same size and name on all ranks"
            raise mismatch(group.info, _OP, group.seq, f"MISMATCH:{field}", verdict, passed, hint)


def _find_plan(group: Group, store: Store, size: int, timeout: float, name: str) -> Merger:
    """What the first rank has to tell; on the others, what it has told."""
    info, told, plan = group.info, Merger(), None
    try:
        if info.rank == 0:
            speaker = Speaker(store, info, name, size, timeout, lambda: group.check_whole(_OP))
            try:
                told = _speak(speaker)
            finally:
                plan = speaker.plan
        return Merger.read(group.exchange(_OP, told.text(), timeout + _TO_TELL)[0].encode())
    except BaseException as error:
        if plan is not None:
            # The other groups have gone there, and wait for this one.
            merged = GroupInfo(name, plan.first, size)
            group.decline(PrefixStore(plan.prefix, store), merged, timeout, _not_coming(info, plan, error))
        raise


def _speak(speaker: Speaker) -> Merger:
    try:
        plan = speaker.find()
    except PhalanxError as error:
        if speaker.plan is not None:
            raise
        kind = type(error).__name__
        return Merger(kind=kind, code=error.code, message=error.message, hint=error.hint or "")
    return Merger(plan.prefix, plan.first, plan.speakers)


def _not_coming(info: GroupInfo, plan: MergerPlan, error: BaseException) -> PeerLost:
    reason = error.message if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
    lost = PeerLost(
        f"group {info.name!r} could not be merged: {reason}",
        group=info.name,
        rank=info.rank,
        op=_OP,
        hint="look for an error on the ranks of that group, then merge the others again",
    )
    peer = error.peer if isinstance(error, PeerLost) else info.rank
    lost.peer = plan.first + (info.rank if peer is None else peer)
    return lost
