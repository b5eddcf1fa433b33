"""Why a job stopped, as far as its black boxes tell. Looked for in this order:

1. A disagreement about a call, or a rank that died or failed while others waited for it: the earlier one.
2. A rank that others wait for although it goes on, or ended well.
3. Ranks that wait for each other.
4. A process that died or failed by itself.
5. The first call that failed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.debug.job import Disagreement, Group, Member, Process, find_disagreement
from phalanx.debug.records import DIED, RUNNING, Record
from phalanx.types import NO_ROOT

__all__ = ["Absence", "Cause", "Circle", "End", "FirstFailure", "Wait", "find_cause"]

# A running process that waits no longer than this is no reason to worry.
_PATIENCE_NS = 1_000_000_000
# The others of these wait for the root alone, as long as it is not there.
_ROOT_FIRST = ("broadcast", "scatter")


@dataclass(slots=True, eq=False)
class Wait:
    """A call that can't go on, or could not, without others."""

    group: Group
    member: Member
    call: Record
    peers: list[Member]
    # The call failed before its time was up: these are to blame, whatever they themselves wait for.
    is_proof: bool = False


@dataclass(slots=True, eq=False)
class Absence:
    """Ranks that others waited for in a call."""

    group: Group
    call: Record
    waiting: list[int]
    missing: list[Member]
    meanwhile: Record | None = None  # what the missing rank is in


@dataclass(slots=True, eq=False)
class Circle:
    """Ranks that wait for each other, each for the next one."""

    waits: list[Wait]


@dataclass(slots=True, eq=False)
class End:
    """A process that died or failed by itself."""

    process: Process


@dataclass(slots=True, eq=False)
class FirstFailure:
    """A call that failed, nobody knows why."""

    group: Group
    member: Member
    call: Record


Cause = Disagreement | Absence | Circle | End | FirstFailure


def find_cause(processes: Sequence[Process], groups: Sequence[Group], now_ns: int) -> Cause | None:
    """None where nothing is wrong."""
    # Nobody comes to a call of a group in which ranks have disagreed.
    disagreements = {id(group): found for group in groups if (found := find_disagreement(group))}
    waits = [wait for group in groups if id(group) not in disagreements for wait in _waits_of(group, now_ns)]
    absence = _absence_of(waits)
    first = min(disagreements.values(), key=lambda found: found.ns, default=None)
    if first is not None and (absence is None or first.ns <= _broke_off_ns(absence)):
        return first
    if absence is not None:
        absence.meanwhile = _oldest_call(groups, absence.missing)
        return absence
    return _circle_of(waits) or _end_of(processes) or _first_failure(groups)


def _waits_of(group: Group, now_ns: int) -> list[Wait]:
    by_rank = {member.rank: member for member in group.members}
    waits = []
    for member in group.members:
        for call in (member.current, member.message):
            if call is None or _is_young(member, call, now_ns):
                continue
            missing = _missing(by_rank, member, call)
            gone = _gone(group, missing) if _failed_early(call) else []
            if gone or missing:
                waits.append(Wait(group, member, call, gone or missing, is_proof=bool(gone)))
    return waits


def _is_young(member: Member, call: Record, now_ns: int) -> bool:
    is_running = member.process is not None and member.process.ending == RUNNING
    return is_running and call.state != "failed" and now_ns - _begin_ns(call) < _PATIENCE_NS


def _failed_early(call: Record) -> bool:
    """Whether the call failed although its time was not up."""
    if call.state != "failed" or call.ended_ns is None:
        return False
    return not call.timeout_ms or call.ended_ns - call.created_ns < call.timeout_ms * 1_000_000


def _gone(group: Group, missing: Sequence[Member]) -> list[Member]:
    """Who may have broken the group. Whoever saw that it was broken has not."""
    unseen = [member for member in group.members if not member.refused and not _saw_failure(member)]
    return [member for member in unseen if member in missing and member.has_broken_off] or [
        member for member in unseen if member.process and member.process.ending == DIED
    ]


def _saw_failure(member: Member) -> bool:
    return any(call is not None and call.state == "failed" for call in (member.current, member.message))


def _missing(members: dict[int, Member], member: Member, call: Record) -> list[Member]:
    """The ranks that are not in the call, as far as it needs them; if none, those of whom nothing is known."""
    if call.is_message:
        peer = members.get(call.group.rank_in_job(call.peer)) if call.peer >= 0 else None
        return [peer] if peer is not None and not _answers(peer, call) else []
    others = [other for other in members.values() if other is not member and other.reached < call.seq]
    root = call.group.rank_in_job(call.peer)
    if call.op in _ROOT_FIRST and any(other.rank == root for other in others):
        return [members[root]]
    return [other for other in others if other.process] or others


def _answers(peer: Member, call: Record) -> bool:
    """Whether the peer has the other side of a message, not completed either."""
    op = "recv" if call.op == "send" else "send"
    return any(
        record.op == op
        and record.state != "completed"
        and record.tag == call.tag
        and record.peer in (NO_ROOT, call.group.rank)
        for record in peer.records
    )


def _absence_of(waits: Sequence[Wait]) -> Absence | None:
    """Follows who waits for whom to those who wait for nobody."""
    proofs = [wait for wait in waits if wait.is_proof]
    # A rank with an asynchronous call under way may be anywhere; one in a synchronous call is there.
    synchronous = [wait for wait in waits if not wait.call.is_async]
    for trusted in (proofs, synchronous, waits):
        waiting = {wait.member.rank for wait in trusted} if trusted is not proofs else set()
        ends = [wait for wait in trusted if any(peer.rank not in waiting for peer in wait.peers)]
        if ends:
            first = min(ends, key=lambda wait: _begin_ns(wait.call))
            missing = [peer for peer in first.peers if peer.rank not in waiting]
            same = {wait.member.rank for wait in waits if wait.group is first.group and _is_same(wait.call, first.call)}
            return Absence(first.group, first.call, sorted(same - {peer.rank for peer in missing}), missing)
    return None


def _broke_off_ns(absence: Absence) -> float:
    """When the first of those that died or failed was last heard of."""
    processes = [member.process for member in absence.missing if member.process and member.process.has_broken_off]
    return min((process.box.last_ns for process in processes), default=math.inf)


def _is_same(one: Record, other: Record) -> bool:
    return one is other or (not one.is_message and not other.is_message and one.seq == other.seq)


def _oldest_call(groups: Sequence[Group], missing: Sequence[Member]) -> Record | None:
    """What the one rank that is missing is in, in whatever group."""
    if len(missing) != 1:
        return None
    members = [member for group in groups for member in group.members if member.rank == missing[0].rank]
    calls = [call for member in members for call in (member.current, member.message) if call is not None]
    return min(calls, key=_begin_ns, default=None)


def _circle_of(waits: Sequence[Wait]) -> Circle | None:
    """For waits of which each is for somebody who waits."""
    by_rank = {wait.member.rank: wait for wait in reversed(waits)}
    if not by_rank:
        return None
    way = [min(by_rank)]
    while (peer := by_rank[way[-1]].peers[0].rank) not in way:
        way.append(peer)
    return Circle([by_rank[rank] for rank in way[way.index(peer) :]])


def _end_of(processes: Sequence[Process]) -> End | None:
    ended = [process for process in processes if process.has_broken_off]
    # One that failed in a call did so because of it.
    outside = [process for process in ended if all(record.state == "completed" for record in process.box.records)]
    ended = outside or [process for process in ended if process.ending == DIED]
    return End(min(ended, key=lambda process: process.box.last_ns)) if ended else None


def _first_failure(groups: Sequence[Group]) -> FirstFailure | None:
    failures = [
        FirstFailure(group, member, call)
        for group in groups
        for member in group.members
        for call in (member.current, member.refused, member.message)
        if call is not None and call.state == "failed"
    ]
    return min(failures, key=lambda failure: failure.call.last_ns, default=None)


def _begin_ns(call: Record) -> int:
    return call.started_ns or call.created_ns
