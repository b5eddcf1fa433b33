"""Where ranks are that others wait for: what they say themselves, what their black boxes say, and what the system says
of those who do not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from phalanx import _native
from phalanx.debug.answers import Whereabouts
from phalanx.debug.box_reader import read_box
from phalanx.debug.job_folder import JobFolder
from phalanx.debug.records import Box, Record, is_alive
from phalanx.types import GroupInfo

__all__ = ["MOST_RECORDS", "Asker", "describe_absent", "describe_last_calls", "last_calls"]

_INDENT = "  "
# Seconds: for the answer of the first rank, and for those of all.
_PATIENCE, _LONGEST = 1.0, 2.0
_SHORTEST = 0.05
_MOST_RANKS = 8
_NUM_LAST_CALLS = 3
# Of a box: who is so far behind that it takes more is lost anyway.
MOST_RECORDS = 100
# Of a group, for whom a call waits.
_MOST_LOOKED_AT = 16
_PENDING = ("scheduled", "started")
# Of a rank that gets on, a call that has begun just now says nothing.
_BRIEF_NS = 500_000_000

# Letters of the system for the state of a process.
_STOPPED = "Tt"
_IN_KERNEL = "D"
_GONE = "ZXx"


class _Records(NamedTuple):
    """The calls of a rank since it began to make this rank's groups. Their times are by the box' own clock."""

    calls: list[Record]
    offset_ns: int  # of that clock to the monotonic one


class Asked(Protocol):
    """A group whose ranks can be asked where they are: the native one, or one whose calls are only posted."""

    def ask(self, rank: int, /) -> None: ...
    def answer_of(self, rank: int, seconds: float, /) -> str | None: ...
    def has_left(self, rank: int, /) -> bool: ...
    def box_of(self, rank: int, /) -> str: ...


class Asker(NamedTuple):
    """A group, seen by one of its ranks that waits: what it takes to look for the others."""

    group: Asked
    info: GroupInfo
    identities: Sequence[tuple[int, int, int]]  # of the processes of the ranks: number, start time and program
    own: Box | None
    path_of: Callable[[int], str]  # where the box of a rank of the job is; empty where this rank does not know
    known: dict[str, _Records | None]  # boxes that were read for this report, by their paths
    began_ns: int  # on the monotonic clock, which all processes share: calls before belong to groups that are no more


class _Finding(NamedTuple):
    """What became known of a rank."""

    text: str
    last: Record | None  # the last call that it completed
    stack: list[str]


def describe_absent(
    asker: Asker, op: str, seq: int, missing: Sequence[int], *, stacks: bool, ask: bool = True
) -> list[str]:
    """Lines about ranks that did not come to a call in which this one waits, or has waited.

    Without `ask` they were asked before, and where they were then is what counts.
    """
    lines = []
    call = _Awaited(op, seq, _made_at(asker, op, seq))
    deadline = time.monotonic() + _LONGEST
    for rank in missing[:_MOST_RANKS] if ask else ():
        asker.group.ask(rank)
    for rank in missing[:_MOST_RANKS]:
        if rank == asker.info.rank:
            lines.append(f"{_INDENT}{asker.info.describe(rank)} is this one{_own_call(asker, call)}")
            continue
        patience = max(_SHORTEST, min(_PATIENCE, deadline - time.monotonic()))
        finding = _look_for(asker, rank, call, patience)
        lines.append(f"{_INDENT}{asker.info.describe(rank)} {finding.text}")
        if finding.last is not None:
            lines.append(f"{_INDENT}  its last completed call: {describe_record(finding.last)}")
        if stacks and finding.stack:
            lines.append(f"{_INDENT}  its stack, innermost last:")
            lines += [f"{_INDENT}    {line}" for line in finding.stack]
    if len(missing) > _MOST_RANKS:
        lines.append(f"{_INDENT}and {len(missing) - _MOST_RANKS} more ranks, which were not asked")
    return lines


def last_calls(asker: Asker, rank: int) -> list[str]:
    """Lines about what a rank did last that is gone."""
    calls = describe_last_calls(_records_of(asker, rank).calls)
    if not calls:
        return []
    return [f"{_INDENT}the last calls of {asker.info.describe(rank)}:", *(f"{_INDENT}  {line}" for line in calls)]


def describe_last_calls(records: Sequence[Record]) -> list[str]:
    """A line for each, the last one last."""
    return [f"{describe_record(record)} ({record.state})" for record in records[-_NUM_LAST_CALLS:]]


def describe_record(record: Record) -> str:
    number = f", seq {record.seq}" if record.seq else ""
    whom = ""
    if record.is_message:
        peer = "any rank" if record.peer < 0 else _named(record, record.peer)
        whom = f" {'to' if record.op == 'send' else 'from'} {peer}, tag {record.tag}"
    where = record.location
    place = "" if where is None else f", at {where.describe()}"
    return f"{record.op}{whom}{number}, group {record.group.name!r}{place}"


def _named(record: Record, *ranks: int) -> str:
    """Ranks of the call's group, as people know them."""
    group = record.group
    return GroupInfo(group.name, group.rank, len(group.ranks), group.ranks).describe(*ranks)


class _Awaited(NamedTuple):
    """The call to which ranks did not come, and when this rank made it, on the monotonic clock."""

    op: str
    seq: int
    since_ns: int

    def is_that_of(self, record: Record) -> bool:
        return self.seq == record.seq and not record.is_message and not _native.TRAITS[self.op].is_message


def _own_call(asker: Asker, call: _Awaited) -> str:
    """What this rank was in itself, when others gave up waiting for it."""
    own = [] if asker.own is None else asker.own.records[-1:]
    if own and own[0].state == "failed" and not call.is_that_of(own[0]):
        return f": it waited in {describe_record(own[0])}"
    return ": it came too late"


def _look_for(asker: Asker, rank: int, call: _Awaited, patience: float) -> _Finding:
    records = _records_of(asker, rank)
    completed = [record for record in records.calls if record.state == "completed"]
    last = completed[-1] if completed else None
    pid, start, _ = asker.identities[rank] if asker.identities else (0, 0, 0)
    if (_state_of(pid) or "?") in _STOPPED:
        return _Finding("is stopped (by SIGSTOP, Ctrl-Z or a debugger); SIGCONT lets it go on", last, [])
    is_gone = asker.group.has_left(rank) or _is_dead(pid, start)
    answer = asker.group.answer_of(rank, 0.0 if is_gone else patience)
    if not answer:
        return _Finding(_without_answer(asker, rank), last, [])
    here = Whereabouts.unpack(answer)
    since_ns = call.since_ns + records.offset_ns
    num_since = sum(1 for record in completed if record.created_ns > since_ns)
    # One that has failed meanwhile is what it waited in while this rank waited for it.
    waits = [
        record
        for record in records.calls
        if record.state in _PENDING or (record.state == "failed" and (record.ended_ns or 0) > since_ns)
    ]
    now_ns = time.monotonic_ns() + records.offset_ns
    if here.in_call and waits and not (num_since and now_ns - waits[-1].created_ns < _BRIEF_NS):
        return _Finding(_in_call(asker, waits[-1], call, now_ns), last, here.stack)
    where = f", at {here.where}" if here.where else ""
    if num_since:
        calls = "a call" if num_since == 1 else f"{num_since} calls"
        return _Finding(f"is slow, but alive: it has completed {calls} meanwhile{where}", last, here.stack)
    return _Finding(f"is in its own code{where}", last, here.stack)


def _in_call(asker: Asker, record: Record, call: _Awaited, now_ns: int) -> str:
    """Of a rank that waits in a call itself."""
    seconds = max(0, (record.ended_ns or now_ns) - record.created_ns) / 1e9
    awaited = _awaited(asker, record)
    whom = f" for {_named(record, *awaited)}" if awaited else ""
    text = f"waits{whom} in {describe_record(record)}, for {seconds:.1f} s"
    if record.group.name != asker.info.name:
        if _is_behind(asker.own, record):
            return (
                f"{text}; this rank has not made that call: they use the groups {asker.info.name!r} and "
                f"{record.group.name!r} in different orders"
            )
        return f"is in another group: it {text}"
    if call.is_that_of(record):
        return f"has come by now: it {text}"
    return f"is in another call: it {text}"


def _awaited(asker: Asker, record: Record) -> list[int]:
    """The ranks of the call's group that have not made it, as far as their boxes tell."""
    ranks = record.group.ranks
    if record.is_message or len(ranks) > _MOST_LOOKED_AT:
        return []
    awaited = []
    for rank, world_rank in enumerate(ranks):
        records = _records_at(asker, asker.path_of(world_rank))
        if records is not None and not any(
            call.group.name == record.group.name and not call.is_message and call.seq >= record.seq
            for call in records.calls
        ):
            awaited.append(rank)
    return awaited


def _is_behind(own: Box | None, record: Record) -> bool:
    """Whether this rank is in that group and has not made the call."""
    if own is None or record.is_message:
        return False
    ours = [mine for mine in own.records if mine.group.name == record.group.name and not mine.is_message]
    in_group = own.rank in record.group.ranks
    return in_group and max((mine.seq for mine in ours), default=0) < record.seq


def _without_answer(asker: Asker, rank: int) -> str:
    """What the segment and the system say of a process that does not answer."""
    pid, start, _ = asker.identities[rank] if asker.identities else (0, 0, 0)
    if asker.group.has_left(rank):
        return "has left the group, or ended"
    state = _state_of(pid)
    if (state or "?") in _GONE or _is_dead(pid, start):
        return "is dead"
    if not state:
        return "does not answer, and the system does not show its process from here"
    if state in _IN_KERNEL:
        waits = _read(f"/proc/{pid}/wchan")
        return f"does not answer: it is in the kernel{f' ({waits})' if waits not in ('', '0') else ''}"
    how = "runs" if state == "R" else "sleeps"
    return f"does not answer: it {how} without letting other threads of Python run (in a call into C?)"


def _state_of(pid: int) -> str:
    """The system's letter; empty where it shows none."""
    stat = _read(f"/proc/{pid}/stat") if pid > 0 else ""
    return stat.rpartition(")")[2].strip()[:1]


def _is_dead(pid: int, start: int) -> bool:
    return pid > 0 and not is_alive(pid, start)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _records_of(asker: Asker, rank: int) -> _Records:
    """None where the box is out of reach: on another file system, or in memory."""
    return _records_at(asker, asker.group.box_of(rank)) or _Records([], 0)


def _records_at(asker: Asker, path: str) -> _Records | None:
    if path not in asker.known:
        try:
            box = _read_peer_s_box(Path(path)) if path else None
        except (OSError, ValueError):
            box = None
        asker.known[path] = None if box is None else _newest(asker, box)
    return asker.known[path]


def _read_peer_s_box(path: Path) -> Box:
    with JobFolder.own(path.parent) as folder, folder.open(path.name) as file:
        return read_box(file, MOST_RECORDS)


def _newest(asker: Asker, box: Box) -> _Records:
    offset = box.clock_offset_ns
    return _Records([record for record in box.records if record.created_ns - offset >= asker.began_ns], offset)


def _made_at(asker: Asker, op: str, seq: int) -> int:
    """When this rank made the call, on the monotonic clock, as far as its box knows; else now."""
    own = asker.own
    calls = [] if own is None else [r for r in own.records if (r.group.name, r.op, r.seq) == (asker.info.name, op, seq)]
    return calls[-1].created_ns - own.clock_offset_ns if own is not None and calls else time.monotonic_ns()
