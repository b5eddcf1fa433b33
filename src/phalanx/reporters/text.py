"""A report as lines of text: how the processes of a job ended, where they are in each group, and what came first.

Pure functions. Ranks of which the same is to be said share a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.debug.causes import find_cause
from phalanx.debug.evidence import Written
from phalanx.debug.fates import failures_of, fates_of
from phalanx.debug.job import (
    JobGroup,
    JobMember,
    Process,
    find_disagreement,
    groups_of,
    newest_processes,
    num_groups,
    with_deaths,
)
from phalanx.debug.records import DIED, ENDED_WELL, FAILED, RUNNING, Record
from phalanx.reporters.blame import cause_lines
from phalanx.reporters.wording import (
    Clock,
    call_text,
    group_text,
    place_text,
    processes_text,
    ranks_text,
    signature_text,
)

__all__ = ["report_lines"]

_ENDINGS = (DIED, FAILED, RUNNING, ENDED_WELL)
# What is left out is counted.
_MOST_LINES = 20
_MOST_GROUPS = 20
_MOST_QUIET = 3
_MOST_TEXT = 40


def report_lines(
    title: str,
    processes: Sequence[Process],
    now_ns: int,
    written: Written | None = None,
    problems: Sequence[str] = (),
) -> list[str]:
    """`problems` are what could not be read."""
    newest = with_deaths(newest_processes(processes))
    groups = groups_of(newest)
    is_live = any(process.ending == RUNNING for process in newest)
    end_ns = now_ns if is_live else max((process.box.last_ns for process in newest), default=0)
    clock = Clock(end_ns, is_live, fates_of(newest, failures_of(groups)))
    lines = _headline(title, newest, clock)
    boxes = {id(process.box) for process in newest}
    older = [process for process in processes if id(process.box) not in boxes]
    if older:
        lines.append(f"  left out: {processes_text(older)}, of which there are newer processes")
    lines += [f"  left out: {problem}" for problem in problems[:_MOST_LINES]]
    if (left := len(problems) - _MOST_LINES) > 0:
        lines.append(f"  left out: {left} more {'file' if left == 1 else 'files'} like these")
    if (left := num_groups(newest) - len(groups)) > 0:
        lines.append(f"  left out: {left} {'group' if left == 1 else 'groups'}, more than a report has room for")
    lines += _all_groups(groups, clock)
    lines += _written(written)
    cause = find_cause(newest, groups, clock.end_ns)
    return lines + (cause_lines(cause, clock) if cause else ["Nothing is wrong, as far as the boxes tell."])


def _headline(title: str, processes: Sequence[Process], clock: Clock) -> list[str]:
    num = sum(process.box.rank >= 0 for process in processes)
    size = max((process.box.world_size for process in processes), default=0)
    ranks = f"{num} of {size} ranks" if num < size else "1 rank" if num == 1 else f"{num} ranks"
    if num < len(processes):
        without = len(processes) - num
        ranks += f", {without} {'process' if without == 1 else 'processes'} without a rank"
    present: dict[str, list[Process]] = {}
    for process in sorted(processes, key=lambda process: _ENDINGS.index(process.ending)):
        present.setdefault(clock.ending_of(process), []).append(process)
    if len(present) == 1:
        return [f"{title}: {ranks}, {'' if len(processes) == 1 else 'all '}{next(iter(present))}"]
    counts = ", ".join(f"{len(found)} {ending}" for ending, found in present.items())
    return [f"{title}: {ranks}, {counts}"] + [
        f"  {processes_text(found)}: {ending}" for ending, found in present.items()
    ]


def _all_groups(groups: Sequence[JobGroup], clock: Clock) -> list[str]:
    """Those in which something is wrong or under way; of the quiet ones those that were used last."""
    busy = [group for group in groups if not group.is_quiet]
    quiet = sorted((group for group in groups if group.is_quiet), key=lambda group: -group.last_ns)
    shown = busy[:_MOST_GROUPS] + quiet[:_MOST_QUIET]
    lines = [line for group in shown for line in _group(group, clock)]
    for left, what in ((len(busy) - _MOST_GROUPS, "under way"), (len(quiet) - _MOST_QUIET, "all done")):
        if left > 0:
            lines.append(f"{left} more {'group' if left == 1 else 'groups'}: {what}")
    return lines


class _Line(NamedTuple):
    """What is said of a rank. Lines that differ in time only are one."""

    before: str
    time: str
    after: str
    ns: int


def _group(group: JobGroup, clock: Clock) -> list[str]:
    said: dict[tuple[str, str], list[tuple[int, _Line]]] = {}
    for member in group.members:
        for line in _member(group, member, clock):
            said.setdefault((line.before, line.after), []).append((member.rank, line))
    guarded = f" of {group.engine}, guarded" if group.engine else ""
    lines = [f"{group_text(group)}{guarded}, {ranks_text(group.ranks)}"]
    for same in list(said.values())[:_MOST_LINES]:
        first = min((line for _, line in same), key=lambda line: line.ns)
        lines.append(f"  {ranks_text([rank for rank, _ in same])}: {first.before}{first.time}{first.after}")
    if len(said) > _MOST_LINES:
        ranks = sorted({rank for same in list(said.values())[_MOST_LINES:] for rank, _ in same})
        lines.append(f"  and {len(said) - _MOST_LINES} more lines, of {ranks_text(ranks)}")
    disagreement = find_disagreement(group)
    if disagreement is not None:
        lines.append(f"  seq {disagreement.seq} is not the same call on all ranks:")
        for call, ranks in disagreement.sides:
            lines.append(f"    {ranks_text(ranks)}: {call.op}{signature_text(call)}{place_text(call)}")
    return lines


def _member(group: JobGroup, member: JobMember, clock: Clock) -> list[_Line]:
    process = member.process
    if process is None:
        return [_Line("no black box here", "", "", 0)]
    behind = "behind; " if member.reached < group.reached and not member.is_hidden else ""
    lines = []
    if member.is_hidden and member.records:
        lines.append(_hidden(member, process))
    elif member.current:
        more = f", {member.num_queued} more queued" if member.num_queued else ""
        lines.append(_under_way(behind, member.current, process, clock, more))
    elif member.refused:
        call = member.refused
        text = f"{behind}came to {call_text(call)}{signature_text(call)}, when the group was broken already, "
        lines.append(_Line(text, clock.ago(call.created_ns), place_text(call), call.created_ns))
    elif member.last:
        lines.append(_done("last completed:" if behind else "done with", behind, member.last, clock))
    elif behind:
        text = "has not come" if group.is_making else "behind; no collective of this group yet"
        lines.append(_Line(text, "", "", 0))
    if member.message:
        more = f", {member.num_open - 1} more under way" if member.num_open > 1 else ""
        lines.append(_under_way("", member.message, process, clock, more))
    elif member.last_message and not group.reached:
        lines.append(_done("done with", "", member.last_message, clock))
    return lines or [_Line("no call of this group yet", "", "", 0)]


def _hidden(member: JobMember, process: Process) -> _Line:
    """Of a rank whose first calls in flight have no records any more."""
    seqs = [record.seq for record in member.records if not record.is_message]
    queued = f"; seq {min(seqs)} to {max(seqs)} are queued" if seqs else ""
    text = (
        f"in a call whose record was overwritten: the black box keeps {process.box.capacity} calls, more are in flight"
    )
    return _Line(text, "", queued, 0)


def _under_way(behind: str, call: Record, process: Process, clock: Clock, more: str) -> _Line:
    what = "failed in" if call.state == "failed" else "in"
    text = f"{behind}{what} {call_text(call)}{signature_text(call)}, "
    return _Line(text, clock.time_in(call, process), place_text(call) + more, call.created_ns)


def _done(what: str, behind: str, call: Record, clock: Clock) -> _Line:
    text = f"{behind}{what} {call_text(call)}{place_text(call)}, "
    return _Line(text, clock.ago(call.last_ns), "", call.last_ns)


def _written(written: Written | None) -> list[str]:
    if written is None:
        return []
    lines, others = written.text.rstrip().splitlines(), written.num_others
    left = len(lines) - _MOST_TEXT
    more = f" ({others} more {'report' if others == 1 else 'reports'} in the folder)" if others else ""
    return (
        [f"{written.name} says{more}:"]
        + [f"  {line}" for line in lines[:_MOST_TEXT]]
        + ([f"  and {left} more lines"] if left > 0 else [])
    )
