"""Runs a function as ranks that are processes, on shared memory. Workers stay for the next run.

A worker that was killed, or that a run left in a state it did not find it in, is replaced. Workers end with this
process, whatever becomes of it: they read from a pipe that ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from phalanx.testing.world import World

__all__ = ["run_in_processes"]

# Seconds that workers are given after the first failure, or to end.
_PATIENCE = 10.0


@dataclass
class _Task:
    """What a worker is sent, as far as it can be pickled by itself; the function comes pickled, with what it needs."""

    function: bytes
    path: list[str]
    rank: int
    ranks: int
    folder: str
    init: bool
    timeout: timedelta | None


@dataclass
class _Answer:
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    clean: bool = True
    at: float = 0.0


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "phalanx.testing.processes"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_idle: list[_Worker] = []
_lock = threading.Lock()


def run_in_processes(
    function: Callable[[int, World], Any], ranks: int, init: bool, timeout: timedelta | None
) -> tuple[list[Any], list[tuple[int, BaseException]]]:
    """What each rank returned, and the failures in the order in which they came."""
    pickled = _pickled(function)
    workers = _take(ranks)
    answers: dict[int, _Answer] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
            for rank, worker in enumerate(workers):
                worker.pipe.send(_Task(pickled, sys.path, rank, ranks, folder, init, timeout))
            _collect(workers, answers)
    finally:
        _give_back(workers, answers)
    failures = [(rank, answer.error) for rank, answer in answers.items() if answer.error is not None]
    failures.sort(key=lambda failure: answers[failure[0]].at)
    return [answers[rank].value for rank in range(ranks)], failures


def _pickled(function: Callable[..., Any]) -> bytes:
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"expected a function that another process can be sent, got {function!r} ({error}): define it at the top "
            "of a module, not as a lambda or inside another function"
        ) from None


def _collect(workers: list[_Worker], answers: dict[int, _Answer]) -> None:
    deadline = None
    while len(answers) < len(workers):
        waited = {workers[rank].pipe: rank for rank in range(len(workers)) if rank not in answers}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waited), left)
        for rank in [rank for pipe, rank in waited.items() if pipe in ready]:
            try:
                # Not through torch's pickler, which would share memory with the worker.
                answers[rank] = pickle.loads(workers[rank].pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                workers[rank].process.join()
                answers[rank] = _Answer(error=_died(rank, workers[rank].process.exitcode), clean=False, at=time.time())
        if not ready:
            for rank in set(range(len(workers))) - set(answers):
                late = f"rank {rank} did not end within {_PATIENCE:g} s of the first failure, and was killed"
                error = RuntimeError(late)
                answers[rank] = _Answer(error=error, clean=False, at=time.time())
        if deadline is None and any(answer.error is not None for answer in answers.values()):
            deadline = time.monotonic() + _PATIENCE


def _died(rank: int, code: int | None) -> BaseException:
    if code is not None and code < 0:
        return RuntimeError(f"rank {rank} was killed by {signal.Signals(-code).name}")
    return RuntimeError(f"rank {rank} ended with exit code {code}")


def _take(num: int) -> list[_Worker]:
    with _lock:
        taken = [_idle.pop() for _ in range(min(num, len(_idle)))]
    workers = []
    for worker in taken:
        if worker.process.is_alive():
            workers.append(worker)
        else:
            worker.end()
    return workers + [_Worker() for _ in range(num - len(workers))]


def _give_back(workers: list[_Worker], answers: dict[int, _Answer]) -> None:
    for rank, worker in enumerate(workers):
        if rank in answers and answers[rank].clean:
            with _lock:
                _idle.append(worker)
        else:
            worker.end()


@atexit.register
def _end_all() -> None:
    while _idle:
        _idle.pop().end()


# A forked child does not own the workers.
os.register_at_fork(after_in_child=_idle.clear)


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            task: _Task = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send_bytes(_pickled_answer(_answer(task)))


def _answer(task: _Task) -> _Answer:
    before = threading.active_count()
    sys.path[:] = task.path
    answer = _Answer()
    store = FileStore(os.path.join(task.folder, "store"), task.ranks)
    given = World(task.ranks, store, lambda: Path(task.folder))
    try:
        function = pickle.loads(task.function)
        if task.init:
            own = PrefixStore("world", store)
            dist.init_process_group("phalanx", store=own, rank=task.rank, world_size=task.ranks, timeout=task.timeout)
        answer.value = function(task.rank, given)
    except BaseException as error:
        answer.at = time.time()
        answer.error, answer.trace = error, traceback.format_exc()
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
    answer.clean = not dist.is_initialized() and threading.active_count() <= before
    if answer.error is not None:
        answer.error.add_note(answer.trace)
    return answer


def _pickled_answer(answer: _Answer) -> bytes:
    try:
        pickled = pickle.dumps(answer)
        pickle.loads(pickled)
    except Exception as error:
        told = answer.trace or f"a result of {type(answer.value)} can't be sent: {error}"
        return pickle.dumps(_Answer(error=RuntimeError(told), clean=answer.clean, at=time.time()))
    return pickled
