"""The cause of a failure, in words."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.debug.causes import Absence, Cause, Circle, End, FirstFailure, Hidden, Wait
from phalanx.debug.job import Disagreement, JobMember, Process
from phalanx.debug.records import LOST, RUNNING, Record
from phalanx.reporters.wording import (
    Clock,
    call_text,
    group_text,
    place_text,
    processes_text,
    ranks_text,
    signature_text,
    status_text,
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
            return [
                f"{ranks_text(ranks)} {'waited' if cause.is_over else 'wait'} for each other",
                *map(_wait, cause.waits),
            ]
        case End():
            return [_end(cause, clock)]
        case FirstFailure():
            if cause.aborted_by is not None:
                first = _call_of(cause.call)
                return [f"rank {cause.aborted_by} aborted {group_text(cause.group)}; first to fail was {first}"]
            return [f"{_call_of(cause.call)}, failed first, on rank {cause.member.rank}; the boxes do not tell why"]
        case Hidden():
            return [_hidden(cause)]


def _absence(cause: Absence, clock: Clock) -> str:
    who = _who(cause)
    if any(member.reached >= cause.call.seq for member in cause.missing) and not cause.call.is_message:
        return _in_call(cause, who)
    return _without(cause, who, clock)


def _in_call(cause: Absence, who: str) -> str:
    call = f"{call_text(cause.call)}, of {group_text(cause.group)}"
    return f"{who} in {call}, which then failed on {ranks_text(cause.waiting)}"


def _who(cause: Absence) -> str:
    if not cause.is_over and not cause.has_left:
        return _endings(cause.missing)
    known = [member.process for member in cause.missing if member.process]
    unknown = [member for member in cause.missing if member.process is None]
    if cause.has_left:
        what = "called exec" if cause.call.failure == LOST else "left the group early"
    else:
        what = "was still running" if len(known) == 1 else "were still running"
    parts = [f"{processes_text(known)} {what}"] if known else []
    return " and ".join(parts + ([_endings(unknown)] if unknown else []))


def _without(cause: Absence, who: str, clock: Clock) -> str:
    """What the missing ranks had not begun."""
    call, waiting = f"{call_text(cause.call)}, of {group_text(cause.group)}", ranks_text(cause.waiting)
    is_one = len(cause.missing) == 1
    wait = "waited"
    if clock.is_live and cause.call.state != "failed":
        wait = "waits" if len(cause.waiting) == 1 else "wait"
    if cause.call.is_message:
        text = f"{who}; {waiting} {wait} for {'it' if is_one else 'them'} in {call}"
    else:
        goes_on = not (cause.is_over or cause.has_left) and any(
            member.process and member.process.ending == RUNNING for member in cause.missing
        )
        has = ("has" if is_one else "have") if goes_on else "had"
        text = f"{who}; {'it' if is_one else 'they'} {has} not begun {call}, for which {waiting} {wait}"
    if cause.timed_out:
        text += f" until {'its' if len(cause.waiting) == 1 else 'their'} timeout"
    return text + (_meanwhile(cause.missing[0], cause.meanwhile, clock) if is_one else "")


def _endings(members: Sequence[JobMember]) -> str:
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


def _meanwhile(member: JobMember, call: Record | None, clock: Clock) -> str:
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
    who = f"{processes_text([cause.process])} {_how(cause)}"
    if cause.others and (cause.fate is None or not cause.fate.signal):
        everybody = sorted([cause.process, *cause.others], key=lambda process: process.box.rank)
        return f"{processes_text(everybody)} {_how(cause)}; no rank had failed before"
    if cause.others:
        who += f", and {processes_text(cause.others)} after it; no rank had failed before"
    if cause.absence is not None:
        call = cause.absence.call
        if not call.is_message and any(member.reached >= call.seq for member in cause.absence.missing):
            return _in_call(cause.absence, who)
        return _without(cause.absence, who, clock)
    completed = [record for record in cause.process.box.records if record.state == "completed"]
    if not completed:
        return f"{who} before it had completed a call"
    return f"{who}; its last completed call is {_call_of(completed[-1])}, {clock.ago(completed[-1].last_ns)}"


def _how(cause: End) -> str:
    """How the process ended."""
    fate = cause.fate
    if fate is None:
        return cause.process.ending
    if fate.exception:
        return f"raised {fate.exception}"
    if text := status_text(fate):
        return f"was {text}" if fate.signal else text
    return cause.process.ending if fate.process.box.ended_ns is None else "left early"


def _hidden(cause: Hidden) -> str:
    who = ranks_text([member.rank for member in cause.members])
    process = cause.members[0].process
    kept = process.box.capacity if process else 0
    return (
        f"unknown: {who} had more calls in flight than a black box keeps ({kept}), and who is behind in "
        f"{group_text(cause.group)} can't be told; set PHALANX_BLACK_BOX to a larger number"
    )


def _call_of(call: Record) -> str:
    return f"{call_text(call)}, of group {call.group.name!r}{place_text(call)}"
