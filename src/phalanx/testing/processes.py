"""Runs a function as ranks that are processes, on shared memory. Workers stay for the next run.

A worker that was killed, or that a run left in a state it did not find it in, is replaced. Workers end with this
process, whatever becomes of it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import signal
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.testing.faults import Kill
from phalanx.testing.first_failure import RankError
from phalanx.testing.options import Options
from phalanx.testing.run_folders import folder_of_run
from phalanx.testing.watched_calls import SharedCounts
from phalanx.testing.worker import ALARM, STREAMS, Task, TaskOutcome, serve, stack_path, stream_path
from phalanx.testing.world import Stuck

__all__ = ["Tell", "run_in_processes"]

# Gets what a rank printed: rank, name of the stream, text.
Tell = Callable[[int, str, str], None]

# What the server from which workers are forked loads for all of them.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "phalanx.debug.observing",
    "phalanx.group.registry",
    "phalanx.testing.worker",
]
# Seconds that workers are given after the first failure, or to end.
_PATIENCE = 10.0
# Seconds between two looks at whether ranks get on.
_BETWEEN_LOOKS = 0.25
# Seconds that a worker whose pipe has ended is given to end, too.
_TO_END = 2.0


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.pipe, theirs = context.Pipe()
        # Nobody writes; it ends with this process.
        life, self._life = context.Pipe(duplex=False)
        # Not a daemon: ranks may have children, as a DataLoader's.
        self.process = context.Process(target=serve, args=(theirs, life), daemon=False)
        self.process.start()
        theirs.close()
        life.close()
        # The modules that it was sent functions of, each with file and time.
        self.modules: dict[str, _Version] = {}
        _all.add(self)

    def signal(self, number: signal.Signals) -> None:
        """With all that the rank has started."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.close()

    def close(self) -> None:
        self.pipe.close()
        self._life.close()


# By the rank that they are in every run: torch keeps what it has computed for the rank of a process.
_idle: defaultdict[int, list[_Worker]] = defaultdict(list)
_left_to_do = contextlib.ExitStack()
_all: weakref.WeakSet[_Worker] = weakref.WeakSet()
_lock = threading.Lock()


def run_in_processes(options: Options, tell: Tell | None) -> tuple[list[Any], list[RankError], list[int]]:
    """What each rank returned, the failures in the order in which they came, and how many calls each rank made."""
    ranks, module = options.ranks, _module(options.function)
    functions = [_pickled(options, rank) for rank in range(ranks)]
    workers = _take(ranks, module)
    outcomes: dict[int, TaskOutcome] = {}
    try:
        with folder_of_run() as path:
            folder = str(path)
            Path(folder, "shared").mkdir()
            counts = SharedCounts(folder, ranks)
            try:
                for rank in range(ranks):
                    _send(workers, rank, _task(options, functions[rank], module, rank, folder))
                _Collection(options, workers, outcomes, folder, counts).collect()
            finally:
                _tell_all(folder, ranks, tell or _print)
    finally:
        _give_back(workers, outcomes)
    failures = [(rank, outcome.error) for rank, outcome in outcomes.items() if outcome.error is not None]
    failures.sort(key=lambda failure: outcomes[failure[0]].at)
    by_rank = [outcomes[rank] for rank in range(ranks)]
    return [outcome.value for outcome in by_rank], failures, [outcome.num_calls for outcome in by_rank]


class _Version(NamedTuple):
    """Of a module: where it is, and how old."""

    name: str
    file: str
    changed: int


def _module(function: Any) -> _Version | None:
    """The one that defines the function; of the pytest plugin's, the test function."""
    while isinstance(function, functools.partial):
        function = function.args[0] if function.args and callable(function.args[0]) else function.func
    name = getattr(function, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not os.path.exists(file):
        return None
    return _Version(name, file, os.stat(file).st_mtime_ns)


def _task(options: Options, function: bytes, module: _Version | None, rank: int, folder: str) -> Task:
    return Task(
        function=function,
        module=None if module is None else module[:2],
        path=sys.path,
        # Black boxes of ranks that a test kills are nobody's evidence.
        environ={"PHALANX_FOLDER": str(_boxes_of_workers()), **os.environ},
        working_folder=os.getcwd(),
        rank=rank,
        ranks=options.ranks,
        folder=folder,
        boxes=str(_boxes_of_workers()),
        init=options.init,
        timeout=options.timeout,
        stuck_after=options.stuck_after,
    )


def _pickled(options: Options, rank: int) -> bytes:
    function = options.function
    faults = {call: faults for (whose, call), faults in options.faults_by_call.items() if whose == rank}
    try:
        return pickle.dumps((function, faults))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"expected a function that another process can be sent, got {function!r} ({error}): define it at the top "
            "of a module, not as a lambda or inside another function"
        ) from None


def _send(workers: list[_Worker], rank: int, task: Task) -> None:
    sent = pickle.dumps(task)
    try:
        workers[rank].pipe.send_bytes(sent)
    except (BrokenPipeError, ConnectionResetError):
        # It died while it was idle.
        workers[rank].end()
        workers[rank] = _Worker()
        workers[rank].pipe.send_bytes(sent)


class _Collection:
    """Gathers the outcomes. Ranks that do not get on are interrupted, and killed where that does not help."""

    def __init__(
        self,
        options: Options,
        workers: list[_Worker],
        outcomes: dict[int, TaskOutcome],
        folder: str,
        counts: SharedCounts,
    ) -> None:
        self._options = options
        self._workers = workers
        self._outcomes = outcomes
        self._folder = folder
        self._counts = counts

    def collect(self) -> None:
        seen, since = self._counts.read(), time.monotonic()
        interrupted: list[int] = []
        deadline: float | None = None
        while len(self._outcomes) < len(self._workers):
            ready = self._receive()
            now, counts = time.monotonic(), self._counts.read()
            if ready or counts != seen:
                seen, since, interrupted = counts, now, []
            if deadline is None and any(outcome.error is not None for outcome in self._outcomes.values()):
                deadline = now + _PATIENCE
            if deadline is not None and now >= deadline:
                self._kill(self._pending(), f"did not end within {_PATIENCE:g} s of the first failure")
            elif now - since >= self._options.stuck_after:
                if interrupted:
                    silent = f"did not communicate for {self._options.stuck_after:g} s"
                    self._kill(interrupted, f"{silent}, did not end when it was interrupted")
                # Those who waited for a rank that was killed are told soon.
                since, interrupted = now, [] if interrupted else self._interrupt(counts)

    def _pending(self) -> list[int]:
        return [rank for rank in range(len(self._workers)) if rank not in self._outcomes]

    def _receive(self) -> bool:
        # A child of the rank may keep the pipe open when the rank itself is dead.
        waited: dict[Any, int] = {}
        for rank in self._pending():
            waited[self._workers[rank].pipe] = waited[self._workers[rank].process.sentinel] = rank
        ready = multiprocessing.connection.wait(list(waited), min(_BETWEEN_LOOKS, self._options.stuck_after))
        for rank in sorted({waited[ready_one] for ready_one in ready}):
            pipe = self._workers[rank].pipe
            try:
                self._outcomes[rank] = _unpacked(pipe.recv_bytes()) if pipe.poll() else self._death(rank)
            except (EOFError, ConnectionResetError):
                self._outcomes[rank] = self._death(rank)
        return bool(ready)

    def _death(self, rank: int) -> TaskOutcome:
        process = self._workers[rank].process
        process.join(_TO_END)
        num_calls = 0
        if process.exitcode is None:
            error: BaseException | None = RuntimeError(
                f"rank {rank} closed the pipe to the process that runs the tests"
            )
        elif process.exitcode == -signal.SIGKILL and self._kills_of(rank):
            error = None
            # It has come to the call where it was to be killed.
            num_calls = min(self._kills_of(rank))
        else:
            error = RuntimeError(f"rank {rank} {_ending(process.exitcode)}")
        return TaskOutcome(error=error, clean=False, at=time.time(), num_calls=num_calls)

    def _kills_of(self, rank: int) -> list[int]:
        """The calls at which it is to be killed."""
        by_call = self._options.faults_by_call.items()
        return [call for (whose, call), faults in by_call if whose == rank and any(isinstance(f, Kill) for f in faults)]

    def _interrupt(self, counts: tuple[int, ...]) -> list[int]:
        """Those outside of a call, for which the others wait; where all are inside they wait for each other."""
        pending = self._pending()
        stuck = [rank for rank in pending if counts[rank] % 2 == 0] or pending
        for rank in stuck:
            pid = self._workers[rank].process.pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, ALARM)
        return stuck

    def _kill(self, ranks: list[int], why: str) -> None:
        for rank in ranks:
            self._workers[rank].process.kill()
            stack = stack_path(self._folder, rank)
            where = stack.read_text() if stack.exists() else ""
            error = Stuck(f"rank {rank} {why}, and was killed" + (f"; it was here:\n{where}" if where else ""))
            self._outcomes[rank] = TaskOutcome(error=error, clean=False, at=time.time())


def _unpacked(sent: bytes) -> TaskOutcome:
    outcome: TaskOutcome = pickle.loads(sent)
    if outcome.failure is not None:
        outcome.error, outcome.failure = outcome.failure.unpack(), None
    return outcome


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _tell_all(folder: str, ranks: int, tell: Tell) -> None:
    for rank in range(ranks):
        for stream in STREAMS:
            path = stream_path(folder, stream, rank)
            text = path.read_text(errors="replace") if path.exists() else ""
            if text:
                tell(rank, stream, _without_own_reports(text))


def _without_own_reports(text: str) -> str:
    """A rank that outlives another points to its black boxes, which are removed in the end."""
    return re.sub(rf"; all ranks: phalanx report {re.escape(str(_boxes_of_workers()))}{os.sep}\S+", "", text)


def _print(rank: int, stream: str, text: str) -> None:
    getattr(sys, stream).write(text)


def _take(num: int, module: _Version | None) -> list[_Worker]:
    workers: list[_Worker] = []
    try:
        for rank in range(num):
            workers.append(_take_one(rank, module))  # noqa: PERF401 - those that were taken are to be ended
    except BaseException:
        for worker in workers:
            worker.end()
        raise
    for worker in workers:
        if module is not None:
            worker.modules[module.name] = module
    return workers


def _take_one(rank: int, module: _Version | None) -> _Worker:
    while True:
        with _lock:
            worker = _idle[rank].pop() if _idle[rank] else None
        if worker is None:
            return _Worker()
        # One that has an older version of the module would run that.
        known = module is None or worker.modules.get(module.name, module) == module
        if known and worker.process.is_alive():
            return worker
        worker.end()


def _give_back(workers: list[_Worker], outcomes: dict[int, TaskOutcome]) -> None:
    spoilt = []
    for rank, worker in enumerate(workers):
        if rank in outcomes and outcomes[rank].clean:
            with _lock:
                _idle[rank].append(worker)
        else:
            spoilt.append(worker)
    # Those that live on for a moment have nothing to report of those that were killed first.
    for worker in spoilt:
        worker.signal(signal.SIGSTOP)
    for worker in spoilt:
        worker.end()


@functools.cache
def _boxes_of_workers() -> Path:
    return _left_to_do.enter_context(folder_of_run())


@atexit.register
def _end_all() -> None:
    for workers in list(_idle.values()):
        while workers:
            workers.pop().end()
    _left_to_do.close()


def _disown() -> None:
    """A forked child does not own the workers, and must not keep them alive."""
    _idle.clear()
    _left_to_do.pop_all()
    for worker in list(_all):
        worker.close()


os.register_at_fork(after_in_child=_disown)
