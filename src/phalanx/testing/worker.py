"""The process that is a rank: it takes tasks from a pipe, one after another, and answers."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
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
from phalanx.group.endings import last_words
from phalanx.testing.belongings import seed_generators
from phalanx.testing.faults import Fault
from phalanx.testing.scheduling import Interruption
from phalanx.testing.tracebacks import Sent, linked
from phalanx.testing.watched_calls import CallCounts, Faults, SharedCounts
from phalanx.testing.world import Stuck, World, exit_error
from phalanx.transports import factory, lookout
from phalanx.transports.observers import observing

__all__ = ["ALARM", "STREAMS", "Task", "TaskOutcome", "serve", "stack_path", "stream_path"]

# Interrupts a rank that is stuck. Programs have little use for it, unlike SIGUSR1.
ALARM = signal.SIGRTMIN + 7
STREAMS = ("stdout", "stderr")


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
class TaskOutcome:
    """What became of a task."""

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
        outcome = _carry_out(task)
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(_pickled(outcome))


def _carry_out(task: Task) -> TaskOutcome:
    with _printing_to_files(task):
        _take_surroundings(task)
        before = _state()
        outcome = _call(task)
        _tell_end(task, outcome)
        _leave_groups()
        outcome.clean = not dist.is_initialized() and _state() == before
    if outcome.error is not None:
        for link in linked(outcome.error):
            _forget_report(link, task.boxes)
        outcome.failure = Sent.of(outcome.error)
        outcome.error = None
    return outcome


def _forget_report(error: BaseException, folder: str) -> None:
    """The note that points to black boxes which are removed in the end."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if not note.startswith(f"{REPORT_NOTE}{folder}{os.sep}")]


def _call(task: Task) -> TaskOutcome:
    outcome = TaskOutcome()
    store = FileStore(os.path.join(task.folder, "store"), task.ranks)
    given = World(task.ranks, store, lambda: Path(task.folder, "shared"))
    try:
        with _watching(task, outcome) as faults:
            function, faults.by_call = _function(task)
            # Modules may draw when they are imported.
            seed_generators()
            if task.init:
                own = PrefixStore("world", store)
                dist.init_process_group(
                    "phalanx", store=own, rank=task.rank, world_size=task.ranks, timeout=task.timeout
                )
            outcome.value = function(task.rank, given)
    except Interruption as interruption:
        outcome.error = Stuck(str(interruption))
    except SystemExit as end:
        outcome.error = exit_error(task.rank, end)
        if outcome.error is not None:
            try:
                raise outcome.error
            except RuntimeError:
                _leave_groups()
    except BaseException as error:
        outcome.error = error
        _leave_groups()
    outcome.at = time.time()
    return outcome


def _tell_end(task: Task, outcome: TaskOutcome) -> None:
    """Ranks that wait for this one to make a group with them find its last words."""
    path = end_path(task.folder, task.rank)
    unfinished = path.with_name(f"{path.name}-unfinished")
    unfinished.write_text("" if outcome.error is None else last_words(outcome.error))
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
def _watching(task: Task, outcome: TaskOutcome) -> Iterator[Faults]:
    """Counts calls, makes faults happen, and lets a rank that is stuck be interrupted."""
    counts = CallCounts(SharedCounts(task.folder, task.ranks), task.rank)
    faults = Faults(counts)

    def interrupt(_: int, frame: FrameType | None) -> None:
        stack = "".join(traceback.format_stack(frame))
        raise Interruption(f"rank {task.rank} did not communicate for {task.stuck_after:g} s; it was here:\n{stack}")

    before = signal.signal(ALARM, interrupt)
    with stack_path(task.folder, task.rank).open("w") as stack_file:
        faulthandler.register(ALARM, stack_file, chain=True)
        lookout.words_of_ended = partial(_words_of_ended, task.folder)
        try:
            with observing(counts), factory.wrapped_with(faults.wrap):
                yield faults
        finally:
            outcome.num_calls = faults.num_calls
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


def _pickled(outcome: TaskOutcome) -> bytes:
    # Not through torch's pickler, which would share memory with this process.
    try:
        pickled = pickle.dumps(outcome)
        pickle.loads(pickled)
        return pickled
    except Exception as error:
        failure = Sent.of(RuntimeError(f"a result of {type(outcome.value)} can't be sent: {error}"))
        return pickle.dumps(replace(outcome, value=None, failure=outcome.failure or failure))
