"""Why a job stopped, as far as its black boxes tell.

The earliest of these is the cause:

- ranks disagree about a call;
- a process fails by itself: it raises, is killed, or exits with a code, and no failure that it knew of came before;
- a rank leaves its group, or exits, while others need it;
- a call gives up at its timeout: then the ranks that it waited for, as of that moment. Who waits for whom is followed
  to ranks that wait for nobody, or round a circle.

Failures that follow from others are left out by what their processes knew, and by time: a rank that was alive when
others gave up, or that a launcher ended afterwards, is not the cause.

Where nothing is dated (the job hangs, or its boxes are of version 1), the order of looking is: a disagreement, ranks
that others wait for, a circle, a process that ended, the first call that failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from phalanx import _native
from phalanx.debug.fates import Fate, GroupFailure, failures_of, fates_of
from phalanx.debug.job import Disagreement, JobGroup, JobMember, Process, find_disagreement, groups_of
from phalanx.debug.moments import as_of
from phalanx.debug.records import ABORTED, DIED, LEFT, LOST, RUNNING, TIMEOUT, Record

__all__ = ["Absence", "Cause", "Circle", "End", "FirstFailure", "Hidden", "Wait", "find_cause"]

# A running process that waits no longer than this is no reason to worry.
_PATIENCE_NS = 1_000_000_000


@dataclass(slots=True, eq=False)
class Wait:
    """A call that can't go on, or could not, without others."""

    group: JobGroup
    member: JobMember
    call: Record
    peers: list[JobMember]
    # The call failed before its time was up: these are to blame, whatever they themselves wait for.
    is_proof: bool = False


@dataclass(slots=True, eq=False)
class Absence:
    """Ranks that others waited for in a call."""

    group: JobGroup
    call: Record
    waiting: list[int]
    missing: list[JobMember]
    meanwhile: Record | None = None  # what the missing rank is in
    is_over: bool = False  # the missing ranks were alive then, and the job has ended since
    timed_out: bool = False  # those who waited gave up at their timeout
    has_left: bool = False  # the missing rank left the group, and its process went on


@dataclass(slots=True, eq=False)
class Circle:
    """Ranks that wait for each other, each for the next one."""

    waits: list[Wait]
    is_over: bool = False


@dataclass(slots=True, eq=False)
class End:
    """A process that died or failed by itself."""

    process: Process
    fate: Fate | None = None
    # A call that needed it, and the ranks that made it.
    absence: Absence | None = None
    # Those that the same signal ended afterwards, where it ended all.
    others: list[Process] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FirstFailure:
    """A call that failed, nobody knows why."""

    group: JobGroup
    member: JobMember
    call: Record
    aborted_by: int | None = None


@dataclass(slots=True, eq=False)
class Hidden:
    """Who is behind can't be told: the records of calls in flight were overwritten."""

    group: JobGroup
    members: list[JobMember]


Cause = Disagreement | Absence | Circle | End | FirstFailure | Hidden


def find_cause(processes: Sequence[Process], groups: Sequence[JobGroup], now_ns: int) -> Cause | None:
    """None where nothing is wrong."""
    # Nobody comes to a call of a group in which ranks have disagreed.
    disagreements = {id(group): found for group in groups if (found := find_disagreement(group))}
    failures = failures_of(groups)
    fates = fates_of(processes, failures)
    dated: list[tuple[float, Disagreement | Fate | GroupFailure]] = [
        *((found.ns, found) for found in disagreements.values()),
        *((fate.ns, fate) for fate in fates.values() if fate.is_failure and not fate.is_consequence),
    ]
    for failure in failures:
        if id(failure.group) not in disagreements:
            dated += _causes_of_failure(failure, fates, processes)
    first = min(dated, key=lambda each: each[0], default=None)
    # Boxes without dates may know of something before a disagreement.
    has_dates = bool(failures) or any(fate.ns < math.inf for fate in fates.values())
    if first is not None and first[0] < math.inf and has_dates:
        return _explain(first[1], processes, groups, fates)
    return _find_undated(processes, groups, disagreements, fates, now_ns)


def _causes_of_failure(
    failure: GroupFailure, fates: dict[int, Fate], processes: Sequence[Process]
) -> Iterator[tuple[float, Fate | GroupFailure]]:
    """What a failed group points to, unless that follows from something else."""
    if failure.call.failure not in (LEFT, LOST):
        yield failure.ns, failure
        return
    fate = fates.get(failure.blamed if failure.blamed is not None else _native.NO_RANK)
    if fate is not None and fate.ns <= failure.ns:
        if not fate.is_consequence:
            yield fate.ns, fate
        return
    # It left, and its process went on.
    left = next((process for process in processes if process.box.rank == failure.blamed), None)
    if left is not None and left.box.knew_failure(failure.ns):
        return
    if fate is not None and not fate.is_consequence and _gave_up_making(failure):
        yield failure.ns, fate
    else:
        yield failure.ns, failure


def _gave_up_making(failure: GroupFailure) -> bool:
    """Whether the blamed rank had come to make the group, and stopped for a reason of its own: it is ending since."""
    return failure.group.is_making and any(
        _is_own_end(record)
        for member in failure.group.members
        if member.rank == failure.blamed
        for record in member.records
    )


def _explain(
    found: Disagreement | Fate | GroupFailure,
    processes: Sequence[Process],
    groups: Sequence[JobGroup],
    fates: dict[int, Fate],
) -> Cause:
    match found:
        case Disagreement():
            return found
        case Fate():
            return _explain_end(found, processes, groups, fates)
        case GroupFailure():
            return _explain_failure(found, processes, fates)


def _explain_end(fate: Fate, processes: Sequence[Process], groups: Sequence[JobGroup], fates: dict[int, Fate]) -> Cause:
    rank = fate.process.box.rank
    others = [each for each in fates.values() if each is not fate]
    is_all = fate.was_terminated and all(each.signal == fate.signal or each.is_unseen for each in others)
    is_all = is_all and len(fates) == len(processes) > 1
    if is_all:
        # The whole job was ended, maybe because it hung.
        hang = _hang_at(processes, int(fate.ns), _PATIENCE_NS)
        if hang is not None and not (isinstance(hang, Absence) and rank in {member.rank for member in hang.missing}):
            return hang
    end = End(fate.process, fate, _absence_because_of(rank, groups))
    if is_all:
        end.others = sorted((each.process for each in others), key=lambda process: process.box.rank)
    return end


def _explain_failure(failure: GroupFailure, processes: Sequence[Process], fates: dict[int, Fate]) -> Cause:
    """Of a group that failed by a timeout, by an abort, or because a rank left it."""
    group, call = failure.group, failure.call
    member = next(member for member in group.members if call in member.records)
    if call.failure in (LEFT, LOST) and failure.blamed is not None:
        found = _absence_because_of(failure.blamed, [group])
        if found is not None:
            found.has_left = True
            return found
    if call.failure == TIMEOUT:
        hang = _hang_at(processes, failure.ns, 0)
        if isinstance(hang, Absence):
            hang.timed_out = hang.group.identity == group.identity and _is_same(hang.call, call)
        if hang is not None:
            return hang
    fate = fates.get(member.rank)
    if group.is_making and fate is not None and fate.exception:
        # Ranks can't make the group together; its text says why.
        return End(fate.process, fate)
    return FirstFailure(group, member, call, failure.blamed if call.failure == ABORTED else None)


def _hang_at(processes: Sequence[Process], ns: int, patience_ns: int) -> Absence | Circle | None:
    """For whom ranks waited at that moment."""
    groups = groups_of(as_of(processes, ns))
    waits = [wait for group in groups for wait in _waits_of(group, ns, patience_ns)]
    absence = _absence_of(waits)
    if absence is not None:
        # How they ended since is told by the processes of now.
        now = {process.box.rank: process for process in processes}
        absence.meanwhile = _oldest_call(groups, absence.missing)
        for member in absence.missing:
            member.process = now.get(member.rank)
        absence.is_over = True
        return absence
    circle = _circle_of(waits)
    if circle is not None:
        circle.is_over = True
    return circle


def _absence_because_of(rank: int, groups: Sequence[JobGroup]) -> Absence | None:
    """The first call that failed, or can't go on, without this rank."""
    found: list[tuple[JobGroup, JobMember, Record]] = []
    for group in groups:
        gone = next((member for member in group.members if member.rank == rank), None)
        if gone is None:
            continue
        by_rank = {member.rank: member for member in group.members}
        for member in group.members:
            for call in (member.current, member.message):
                if member is gone or call is None:
                    continue
                is_blamed = call.failure in (LEFT, LOST) and call.group.rank_in_job(call.blamed) == rank
                if is_blamed or gone in _missing(by_rank, member, call):
                    found.append((group, gone, call))
    if not found:
        return None
    group, gone, first = min(found, key=lambda each: _begin_ns(each[2]))
    waiting = [
        member.rank
        for member in group.members
        for call in (member.current, member.message)
        if member is not gone and call is not None and _is_same(call, first)
    ]
    return Absence(group, first, sorted(set(waiting)), [gone])


def _find_undated(
    processes: Sequence[Process],
    groups: Sequence[JobGroup],
    disagreements: dict[int, Disagreement],
    fates: dict[int, Fate],
    now_ns: int,
) -> Cause | None:
    waits = [
        wait for group in groups if id(group) not in disagreements for wait in _waits_of(group, now_ns, _PATIENCE_NS)
    ]
    absence = _absence_of(waits)
    first = min(disagreements.values(), key=lambda found: found.ns, default=None)
    if first is not None and (absence is None or first.ns <= _broke_off_ns(absence)):
        return first
    if absence is not None:
        absence.meanwhile = _oldest_call(groups, absence.missing)
        return absence
    return _circle_of(waits) or _end_of(processes, fates) or _hidden(groups) or _first_failure(groups)


def _hidden(groups: Sequence[JobGroup]) -> Hidden | None:
    group = next((group for group in groups if group.is_hidden), None)
    return None if group is None else Hidden(group, [member for member in group.members if member.is_hidden])


def _waits_of(group: JobGroup, now_ns: int, patience_ns: int) -> list[Wait]:
    by_rank = {member.rank: member for member in group.members}
    waits = []
    for member in group.members:
        for call in (member.current, member.message):
            if call is None or _is_young(member, call, now_ns, patience_ns) or _is_own_end(call):
                continue
            missing = _missing(by_rank, member, call)
            gone = _gone(group, missing) if _failed_early(call) else []
            if gone or missing:
                waits.append(Wait(group, member, call, gone or missing, is_proof=bool(gone)))
    return waits


def _is_young(member: JobMember, call: Record, now_ns: int, patience_ns: int) -> bool:
    is_running = member.process is not None and member.process.ending == RUNNING
    return is_running and call.state != "failed" and now_ns - _begin_ns(call) < patience_ns


def _is_own_end(call: Record) -> bool:
    """Whether it is a making that the rank gave up for a reason of its own: it waits for nobody."""
    return call.is_making and call.state == "failed" and not call.failure


def _failed_early(call: Record) -> bool:
    """Whether the call failed although its time was not up."""
    if call.state != "failed" or call.ended_ns is None:
        return False
    return not call.timeout_ms or call.ended_ns - call.created_ns < call.timeout_ms * 1_000_000


def _gone(group: JobGroup, missing: Sequence[JobMember]) -> list[JobMember]:
    """Who may have broken the group. Whoever saw that it was broken has not."""
    unseen = [member for member in group.members if not member.refused and not _saw_failure(member)]
    return [member for member in unseen if member in missing and member.has_broken_off] or [
        member for member in unseen if member.process and member.process.ending == DIED
    ]


def _saw_failure(member: JobMember) -> bool:
    return any(call is not None and call.state == "failed" for call in (member.current, member.message))


def _missing(members: dict[int, JobMember], member: JobMember, call: Record) -> list[JobMember]:
    """The ranks that are not in the call, as far as it needs them; if none, those of whom nothing is known."""
    if call.is_message:
        peer = members.get(call.group.rank_in_job(call.peer)) if call.peer >= 0 else None
        return [peer] if peer is not None and not _may_answer(peer, call) else []
    others = [
        other for other in members.values() if other is not member and other.reached < call.seq and not other.is_hidden
    ]
    root = call.group.rank_in_job(call.root)
    # The others wait for the root alone, as long as it is not there.
    waits_for_root = not call.is_making and call.traits.others_wait_for == _native.Peers.root
    if waits_for_root and any(other.rank == root for other in others):
        return [members[root]]
    return [other for other in others if other.process] or others


def _may_answer(peer: JobMember, call: Record) -> bool:
    """Whether the peer has the other side of a message, not completed either, or its record was overwritten."""
    if peer.process is not None and peer.process.box.num_hidden:
        return True
    return any(
        record.is_message
        and record.op != call.op
        and record.state != "completed"
        and record.tag == call.tag
        and record.peer in (_native.NO_RANK, call.group.rank)
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


def _oldest_call(groups: Sequence[JobGroup], missing: Sequence[JobMember]) -> Record | None:
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


def _end_of(processes: Sequence[Process], fates: dict[int, Fate]) -> End | None:
    ended = [process for process in processes if process.has_broken_off]
    # One that failed in a call did so because of it.
    outside = [process for process in ended if all(record.state == "completed" for record in process.box.records)]
    ended = outside or [process for process in ended if process.ending == DIED]
    # An exception tells more than nothing, also one that followed from a failure.
    ended = ended or [process for process in processes if process.box.exception]
    if not ended:
        return None
    first = min(ended, key=lambda process: process.box.ended_ns or process.box.last_ns)
    if len(outside) == len(processes) and all(process.ending == DIED for process in outside):
        return End(first, fates.get(first.box.rank), others=[process for process in outside if process is not first])
    return End(first, fates.get(first.box.rank))


def _first_failure(groups: Sequence[JobGroup]) -> FirstFailure | None:
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
