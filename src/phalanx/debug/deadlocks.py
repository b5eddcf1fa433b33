"""Whether ranks wait for each other so that none of them can go on: a pure function of what processes show.

A process is stuck if all it waits for is stuck, and none of its threads can act otherwise. A call is stuck if a rank
that has to make its side of it belongs to a stuck process; a receive from any rank only if all of them do. The largest
set of processes for which this holds is found by taking out, one after another, those for which it does not.

A rank that has made its side of a collective is not waited for, even if its bytes have not come: its progress thread
carries the call on. The call then waits for whom that rank waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from phalanx.debug.waiting import ANYBODY, GroupState, Pending, Process, Snapshot, Wait
from phalanx.phrases import describe_ranks
from phalanx.transports.deadlocks import HINTS, Cycle, shortest_cycle

__all__ = ["Finding", "find", "still_holds"]


# So long it lasts before somebody hears of a deadlock that another thread could still end.
_PROBABLE_NS = 5_000_000_000


class Finding(NamedTuple):
    """A deadlock, as one of the processes that wait in it sees it."""

    cycle: Cycle
    name: str  # the same on all ranks, and for no other deadlock
    members: dict[Process, set[int]]  # the processes of the cycle, and which of their waits belong to it
    groups: set[str]  # those of its calls, and those in which this process can't go on because of it


class _Need(NamedTuple):
    """Which processes have to act before a call can end. None stands for one that shows nothing."""

    processes: list[Process | None]
    is_any: bool = False

    def is_stuck(self, stuck: Collection[Process | None]) -> bool:
        held = [process in stuck for process in self.processes]
        return all(held) if self.is_any else any(held)


_FREE = _Need([])
_NEVER = _Need([], is_any=True)


def find(own: Process, snapshots: Mapping[Process, Snapshot]) -> Finding | None:
    """The deadlock in which this process waits, or for which it waits; else one that is probable."""
    return _find(own, snapshots, is_sure=True) or _find(own, snapshots, is_sure=False)


def still_holds(finding: Finding, snapshots: Mapping[Process, Snapshot]) -> bool:
    """Whether all members still wait, or have told that they gave up because of this very deadlock."""
    for process, ids in finding.members.items():
        shown = snapshots.get(process)
        if shown is None or not (finding.name in shown.told or ids <= {wait.id for wait in shown.waits}):
            return False
    return True


def _find(own: Process, snapshots: Mapping[Process, Snapshot], *, is_sure: bool) -> Finding | None:
    graph = _Graph(snapshots, is_sure)
    if own not in graph.stuck:
        return None
    reached = _reachable(own, graph.edges)
    # All of it at one moment.
    since = max(graph.since(snapshots[process]) for process in reached)
    if since + (0 if is_sure else _PROBABLE_NS) > min(snapshots[process].began_ns for process in reached):
        return None
    # From all, not from this one: those who wait for a cycle are to show the same.
    cycle = shortest_cycle({process: graph.edges[process] for process in sorted(reached, key=graph.rank)})
    if not cycle:
        return None
    core = list(cycle)
    # Of a receive from any rank, all possible senders belong to it.
    for process in core:
        if any(need.is_any for _, need in graph.needs[process]):
            core += [peer for peer in graph.edges[process] if peer not in core]
    return _describe(graph, own, core)


def _reachable(start: Process, edges: Mapping[Process, Sequence[Process]]) -> set[Process]:
    reached = {start}
    waiting = [start]
    while waiting:
        for peer in edges[waiting.pop()]:
            if peer not in reached:
                reached.add(peer)
                waiting.append(peer)
    return reached


class _Graph:
    def __init__(self, snapshots: Mapping[Process, Snapshot], is_sure: bool) -> None:
        self.snapshots = snapshots
        self.is_sure = is_sure
        self.needs = {process: self._needs_of_threads(snapshot) for process, snapshot in snapshots.items()}
        self._calls = {process: self._needs_of_calls(snapshot) for process, snapshot in snapshots.items()}
        self.stuck = {process for process, snapshot in snapshots.items() if self._may_be_stuck(snapshot)}
        while freed := [process for process in self.stuck if not self._is_stuck(process)]:
            self.stuck.difference_update(freed)
        self.edges = {
            process: list(
                dict.fromkeys(
                    peer for _, need in self.needs[process] for peer in need.processes if peer in self.stuck and peer
                )
            )
            for process in self.stuck
        }

    def rank(self, process: Process) -> tuple[int, Process]:
        return self.snapshots[process].rank, process

    def since(self, snapshot: Snapshot) -> int:
        return max(snapshot.same_since_ns, snapshot.quiet_since_ns) if self.is_sure else snapshot.same_since_ns

    def _may_be_stuck(self, snapshot: Snapshot) -> bool:
        if not snapshot.waits or any(state.pending is None for state in snapshot.groups.values()):
            return False
        if self.is_sure:
            return snapshot.quiet_since_ns > 0 and not any(wait.is_bounded for wait in snapshot.waits)
        return not any(thread.is_main for thread in snapshot.acting)

    def _is_stuck(self, process: Process) -> bool:
        return all(need.is_stuck(self.stuck) for _, need in self.needs[process]) and all(
            need.is_stuck(self.stuck) for need in self._calls[process]
        )

    def _needs_of_threads(self, snapshot: Snapshot) -> list[tuple[Wait, _Need]]:
        return [(wait, self._need_of_wait(snapshot, wait)) for wait in snapshot.waits]

    def _needs_of_calls(self, snapshot: Snapshot) -> list[_Need]:
        """Of all calls in flight: where one ends, a thread that waits for a future may go on."""
        return [
            self._need_of_call(snapshot, identity, call)
            for identity, state in snapshot.groups.items()
            for call in state.pending or ()
        ]

    def _need_of_wait(self, snapshot: Snapshot, wait: Wait) -> _Need:
        state = snapshot.groups.get(wait.group)
        if state is None:
            return _FREE
        if wait.absent is not None:
            return _Need([self._process(state, rank) for rank in wait.absent], wait.is_any) if wait.absent else _FREE
        for call in state.pending or ():
            # A collective waits for the first one of its group.
            if call.is_message == wait.is_message and (
                not call.is_message or (call.op, call.peer, call.seq) == (wait.op, wait.peer, wait.seq)
            ):
                return self._need_of_call(snapshot, wait.group, call)
        return _FREE

    def _need_of_call(self, snapshot: Snapshot, identity: str, call: Pending) -> _Need:
        state = snapshot.groups[identity]
        if not call.is_message:
            return _Need(self._absent(identity, snapshot.process, set()))
        if call.is_matched:
            return _FREE
        if call.peer != ANYBODY:
            process = self._process(state, call.peer)
            return _FREE if self._fits(process, identity, call, state.rank) else _Need([process])
        peers = [self._process(state, rank) for rank in call.missing if rank != state.rank]
        if any(self._fits(process, identity, call, state.rank) for process in peers):
            return _FREE
        return _Need(peers, is_any=True) if peers else _NEVER

    def _absent(self, identity: str, process: Process, seen: set[Process]) -> list[Process | None]:
        """The processes that have to make the collective for which this one waits, or that another waits for in it."""
        seen.add(process)
        state = self.snapshots[process].groups[identity]
        head = next((call for call in state.pending or () if not call.is_message), None)
        absent: list[Process | None] = []
        for rank in () if head is None else head.missing:
            peer = self._process(state, rank)
            there = None if peer is None else self.snapshots[peer].groups.get(identity)
            if peer is None or there is None:
                absent.append(None)
            elif head is not None and there.seq < head.seq:
                absent.append(peer)
            elif peer not in seen:
                absent += self._absent(identity, peer, seen)
        return absent

    def _process(self, state: GroupState, rank: int) -> Process | None:
        found = state.processes.get(rank)
        return found.process if found is not None and found.process in self.snapshots else None

    def _fits(self, process: Process | None, identity: str, call: Pending, rank: int) -> bool:
        """Whether the peer has the other side of the message under way: then it moves, or is about to."""
        there = None if process is None else self.snapshots[process].groups.get(identity)
        return there is not None and any(
            other.is_message and other.op != call.op and other.tag == call.tag and other.peer in (rank, ANYBODY)
            for other in there.pending or ()
        )


def _describe(graph: _Graph, own: Process, core: list[Process]) -> Finding:
    numbers = [graph.snapshots[process].rank for process in core]
    names = {
        process: f"rank {rank}" + (f" (process {process[0]})" if numbers.count(rank) > 1 else "")
        for process, rank in zip(core, numbers, strict=True)
    }
    lines = []
    members: dict[Process, set[int]] = {}
    are_messages = True
    for process in core:
        found = [
            (wait, [peer for peer in core if peer in need.processes])
            for wait, need in graph.needs[process]
            if need.is_any or any(peer in core for peer in need.processes)
        ]
        members[process] = {wait.id for wait, _ in found}
        are_messages = are_messages and all(wait.is_message for wait, _ in found)
        lines += [
            f"  {names[process]} waits{_whom(graph, peers)}{_what(graph, process, wait)}" for wait, peers in found
        ]
    if own not in core:
        wait, need = graph.needs[own][0]
        behind = [peer for peer in graph.edges[own] if peer in need.processes]
        rank = graph.snapshots[own].rank
        lines.append(f"  rank {rank} waits{_whom(graph, behind)}{_what(graph, own, wait)}, behind the cycle")
    kind = "P2P" if are_messages else "ORDER"
    ranks = describe_ranks(sorted(set(numbers)))
    head = f"{ranks} wait for each other" if len(core) > 1 else f"{ranks} waits for itself"
    if graph.is_sure:
        head += f", and no other thread of {'theirs' if len(core) > 1 else 'its process'} can make the missing calls"
    else:
        head = f"probably a deadlock: {head}"
        acting = [(process, thread) for process in core for thread in graph.snapshots[process].acting]
        lines += [f"  {names[process]} also has {thread.text}, which could still act" for process, thread in acting]
        lines += [
            f"  the thread of {names[process]} that waits at {wait.where} gives up after a while"
            for process in core
            for wait in graph.snapshots[process].waits
            if wait.is_bounded
        ]
    groups = {wait.group for wait in graph.snapshots[own].waits}
    groups |= {identity for identity, state in graph.snapshots[own].groups.items() if state.pending}
    groups |= {wait.group for process in core for wait in graph.snapshots[process].waits if wait.id in members[process]}
    waits = sorted(
        (wait.group, graph.snapshots[process].groups[wait.group].rank, wait.op, wait.seq, wait.peer, wait.tag, wait.id)
        for process in core
        for wait in graph.snapshots[process].waits
        if wait.id in members[process]
    )
    return Finding(Cycle(kind, graph.is_sure, head, lines, HINTS[kind]), repr(waits), members, groups)


def _whom(graph: _Graph, peers: Sequence[Process]) -> str:
    ranks = sorted({graph.snapshots[peer].rank for peer in peers})
    return f" for {describe_ranks(ranks)}" if ranks else ""


def _what(graph: _Graph, process: Process, wait: Wait) -> str:
    message = f", tag {wait.tag}" if wait.is_message else ""
    anybody = " from any rank" if wait.is_message and wait.peer == ANYBODY else ""
    group = graph.snapshots[process].groups[wait.group].name
    thread = f", in thread {wait.thread_name!r}" if wait.thread_name else ""
    place = f", at {wait.where}" if wait.where else ", at an unknown source line"
    return f" in {wait.op}{anybody}{message}, seq {wait.seq}, group {group!r}{place}{thread}"
