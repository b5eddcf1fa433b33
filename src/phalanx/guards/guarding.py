"""Makes guards: for one group, or for every group that the program makes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, ProcessGroup

from phalanx.errors import CallTimeout, GroupError, InvalidCall, PhalanxError
from phalanx.group import endings
from phalanx.group.process_group import ProcessGroup as PhalanxGroup
from phalanx.group.torch_compat.groups import default_group
from phalanx.group.torch_compat.replacing import (
    members_of,
    name_of,
    replace,
    store_of,
    timeout_of,
    wrap_making,
)
from phalanx.group.torch_compat.standing_in import num_calls
from phalanx.guards import watch
from phalanx.guards.calls import GuardedCalls
from phalanx.guards.engines import engine_of, needs_guard
from phalanx.guards.guarded import GuardedGroup
from phalanx.log import logger
from phalanx.transports import posting
from phalanx.transports.identities import process_namespace
from phalanx.transports.posting import PostedCalls
from phalanx.types import GroupInfo, Store

__all__ = ["guard", "guard_all"]

# Seconds that ranks wait for each other when a guard is made, at most.
_PATIENCE = 30.0
_SCOPE = "phalanx/guard"
# Groups for whose guard not all ranks came.
_was_let_down: list[str] = []
# Groups that are guarded already, or compare their calls themselves.
_OURS = (GuardedGroup, PhalanxGroup)


def guard(group: ProcessGroup | None = None) -> ProcessGroup:
    """Guards a group of another backend: its calls are compared across the ranks, and its hangs and deaths explained.

    All ranks of the group call this, when no call of the group is under way. Returns the guarded group, which takes the
    place of the plain one in torch.distributed: without `group` that is the default group. A group that is guarded
    already, or that is Phalanx' own, is returned as it is. If not all ranks of the group come, a warning names them and
    the plain group is returned.
    """
    found = default_group() if group is None else group
    if isinstance(found, _OURS):
        return found
    if not isinstance(found, ProcessGroup):
        raise InvalidCall(
            f"expected a process group of torch.distributed, got {found!r}",
            code="INVALID:GROUP",
            op="guard",
            hint="call init_process_group first, or pass what new_group returned",
        )
    store = store_of(found)
    if store is None:
        raise InvalidCall(
            "expected a group that torch.distributed has made, got one that it does not know",
            code="INVALID:GROUP",
            op="guard",
            hint="pass the default group, or what new_group returned",
        )
    made = _guard(found, store, timeout_of(found), members_of(found), was_used=True)
    if made is not found:
        replace(found, made)
    return made


def guard_all() -> None:
    """From now on every group that torch.distributed makes is guarded. Calling it again changes nothing."""
    wrap_making(_guard)


def _patience(seconds: float) -> float:
    """How long to wait for the other ranks: much less than a call of theirs waits for this one."""
    # Where a rank makes no guards it makes none of any group.
    return min(seconds / 4, 1.0 if _was_let_down else _PATIENCE)


def _guard(
    group: ProcessGroup, store: Store, timeout: timedelta | None, members: list[int], was_used: bool = False
) -> ProcessGroup:
    """The guarded group; the same one where it needs no guard, or where the ranks do not come together for it."""
    if isinstance(group, _OURS) or not needs_guard(group):
        return group
    seconds = (timeout or timeout_of(group)).total_seconds()
    info = GroupInfo(name_of(group), group.rank(), group.size(), members)
    calls = GuardedCalls(group, info, engine_of(group, store), seconds)
    info.engine = calls.engine.name
    own_store = PrefixStore(_SCOPE, store)
    if was_used:
        own_store.set(f"calls/{info.rank}", str(num_calls(group)))
    try:
        methods = calls.begin(*_meet(calls, own_store, _patience(seconds)))
    except (PhalanxError, RuntimeError, OSError) as error:
        logger.warning("group %r is not guarded: %s", info.name, error)
        if isinstance(error, CallTimeout):
            _was_let_down.append(info.name)
        return group
    if was_used:
        _check_idle(calls, own_store)
    endings.enter(calls.posted)
    watch.look_after(calls)

    def guard_made(other: ProcessGroup) -> ProcessGroup:
        return _guard(other, other.get_group_store(), timeout_of(other), members_of(other))

    return GuardedGroup.of(calls, methods, guard_made)


def _meet(calls: GuardedCalls, store: Store, patience: float) -> tuple[PostedCalls, list[int]]:
    """The ranks of the group, or those of them on this host, and which ranks of the group they are."""
    info, engine = calls.info, calls.engine
    join = partial(
        posting.join,
        timeout=patience,
        on_failure=calls.on_failure,
        engine=engine.name,
        matches_tags=engine.matches_tags,
    )
    try:
        return join(store, info), list(range(info.size))
    except GroupError as error:
        if error.code != "GROUP:NOT_SHARED":
            raise
    # All ranks are told so, and come here.
    keys = [f"hosts/{rank}" for rank in range(info.size)]
    own = process_namespace()
    store.set(keys[info.rank], own)
    store.wait(keys, timedelta(seconds=patience))
    here = [rank for rank, key in enumerate(keys) if store.get(key).decode() == own]
    near = GroupInfo(info.name, here.index(info.rank), len(here), [info.members[rank] for rank in here])
    near.engine = info.engine
    logger.warning(
        "group %r spans several hosts: the calls of %s are compared, which share this one",
        info.name,
        info.describe(*here),
    )
    return join(PrefixStore(f"host of {here[0]}", store), near), here


def _check_idle(calls: GuardedCalls, store: Store) -> None:
    """Raises if only some ranks have made a call."""
    info = calls.info
    counts = [int(store.get(f"calls/{rank}")) for rank in range(info.size)]
    if len(set(counts)) == 1:
        return
    calls.posted.close()
    made = ", ".join(f"{info.describe(rank)}: {count}" for rank, count in enumerate(counts))
    raise InvalidCall(
        f"expected a group without calls under way, got one whose ranks have made different numbers of calls ({made})",
        code="INVALID:PENDING",
        group=info.name,
        rank=info.rank,
        op="guard",
        hint="guard the group on every rank at the same place, before its first call or after a barrier",
    )
