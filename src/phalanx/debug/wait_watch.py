"""The thread that looks for deadlocks: it shows what this process waits for, and reads what peers show.

It is started by the first wait that lasts for long, looks twice a second, and ends a while after the last such wait.
A process in which nothing waits for long has no such thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable

from phalanx import _native
from phalanx.debug import deadlocks, thread_looks
from phalanx.debug.answers import start_without_signals
from phalanx.debug.deadlocks import Finding
from phalanx.debug.own_box import own_box
from phalanx.debug.seen import Seen, SeenGroups
from phalanx.debug.thread_looks import Sight
from phalanx.debug.waiting import Acting, GroupState, PeerProcess, Pending, Process, Snapshot, Wait, read, suffix
from phalanx.log import logger
from phalanx.transports import limits, waits
from phalanx.transports.identities import own_identity
from phalanx.transports.waits import ForeignWait, WaitedGroup

__all__ = ["WaitWatch"]

_NAME = "phalanx-waits"
# Seconds between two looks; how long it goes on without a long wait; for the calls of a group; for `stop`.
_PERIOD, _LINGER, _LOOK, _PATIENCE = 0.5, 5.0, 0.2, 2.0
# How long it shows that a call has told of a deadlock, in seconds.
_LONGEST_TOLD = 60.0
# How long a deadlock counts after it was last seen, and how many looks may miss it: a rank that gives up does not wait
# any more a moment before it shows why.
_FRESH_NS = 3_000_000_000
_MOST_MISSES = 2
_NS = 1_000_000_000
_MOST_TOLD = 20


class WaitWatch:
    """One a process."""

    def __init__(self, groups: SeenGroups) -> None:
        self._groups = groups
        # Tests look more often, at shorter waits.
        self.period = _PERIOD
        self.num_looks = 0
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._finding: Finding | None = None
        self._found_ns = 0
        self._misses = 0
        self._told: list[str] = []
        self._logged: set[object] = set()

    def begin(self) -> None:
        """A thread waits for long, or may. Called by it: returns at once."""
        if self._thread is not None or not self._lock.acquire(timeout=_PATIENCE):
            return
        try:
            if self._thread is not None:
                return
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name=_NAME, daemon=True)
            start_without_signals(self._thread)
        except RuntimeError as error:
            self._thread = None
            limits.warn("starting the thread that looks for deadlocks", error, "none is found before its timeout")
        finally:
            self._lock.release()

    def end(self) -> None:
        """Ends the thread, until the next long wait."""
        thread = self._thread
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):
                thread.join(_PATIENCE)

    def finding_of(self, identity: str) -> Finding | None:
        """The deadlock in which this process can't go on in the group with this identity, as of now."""
        finding = self._finding
        if finding is None or identity not in finding.groups or time.monotonic_ns() - self._found_ns > _FRESH_NS:
            return None
        return finding

    def tell(self, finding: Finding) -> None:
        """A call has told its caller of this deadlock, and gives up: peers are to know why it does not wait."""
        self._told = [*self._told[-_MOST_TOLD:], finding.name]

    def _run(self, stop: threading.Event) -> None:
        goes_on = True
        while goes_on:
            try:
                self._look_while_needed(stop)
            except Exception as error:
                logger.warning("the thread that looks for deadlocks has failed: %r", error, exc_info=True)
                return
            finally:
                own_box().remove(_file_name())
            with self._lock:
                # A wait that has begun since found a thread that still ran.
                goes_on = not stop.is_set() and bool(_native.long_waits() or waits.entered())
                if not goes_on:
                    self._thread = None

    def _look_while_needed(self, stop: threading.Event) -> None:
        last_wait = time.monotonic()
        last: _Look | None = None
        while not stop.is_set():
            now = time.monotonic()
            if _waits():
                last_wait = now
            # Peers may still wait because a call here gave up.
            tells = last is not None and bool(self._told)
            if now - last_wait > (_LONGEST_TOLD if tells else _LINGER):
                return
            last = self._look(last) if last_wait == now or tells else None
            stop.wait(self.period)

    def _look(self, last: _Look | None) -> _Look:
        current = _Look(self._groups.all(), self._told, last)
        self.num_looks += 1
        own_box().write(_file_name(), current.snapshot.pack())
        snapshots = _read_all(current.snapshot)
        finding = deadlocks.find(current.snapshot.process, snapshots)
        if finding is not None:
            # What was sure once stays so while nothing has changed.
            if self._finding is None or self._finding.name != finding.name or finding.cycle.is_sure:
                self._finding = finding
            self._found_ns = time.monotonic_ns()
            self._log(self._finding, current.snapshot)
        elif self._finding is not None and deadlocks.still_holds(self._finding, snapshots):
            self._found_ns = time.monotonic_ns()
        elif self._finding is not None:
            self._misses += 1
            if self._misses >= _MOST_MISSES:
                self._finding = None
            return current
        self._misses = 0
        return current

    def _log(self, finding: Finding, own: Snapshot) -> None:
        cycle = finding.cycle
        if (finding.name, cycle.is_sure) in self._logged:
            return
        self._logged.add((finding.name, cycle.is_sure))
        verdict = f"deadlock: {cycle.head}" if cycle.is_sure else cycle.head
        logger.warning("%s", "\n".join([f"rank {own.rank}: {verdict}", *cycle.lines, f"  Next: {cycle.hint}"]))


def _file_name() -> str:
    return f"{os.getpid()}{suffix}"


def _waits() -> bool:
    """Whether a wait lasts for long."""
    before = time.monotonic_ns() - int(waits.LONG * _NS)
    return bool(_native.long_waits()) or any(each.since_ns <= before for each in waits.entered().values())


def _read_all(own: Snapshot) -> dict[Process, Snapshot]:
    """What those show for whom this process waits, and those for whom they wait."""
    found = {own.process: own}
    asked = {own.process}
    to_ask = [own]
    while to_ask:
        for state in to_ask.pop().groups.values():
            for peer in state.processes.values():
                if peer.process in asked:
                    continue
                asked.add(peer.process)
                shown = read(peer.folder, peer.process) if peer.folder else None
                if shown is not None:
                    found[peer.process] = shown
                    to_ask.append(shown)
    return found


class _Look:
    """One look at this process."""

    snapshot: Snapshot

    def __init__(self, groups: Iterable[Seen], told: list[str], last: _Look | None) -> None:
        began_ns = time.monotonic_ns()
        main = os.getpid()
        states: dict[str, GroupState] = {}
        identities: dict[int, str] = {}
        for seen in groups:
            self._look_at(seen, states, identities)
        found = [_native_wait(each, identities) for each in _native.long_waits() if each.group in identities]
        before = began_ns - int(waits.LONG * _NS)
        for token, foreign in waits.entered().items():
            if foreign.since_ns <= before:
                found.append(_foreign_wait(token, foreign))
                _add_foreign(states, foreign, found[-1])
        self.sights: dict[int, Sight] = thread_looks.look()
        waiting = {wait.thread for wait in found}
        acting: list[Acting] = thread_looks.acting(
            {} if last is None else last.sights,
            self.sights,
            waiting,
            thread_looks.idle_threads(self.sights),
            main,
            waits.helpers(),
        )
        ended_ns = time.monotonic_ns()
        before_it: Snapshot | None = None if last is None else last.snapshot
        pid, start, _ = own_identity()
        self.snapshot = Snapshot(
            (pid, start), own_box().rank, began_ns, ended_ns, ended_ns, 0, states, found, acting, list(told)
        )
        if before_it is not None and before_it.key() == self.snapshot.key():
            self.snapshot = self.snapshot._replace(same_since_ns=before_it.same_since_ns)
        if not acting:
            # Who sleeps at two looks has slept in between.
            quiet = ended_ns if before_it is None else before_it.quiet_since_ns or before_it.ended_ns
            self.snapshot = self.snapshot._replace(quiet_since_ns=quiet)

    def _look_at(self, seen: Seen, states: dict[str, GroupState], identities: dict[int, str]) -> None:
        group = seen.group
        if group is None or group.forked or group.broken:
            return
        identity, info = group.identity, seen.info
        identities[group.token] = identity
        calls = group.pending_calls(_LOOK)
        pending = None if calls is None else [_pending(call) for call in calls]
        wanted: set[int] = set()
        for call in pending or ():
            wanted.update(call.missing)
        processes = {rank: _process(seen.identities, rank, group.box_of(rank)) for rank in sorted(wanted)}
        states[identity] = GroupState(info.name, info.rank, group.seq, pending, processes)


def _pending(call: _native.PendingCall) -> Pending:
    is_message = call.op in _native.MESSAGE_OPS
    return Pending(call.op, call.seq, is_message, call.peer, call.tag, call.is_matched, call.missing, call.where)


def _process(identities: Iterable[tuple[int, int, int]], rank: int, box: str) -> PeerProcess:
    pid, start, _ = (list(identities)[rank : rank + 1] or [(0, 0, 0)])[0]
    return PeerProcess(pid, start, os.path.dirname(box))


def _native_wait(wait: _native.WaitingThread, identities: dict[int, str]) -> Wait:
    return Wait(
        wait.id,
        wait.thread,
        _thread_name(wait.thread),
        identities[wait.group],
        wait.op,
        wait.seq,
        wait.op in _native.MESSAGE_OPS,
        wait.peer,
        wait.tag,
        wait.is_bounded,
        wait.where,
        None,
        False,
    )


def _foreign_wait(token: int, wait: ForeignWait) -> Wait:
    return Wait(
        -token,
        wait.thread,
        _thread_name(wait.thread),
        wait.group.identity,
        wait.op,
        wait.seq,
        wait.op in _native.MESSAGE_OPS,
        wait.peer,
        wait.tag,
        wait.is_bounded,
        wait.where,
        list(wait.absent()),
        wait.is_any,
    )


def _add_foreign(states: dict[str, GroupState], foreign: ForeignWait, wait: Wait) -> None:
    group: WaitedGroup = foreign.group
    state = states.setdefault(wait.group, GroupState(group.info.name, group.info.rank, 0, [], {}))
    for rank in wait.absent or ():
        state.processes[rank] = _process(group.identities, rank, group.box_of(rank))


def _thread_name(number: int) -> str:
    """Empty for the main thread, and where no thread waits."""
    if number in (os.getpid(), waits.NO_THREAD):
        return ""
    return next((each.name for each in threading.enumerate() if each.native_id == number), f"thread {number}")
