"""Runs the programs of these tests on Gloo, plain and guarded, in processes that are thrown away."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forking import context
from phalanx import _autoload
from phalanx.guards.guarded import GuardedGroup

__all__ = ["Killed", "OnGloo", "run_on_gloo", "same"]

Program = Callable[[int, Any], Any]


@dataclass
class OnGloo:
    """What programs ask of a world."""

    size: int
    tmp_path: Path


class Killed:
    """What a rank that was killed has returned."""


def run_on_gloo(
    function: Program, ranks: int, folder: Path, *, guarded: bool, seconds: float = 30, limit: float = 110
) -> list[Any]:
    """What function(rank, world) has returned on each rank. `seconds` is the timeout of the group.

    A rank that raises, or does not end before the limit, fails the test.
    """
    where = folder / ("guarded" if guarded else "plain")
    where.mkdir()
    pipes, processes = [], []
    deadline = time.monotonic() + limit
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            world = OnGloo(ranks, where)
            process = context.Process(target=_be_rank, args=(theirs, function, rank, world, guarded, seconds))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        outcomes = [_outcome(rank, pipe, deadline) for rank, pipe in enumerate(pipes)]
        for rank, process in enumerate(processes):
            process.join(max(1.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} did not end"
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(outcomes) if kind == "error"]
    assert not errors, "\n".join(errors)
    return [value for _, value in outcomes]


def _outcome(rank: int, pipe: Connection, deadline: float) -> tuple[str, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return "error", "did not end in time"
    try:
        outcome: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "value", Killed()
    return outcome


def _be_rank(pipe: Connection, function: Program, rank: int, world: OnGloo, guarded: bool, seconds: float) -> None:
    torch.set_num_threads(1)
    try:
        outcome: tuple[str, Any] = "value", _run(function, rank, world, guarded, seconds)
    except BaseException:
        outcome = "error", traceback.format_exc()
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(pickle.dumps(outcome))


def _run(function: Program, rank: int, world: OnGloo, guarded: bool, seconds: float) -> Any:
    if guarded:
        os.environ["PHALANX_GUARD"] = "1"
        _autoload.register()
    store = dist.FileStore(os.fspath(world.tmp_path / "store"), world.size)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size, timeout=timeout)
    assert isinstance(dist.group.WORLD, GuardedGroup) == guarded
    value = function(rank, world)
    dist.destroy_process_group()
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("phalanx")], threads
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two results of programs are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
