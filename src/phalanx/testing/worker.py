"""The process that is a rank: it takes tasks from a pipe, one after another, and answers."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib.util
import mmap
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore

from phalanx.errors import REPORT_NOTE
from phalanx.group import group
from phalanx.group.endings import last_words
from phalanx.testing.belongings import seed_generators
from phalanx.testing.faults import Fault, let_happen
from phalanx.testing.scheduling import Interruption
from phalanx.testing.tracebacks import Sent, linked
from phalanx.testing.world import Stuck, World, exit_error
from phalanx.transports import lookout
from phalanx.transports.shm import ShmTransport

__all__ = ["ALARM", "STREAMS", "Answer", "Progress", "Task", "serve", "stack_path", "stream_path"]

# Interrupts a rank that is stuck. Programs have little use for it, unlike SIGUSR1.
ALARM = signal.SIGRTMIN + 7
STREAMS = ("stdout", "stderr")
_CALLS = ("run", "start", "start_message", "all_reduce_plain", "start_all_reduce_plain")
# Seconds after which a rank that is late as planned shows that it is.
_BETWEEN_STEPS = 0.1


@dataclass
class Task:
    """What a worker is sent, as far as it can be pickled by itself; the function comes pickled, with what it needs."""

    # With the rank's faults, by call.
    function: bytes
    # Name and file of the module that defines the function, for modules that can't be found by name.
    module: tuple[str, str] | None
    path: list[str]
    environ: dict[str, str]
    working_folder: str
    rank: int
    ranks: int
    folder: str
    # Where the black boxes of workers are, unless the user has chosen a folder.
    boxes: str
    init: bool
    timeout: timedelta | None
    stuck_after: float


@dataclass
class Answer:
    value: Any = None
    error: BaseException | None = None
    # The error as it is sent.
    failure: Sent | None = None
    # Whether the worker is as it was before.
    clean: bool = True
    at: float = 0.0
    num_calls: int = 0


def stream_path(folder: str, stream: str, rank: int) -> Path:
    return Path(folder, f"{stream}-{rank}")


def end_path(folder: str, rank: int) -> Path:
    """Is there once the rank's function has ended; holds its last words."""
    return Path(folder, f"end-{rank}")


def stack_path(folder: str, rank: int) -> Path:
    return Path(folder, f"stack-{rank}")


class Progress:
    """How many times each rank came to a call or returned from one, in memory that all of them share: odd inside."""

    def __init__(self, folder: str, ranks: int) -> None:
        path = Path(folder, "progress")
        if not path.exists():
            path.write_bytes(bytes(8 * ranks))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8 * ranks)
        self._ranks = ranks

    def add(self, rank: int) -> None:
        (count,) = struct.unpack_from("q", self._memory, 8 * rank)
        struct.pack_into("q", self._memory, 8 * rank, count + 1)

    def counts(self) -> tuple[int, ...]:
        return struct.unpack(f"{self._ranks}q", self._memory[:])


class _Watcher:
    """Counts the calls of a rank, and makes faults happen before them."""

    def __init__(self, task: Task) -> None:
        self._rank = task.rank
        self._progress = Progress(task.folder, task.ranks)
        self.faults: dict[int, list[Fault]] = {}
        self.num_calls = 0

    def come_to_call(self) -> None:
        self.num_calls += 1
        let_happen(self.faults.get(self.num_calls, ()), self._sleep, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            # Whoever is late as planned is not stuck.
            with self.inside():
                time.sleep(min(left, _BETWEEN_STEPS))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self._progress.add(self._rank)
        try:
            yield
        finally:
            self._progress.add(self._rank)


class _Watched:
    """A rank's transport."""

    def __init__(self, transport: ShmTransport, watcher: _Watcher) -> None:
        self._transport = transport
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._transport, name)
        return partial(self._call, value) if name in _CALLS else value

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        self._watcher.come_to_call()
        with self._watcher.inside():
            pending = call(*args)
        return None if pending is None else _WatchedPending(pending, self._watcher)


class _WatchedPending:
    """A call under way: a rank that waits for it is inside of it."""

    def __init__(self, pending: Any, watcher: _Watcher) -> None:
        self._pending = pending
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def wait(self, timeout: float | None) -> bool:
        with self._watcher.inside():
            return bool(self._pending.wait(timeout))


def serve(pipe: multiprocessing.connection.Connection, life: multiprocessing.connection.Connection) -> None:
    """`life` ends with the process that runs the tests."""
    # A process group of its own, so that what the rank starts ends with it.
    os.setpgid(0, 0)
    # Where it is too late for an interruption.
    signal.signal(ALARM, signal.SIG_IGN)
    # The kernel kills all of them then, whatever they are doing.
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgid(0))
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    if life.poll():
        return
    torch.set_num_threads(1)
    while True:
        try:
            task: Task = pickle.loads(pipe.recv_bytes())
        except (EOFError, KeyboardInterrupt):
            return
        answer = _answer(task)
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(_pickled(answer))


def _answer(task: Task) -> Answer:
    with _printing_to_files(task):
        _take_surroundings(task)
        before = _state()
        answer = _call(task)
        _tell_end(task, answer)
        _leave_groups()
        answer.clean = not dist.is_initialized() and _state() == before
    if answer.error is not None:
        for link in linked(answer.error):
            _forget_report(link, task.boxes)
        answer.failure = Sent.of(answer.error)
        answer.error = None
    return answer


def _forget_report(error: BaseException, folder: str) -> None:
    """The note that points to black boxes which are removed in the end."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if not note.startswith(f"{REPORT_NOTE}{folder}{os.sep}")]


def _call(task: Task) -> Answer:
    answer = Answer()
    store = FileStore(os.path.join(task.folder, "store"), task.ranks)
    given = World(task.ranks, store, lambda: Path(task.folder, "shared"))
    try:
        with _watching(task, answer) as watcher:
            function, watcher.faults = _function(task)
            # Modules may draw when they are imported.
            seed_generators()
            if task.init:
                own = PrefixStore("world", store)
                dist.init_process_group(
                    "phalanx", store=own, rank=task.rank, world_size=task.ranks, timeout=task.timeout
                )
            answer.value = function(task.rank, given)
    except Interruption as interruption:
        answer.error = Stuck(str(interruption))
    except SystemExit as end:
        answer.error = exit_error(task.rank, end)
        if answer.error is not None:
            try:
                raise answer.error
            except RuntimeError:
                _leave_groups()
    except BaseException as error:
        answer.error = error
        _leave_groups()
    answer.at = time.time()
    return answer


def _tell_end(task: Task, answer: Answer) -> None:
    """Ranks that wait for this one to make a group with them find its last words."""
    path = end_path(task.folder, task.rank)
    unfinished = path.with_name(f"{path.name}-unfinished")
    unfinished.write_text("" if answer.error is None else last_words(answer.error))
    unfinished.rename(path)


def _words_of_ended(folder: str, rank: int) -> str | None:
    try:
        return end_path(folder, rank).read_text()
    except FileNotFoundError:
        return None


def _leave_groups() -> None:
    """Peers are told of the exception that is on its way, if there is one."""
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


def _function(task: Task) -> tuple[Callable[..., Any], dict[int, list[Fault]]]:
    try:
        return pickle.loads(task.function)  # type: ignore[no-any-return]
    except ModuleNotFoundError:
        if task.module is None:
            raise
    name, file = task.module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return pickle.loads(task.function)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _watching(task: Task, answer: Answer) -> Iterator[_Watcher]:
    """Counts calls, makes faults happen, and lets a rank that is stuck be interrupted."""
    watcher = _Watcher(task)

    def interrupt(_: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame))
        raise Interruption(f"rank {task.rank} did not communicate for {task.stuck_after:g} s; it was here:\n{stack}")

    before = signal.signal(ALARM, interrupt)
    with stack_path(task.folder, task.rank).open("w") as stack_file:
        faulthandler.register(ALARM, stack_file, chain=True)
        group.on_join = lambda transport: _Watched(transport, watcher)  # type: ignore[assignment, return-value]
        lookout.words_of_ended = partial(_words_of_ended, task.folder)
        try:
            yield watcher
        finally:
            answer.num_calls = watcher.num_calls
            group.on_join = None
            lookout.words_of_ended = None
            faulthandler.unregister(ALARM)
            signal.signal(ALARM, before)


@contextlib.contextmanager
def _printing_to_files(task: Task) -> Iterator[None]:
    """What the rank prints, from Python or not, is kept for the process that started it."""
    kept = []
    for stream in STREAMS:
        file: Any = getattr(sys, f"__{stream}__")
        file.flush()
        number = STREAMS.index(stream) + 1
        kept.append((file, number, os.dup(number)))
        target = os.open(stream_path(task.folder, stream, task.rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(target, number)
        os.close(target)
        file.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        for file, number, before in kept:
            with contextlib.suppress(Exception):
                file.flush()
            os.dup2(before, number)
            os.close(before)


def _take_surroundings(task: Task) -> None:
    """Those of the process that runs the tests; the next task brings its own."""
    sys.path[:] = task.path
    if os.environ != task.environ:
        os.environ.clear()
        os.environ.update(task.environ)
    os.chdir(task.working_folder)


def _children() -> set[str]:
    multiprocessing.active_children()
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            found.update(path.read_text().split())
    return found


def _state() -> tuple[Any, ...]:
    """What a test may leave changed. Not what it does to modules and classes: nobody can see that."""
    return (
        threading.active_count(),
        _children(),
        # A test may have put something in their place, or closed them.
        [(getattr(sys, stream), getattr(sys, f"__{stream}__").closed) for stream in STREAMS],
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
    )


def _pickled(answer: Answer) -> bytes:
    # Not through torch's pickler, which would share memory with this process.
    try:
        pickled = pickle.dumps(answer)
        pickle.loads(pickled)
        return pickled
    except Exception as error:
        failure = Sent.of(RuntimeError(f"a result of {type(answer.value)} can't be sent: {error}"))
        return pickle.dumps(replace(answer, value=None, failure=answer.failure or failure))
