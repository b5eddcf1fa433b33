"""How the processes of a job ended, and when: by what they wrote down themselves, and by what the others saw.

A process that ends in order writes down when and why. One that is killed can't, but every peer that lives notes the
death at once. A death that nobody has noted came when no peer was left to see it.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx import _native
from phalanx.debug.job import JobGroup, Process
from phalanx.debug.records import DIED, LOST, Record

__all__ = ["Fate", "GroupFailure", "failures_of", "fates_of"]

_UNKNOWN = _native.UNKNOWN_STATUS
# Signals by which launchers and people end a job.
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(slots=True, eq=False)
class Fate:
    """How a process ended."""

    process: Process
    ns: float  # when; infinite where nobody lived to see it
    status: int  # as waitpid gives it, or unknown
    exception: str = ""  # that nobody caught
    is_consequence: bool = False  # another failure came before, and the process knew of it
    is_replaced: bool = False  # the process lived on, and had called exec

    @property
    def signal(self) -> int:
        """That ended it; 0: none."""
        is_signal = self.status != _UNKNOWN and os.WIFSIGNALED(self.status)
        return os.WTERMSIG(self.status) if is_signal else 0

    @property
    def exit_code(self) -> int | None:
        if self.status == _UNKNOWN or not os.WIFEXITED(self.status):
            return None
        return os.WEXITSTATUS(self.status)

    @property
    def is_failure(self) -> bool:
        """Whether it is one, also where no other rank needed the process."""
        return bool(self.exception) or (self.exit_code != 0 and not self._is_unknown_exit)

    @property
    def was_terminated(self) -> bool:
        return self.signal in _ENDING_SIGNALS

    @property
    def is_unseen(self) -> bool:
        """It has not written down its end, and no peer saw it."""
        return self.status == _UNKNOWN and self.process.box.ended_ns is None and not self.exception

    @property
    def _is_unknown_exit(self) -> bool:
        return self.status == _UNKNOWN and self.process.box.ended_ns is not None


@dataclass(slots=True, eq=False)
class GroupFailure:
    """The first call of a group that failed, and why."""

    group: JobGroup
    call: Record
    ns: int
    blamed: int | None  # the rank of the job that left, died or aborted


def failures_of(groups: Sequence[JobGroup]) -> list[GroupFailure]:
    """Without groups in which no call failed, and those of which the boxes do not tell why."""
    return [failure for group in groups if (failure := _first_failure_of(group))]


def _first_failure_of(group: JobGroup) -> GroupFailure | None:
    failed = [record for member in group.members for record in member.records if record.failure and record.ended_ns]
    if not failed:
        return None
    call = min(failed, key=lambda record: record.ended_ns or 0)
    blamed = call.group.rank_in_job(call.blamed) if call.blamed >= 0 else None
    return GroupFailure(group, call, call.ended_ns or 0, blamed)


def fates_of(processes: Sequence[Process], failures: Sequence[GroupFailure]) -> dict[int, Fate]:
    """By rank, of the processes that ended and whose end is told."""
    seen: dict[tuple[int, int], tuple[float, int]] = {}
    replaced = set()
    for process in processes:
        for death in process.box.deaths:
            key = (death.pid, death.start)
            ns, status = seen.get(key, (math.inf, _UNKNOWN))
            seen[key] = (min(ns, death.seen_ns), death.status if status == _UNKNOWN else status)
            if death.is_replaced:
                replaced.add(key)
    # Who waits for a rank may see its death before the thread that notes it does.
    lost: dict[int, int] = {}
    for failure in failures:
        if failure.call.failure == LOST and failure.blamed is not None:
            lost[failure.blamed] = min(failure.ns, lost.get(failure.blamed, failure.ns))
    fates = {}
    for process in processes:
        box = process.box
        ns, status = seen.get((box.pid, box.start), (math.inf, _UNKNOWN))
        if box.ended_ns is not None:
            status = box.status if status == _UNKNOWN else status
            fate = Fate(process, box.ended_ns, status, box.exception, box.is_consequence)
            if fate.signal and not fate.exception:
                # It was ending in order, and was killed before it was done.
                fate.ns = max(ns, box.ended_ns)
        elif process.ending == DIED and box.rank >= 0:
            fate = Fate(process, min(ns, lost.get(box.rank, math.inf)), status)
            fate.is_replaced = (box.pid, box.start) in replaced
        else:
            continue
        fate.is_consequence = fate.is_consequence or box.knew_failure(fate.ns)
        fates[box.rank] = fate
    return fates
