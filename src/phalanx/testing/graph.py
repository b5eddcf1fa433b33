"""Who waits for whom: a deadlock, reduced to its core and put into words."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType

from phalanx.errors import Deadlock
from phalanx.group.endings import is_framework
from phalanx.transports.meeting import Ticket

__all__ = ["describe_deadlock"]

_HINTS = {
    "P2P": "let one side receive first, or use isend and irecv, or batch_isend_irecv",
    "ORDER": "make all ranks issue the calls of these groups in the same order, or asynchronously",
    "JOIN": "make all ranks make the same groups in the same order",
}


def describe_deadlock(waiting: Mapping[int, Ticket], frames: Mapping[int, FrameType]) -> Deadlock:
    """`waiting` has the ranks that wait, `frames` where they are in the program."""
    edges = {rank: [peer for peer in ticket.waited_for() if peer in waiting] for rank, ticket in waiting.items()}
    core = shortest_cycle(edges) or sorted(waiting)
    if not core:
        return Deadlock(
            "nobody can go on: ranks look again and again whether a call has ended, and none will",
            code="DEADLOCK:ORDER",
            hint=_HINTS["ORDER"],
        )
    lines = [_line(rank, waiting[rank], edges[rank], core, frames.get(rank)) for rank in core]
    others = len(waiting) - len(core)
    if others:
        lines.append(f"  {others} more {'rank waits' if others == 1 else 'ranks wait'} for these")
    kind = _kind([waiting[rank] for rank in core])
    return Deadlock("\n".join(["nobody can go on", *lines]), code=f"DEADLOCK:{kind}", hint=_HINTS[kind])


def shortest_cycle(edges: Mapping[int, Iterable[int]]) -> list[int]:
    """The ranks of a shortest circle of waits, from the lowest one on; none where there is no circle."""
    cycles = [cycle for start in sorted(edges) if (cycle := _way_back(start, edges))]
    return min(cycles, key=len, default=[])


def _way_back(start: int, edges: Mapping[int, Iterable[int]]) -> list[int]:
    """The shortest way along the edges from a rank to itself."""
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for peer in edges[rank]:
            if peer == start:
                way = [rank]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if peer not in came_from:
                came_from[peer] = rank
                queue.append(peer)
    return []


def _kind(tickets: Iterable[Ticket]) -> str:
    ops = {ticket.op for ticket in tickets}
    if "new_group" in ops:
        return "JOIN"
    return "P2P" if ops <= {"send", "recv"} else "ORDER"


def _line(rank: int, ticket: Ticket, peers: list[int], core: list[int], frame: FrameType | None) -> str:
    wanted = [peer for peer in peers if peer in core] or peers
    whom = f"rank {wanted[0]}" if len(wanted) == 1 else f"ranks {', '.join(map(str, wanted))}" if wanted else "nobody"
    what = f"{ticket.op}, seq {ticket.seq}" if ticket.seq else ticket.op
    if ticket.op in ("send", "recv"):
        what += f", tag {ticket.tag}"
    return f"  rank {rank} waits for {whom} in {what}, group {ticket.meeting.name!r}{_where(frame)}"


def _where(frame: FrameType | None) -> str:
    """The line of the program that made the call: the innermost one outside of torch and us, whatever we call."""
    ours = False
    for entry in reversed(traceback.extract_stack(frame) if frame is not None else []):
        if is_framework(entry.filename):
            ours = True
        elif ours:
            return f" ({Path(entry.filename).name}:{entry.lineno}, in {entry.name})"
    return ""
