"""How ranks, calls and times are said in a report."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from phalanx._native import NO_RANK
from phalanx.debug.fates import Fate
from phalanx.debug.job import JobGroup, Process
from phalanx.debug.records import DIED, RUNNING, Record
from phalanx.phrases import describe_ranks, describe_sizes, elements

__all__ = [
    "Clock",
    "call_text",
    "group_text",
    "place_text",
    "processes_text",
    "ranks_text",
    "signature_text",
    "status_text",
]

# More ranks than these are told as ranges.
_MOST_LISTED = 4


@dataclass(frozen=True, slots=True)
class Clock:
    """Tells how processes ended, and times from now on back, or from the end of a job that is over."""

    end_ns: int
    is_live: bool
    fates: Mapping[int, Fate] = field(default_factory=dict)  # by rank, of processes that ended

    def ago(self, ns: int) -> str:
        passed = self.end_ns - ns
        if passed <= 0:
            return "now" if self.is_live else "at the end"
        return f"{_seconds(passed)} {'ago' if self.is_live else 'before the end'}"

    def fate_of(self, process: Process) -> Fate | None:
        fate = self.fates.get(process.box.rank)
        return fate if fate is not None and fate.process is process else None

    def ending_of(self, process: Process) -> str:
        """How the process ended, by its status where peers have seen that."""
        fate = self.fate_of(process) if process.ending == DIED else None
        return (status_text(fate) if fate else "") or process.ending

    def time_in(self, call: Record, process: Process) -> str:
        """How long the call took, or takes."""
        begin = call.started_ns or call.created_ns
        if call.state == "failed":
            return f"after {_seconds((call.ended_ns or begin) - begin)}"
        if process.ending == RUNNING:
            return f"for {_seconds(self.end_ns - begin)}"
        fate = self.fate_of(process)
        if fate is not None and fate.ns < math.inf:
            return f"for {_seconds(int(fate.ns) - begin)}"
        # Nobody saw it die, so it lived as long as the others were heard of.
        return f"for at least {_seconds(self.end_ns - begin)}"


def status_text(fate: Fate) -> str:
    """Empty where the status is unknown."""
    if fate.is_replaced:
        return "called exec"
    if fate.signal:
        return f"killed by {_signal_name(fate.signal)}"
    return "" if fate.exit_code is None else f"left early with exit code {fate.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MOST_LISTED:
        return describe_ranks(ranks)
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0])]
    return "ranks " + ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def processes_text(processes: Sequence[Process]) -> str:
    """With their pids, where they are few."""
    ranks = [process.box.rank for process in processes]
    pids = ", ".join(str(process.box.pid) for process in processes)
    pids = f"pid {pids}" if len(processes) == 1 else f"pids {pids}"
    if NO_RANK in ranks:
        return f"the process without a rank ({pids})"
    return f"{ranks_text(ranks)} ({pids})" if len(processes) <= _MOST_LISTED else ranks_text(ranks)


def group_text(group: JobGroup) -> str:
    notes = [group.desc] if group.desc not in ("", group.name) else []
    if group.number > 1:
        which = {2: "second", 3: "third"}.get(group.number, f"{group.number}th")
        notes.append(f"{which} of this name")
    return f"group {group.name!r}" + (f" ({', '.join(notes)})" if notes else "")


def call_text(call: Record) -> str:
    """The call's name and number."""
    if call.is_making:
        return call.op
    if not call.is_message:
        return f"{call.op}, seq {call.seq}"
    peer = "any rank" if call.peer < 0 else f"rank {call.group.rank_in_job(call.peer)}"
    return f"{call.op} {'to' if call.op == 'send' else 'from'} {peer}, seq {call.seq}"


def signature_text(call: Record) -> str:
    """What ranks have to agree on, in brackets; nothing where there is nothing."""
    parts = []
    if call.reduce_op is not None:
        parts.append(call.reduce_op)
    if call.is_message:
        parts.append(f"tag {call.tag}")
    elif call.root != NO_RANK:
        parts.append(f"root {call.group.rank_in_job(call.root)}")
    if call.op != "barrier" and not call.is_making:
        number = elements(call.count) if call.count >= 0 else "elements"
        parts.append(number + (f" of {call.dtype}" if call.dtype else ""))
    if call.is_list and call.num_sizes > 1:
        parts.append(describe_sizes(call.sizes, call.num_sizes, listed=True))
    return f" ({', '.join(parts)})" if parts else ""


def place_text(call: Record) -> str:
    """Where in the program the call was made, after a comma."""
    where = f", at {call.location.describe()}" if call.location else ""
    if call.by_reducer:
        return f"{where} (in the backward pass, by DDP's reducer)"
    return f"{where} (in the backward pass)" if call.in_backward else where


def _seconds(ns: int) -> str:
    if ns < 1_000_000_000:
        return f"{ns / 1e6:.0f} ms"
    return f"{ns / 1e9:.1f} s" if ns < 100_000_000_000 else f"{ns / 1e9:.0f} s"
