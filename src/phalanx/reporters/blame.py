"""The cause of a failure, in words."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.debug.causes import Absence, Cause, Circle, End, FirstFailure, Wait
from phalanx.debug.job import Disagreement, Member, Process
from phalanx.debug.records import RUNNING, Record
from phalanx.reporters.wording import (
    Clock,
    call_text,
    group_text,
    place_text,
    processes_text,
    ranks_text,
    signature_text,
)

__all__ = ["cause_lines"]

# What is left out is counted.
_MOST_LINES = 8


def cause_lines(cause: Cause, clock: Clock) -> list[str]:
    first, *more = _lines(cause, clock)
    left = len(more) - _MOST_LINES
    return [f"Earliest cause: {first}", *(f"  {line}" for line in more[:_MOST_LINES])] + (
        [f"  and {left} more lines like these"] if left > 0 else []
    )


def _lines(cause: Cause, clock: Clock) -> list[str]:
    match cause:
        case Disagreement():
            sides = [f"{ranks_text(ranks)} made {call.op}{signature_text(call)}" for call, ranks in cause.sides]
            return [f"ranks disagree about seq {cause.seq} of {group_text(cause.group)}", *sides]
        case Absence():
            return [_absence(cause, clock)]
        case Circle():
            ranks = sorted(wait.member.rank for wait in cause.waits)
            return [f"{ranks_text(ranks)} wait for each other", *map(_wait, cause.waits)]
        case End():
            return [_end(cause, clock)]
        case FirstFailure():
            return [f"{_call_of(cause.call)}, failed first, on rank {cause.member.rank}; the boxes do not tell why"]


def _absence(cause: Absence, clock: Clock) -> str:
    call = f"{call_text(cause.call)}, of {group_text(cause.group)}"
    who, waiting = _endings(cause.missing), ranks_text(cause.waiting)
    if any(member.reached >= cause.call.seq for member in cause.missing) and not cause.call.is_message:
        return f"{who} in {call}, which then failed on {waiting}"
    is_one = len(cause.missing) == 1
    wait = "waited"
    if clock.is_live and cause.call.state != "failed":
        wait = "waits" if len(cause.waiting) == 1 else "wait"
    if cause.call.is_message:
        text = f"{who}; {waiting} {wait} for {'it' if is_one else 'them'} in {call}"
    else:
        goes_on = any(member.process and member.process.ending == RUNNING for member in cause.missing)
        has = ("has" if is_one else "have") if goes_on else "had"
        text = f"{who}; {'it' if is_one else 'they'} {has} not begun {call}, for which {waiting} {wait}"
    return text + (_meanwhile(cause.missing[0], cause.meanwhile, clock) if is_one else "")


def _endings(members: Sequence[Member]) -> str:
    by_ending: dict[str, list[Process]] = {}
    for member in members:
        if member.process:
            by_ending.setdefault(member.process.ending, []).append(member.process)
    parts = []
    for ending, processes in by_ending.items():
        are = ("is " if len(processes) == 1 else "are ") if ending == RUNNING else ""
        parts.append(f"{processes_text(processes)} {are}{ending}")
    unknown = [member.rank for member in members if member.process is None]
    if unknown:
        parts.append(f"{ranks_text(unknown)} {'has' if len(unknown) == 1 else 'have'} no black box here")
    return " and ".join(parts)


def _meanwhile(member: Member, call: Record | None, clock: Clock) -> str:
    """Where the missing rank is, or was."""
    is_running = member.process is not None and member.process.ending == RUNNING
    if call is not None:
        return f"; it {'is' if is_running else 'was'} in {_call_of(call)}"
    if member.refused:
        return f"; it came when the group was broken already, {clock.ago(member.refused.created_ns)}"
    if is_running and member.last:
        return f"; its last completed call is {_call_of(member.last)}, {clock.ago(member.last.last_ns)}"
    return ""


def _wait(wait: Wait) -> str:
    return f"rank {wait.member.rank} for {ranks_text([peer.rank for peer in wait.peers])} in {_call_of(wait.call)}"


def _end(cause: End, clock: Clock) -> str:
    who = f"{processes_text([cause.process])} {cause.process.ending}"
    completed = [record for record in cause.process.box.records if record.state == "completed"]
    if not completed:
        return f"{who} before it had completed a call"
    return f"{who}; its last completed call is {_call_of(completed[-1])}, {clock.ago(completed[-1].last_ns)}"


def _call_of(call: Record) -> str:
    return f"{call_text(call)}, of group {call.group.name!r}{place_text(call)}"
