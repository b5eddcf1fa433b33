"""Who waits for whom: a deadlock, reduced to its core and put into words."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from phalanx.errors import Deadlock
from phalanx.transports.deadlocks import HINTS, shortest_cycle
from phalanx.transports.places import is_framework
from phalanx.types import describe_ranks

__all__ = ["Wait", "describe_deadlock", "describe_wait"]

_HINTS = {
    **HINTS,
    "JOIN": "make all ranks make the same groups in the same order",
    "STORE": "let a rank that does not wait set these keys",
    "POLL": "let a rank do what these look for, or let them wait for it",
    "EXIT": "look why a rank ended before the others were done with it; let it make as many calls as they do",
}


class Wait(Protocol):
    """What a rank waits for."""

    @property
    def kind(self) -> str:
        """Of a deadlock that is made of such waits."""

    def describe(self) -> str: ...

    def waited_for(self) -> list[int]:
        """The ranks, of all, without which it can't end."""

    def remarks(self) -> list[str]:
        """Lines about why those do not come."""


def describe_deadlock(
    waiting: Mapping[int, Wait], frames: Mapping[int, FrameType], ended: Collection[int], polling: Sequence[int] = ()
) -> Deadlock:
    """`waiting` has the ranks that wait, `polling` those that look again and again, `frames` where they are in the
    program, `ended` those that do not run any more."""
    wanted = {rank: wait.waited_for() for rank, wait in waiting.items()}
    core = shortest_cycle({rank: [peer for peer in peers if peer in waiting] for rank, peers in sorted(wanted.items())})
    gone = sorted(ended) if not core and not polling else []
    core = core or _waiting_for(ended, wanted) or sorted(waiting)
    lines = [_line(rank, waiting[rank], wanted[rank], core, gone, frames.get(rank)) for rank in core]
    lines += [f"  rank {rank} looks again and again, in vain{_where(frames.get(rank))}" for rank in polling]
    lines += [line for rank in core for line in waiting[rank].remarks()]
    if gone:
        lines.append(f"  {describe_ranks(gone)} {'has' if len(gone) == 1 else 'have'} ended")
    others = len(waiting) - len(core)
    if others:
        lines.append(f"  {others} more {'rank waits' if others == 1 else 'ranks wait'} for these")
    kind = "EXIT" if gone else "POLL" if polling else _kind([waiting[rank] for rank in core])
    return Deadlock("\n".join(["nobody can go on", *lines]), code=f"DEADLOCK:{kind}", hint=_HINTS[kind])


def _waiting_for(ended: Collection[int], wanted: Mapping[int, list[int]]) -> list[int]:
    return [rank for rank in sorted(wanted) if any(peer in ended for peer in wanted[rank])]


def _kind(waits: Iterable[Wait]) -> str:
    kinds = {wait.kind for wait in waits}
    return next((kind for kind in ("JOIN", "STORE", "ORDER") if kind in kinds), "P2P")


def _line(rank: int, wait: Wait, peers: list[int], core: list[int], gone: list[int], frame: FrameType | None) -> str:
    return describe_wait(rank, wait, frame, [peer for peer in peers if peer in core or peer in gone])


def describe_wait(rank: int, wait: Wait, frame: FrameType | None, peers: Sequence[int] = ()) -> str:
    """A line. `peers` are those that it is to name, of the ranks that are waited for."""
    wanted = peers or wait.waited_for()
    whom = f" for {describe_ranks(wanted)}" if wanted else ""
    return f"  rank {rank} waits{whom} in {wait.describe()}{_where(frame)}"


def _where(frame: FrameType | None) -> str:
    """The line of the program that made the call: the innermost one outside of torch and us, whatever we call."""
    ours = False
    for entry in reversed(traceback.extract_stack(frame) if frame is not None else []):
        if is_framework(entry.filename):
            ours = True
        elif ours:
            return f" ({Path(entry.filename).name}:{entry.lineno}, in {entry.name})"
    return ""
