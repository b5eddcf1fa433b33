"""Runs a function as several ranks in one process."""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from phalanx.errors import PeerLost
from phalanx.testing.faults import Fault, check_faults
from phalanx.testing.processes import run_in_processes
from phalanx.testing.schedules import Policy, RandomChoice, Replay, RoundRobin, Trace, decode, encode
from phalanx.testing.world import ThreadsWorld, Unwound, World
from phalanx.transports import threads

__all__ = ["run"]

_SCHEDULES = ("round robin", "random", "free")


# Seconds between two looks at whether a run gets on.
_BETWEEN_LOOKS = 0.25


class Stuck(RuntimeError):
    """A rank neither ends nor communicates."""


def run(
    function: Callable[[int, World], Any],
    ranks: int,
    *,
    seed: int | None = None,
    schedule: str | None = None,
    replay: str | None = None,
    check: bool = False,
    faults: Iterable[Fault] = (),
    init: bool = True,
    timeout: timedelta | None = None,
    stuck_after: float = 60.0,
    processes: bool = False,
) -> list[Any]:
    """Calls function(rank, world) once for each rank and returns what each returned, by rank.

    torch.distributed's functions work inside, each rank with groups of its own. The first failure is raised; a note
    in it has the schedule, which `replay` repeats. Ranks take turns where they communicate: one after another, or with
    `schedule="random"` (or a `seed`) as the seed has it; with `schedule="free"` all run at once. With `check` the
    program is run twice, and it is an error if it does not do the same. Without `timeout` calls of the default group
    wait for ever; a deadlock is found at once. A rank that does not communicate for `stuck_after` seconds, of real
    time, gets an exception.

    With `processes` the ranks are processes, on shared memory, and run freely.
    """
    _check(function, ranks)
    by_call = check_faults(faults, ranks)
    if processes:
        if by_call or check or (seed, schedule, replay) != (None, None, None):
            raise ValueError("expected no schedule, check or faults for ranks that are processes: they run freely")
        results, failures = run_in_processes(function, ranks, init, timeout)
        if failures:
            raise _to_blame(failures)
        return results
    if replay is not None and (seed is not None or schedule is not None):
        raise ValueError("expected a schedule to replay or a way to choose one, got both")
    recorded = None if replay is None else decode(replay)
    if recorded is not None and recorded[0] != ranks:
        raise ValueError(f"expected a schedule of {ranks} ranks, got one of {recorded[0]}")

    if schedule == "free" and (check or seed is not None):
        raise ValueError("expected no seed or check for ranks that run freely")

    def once(policy: Policy | None) -> _Outcome:
        return _run_once(function, ranks, ThreadsWorld(ranks, policy, by_call), init, timeout, stuck_after)

    policy = _policy(schedule, seed) if recorded is None else Replay(recorded[2], recorded[1])
    outcome = once(policy)
    if recorded is not None and (outcome.choices != recorded[2] or outcome.trace.fingerprint() != recorded[3]):
        raise ValueError("expected the schedule of this program, got one of a program that does other things")
    if check and policy is not None:
        again = once(Replay(outcome.choices, policy.at_calls))
        difference = outcome.trace.first_difference(again.trace)
        if difference is not None:
            raise RuntimeError(f"expected a program that does the same each time, got other events: {difference}")
    if outcome.failures:
        raise _first(outcome, ranks, policy)
    return outcome.results


@dataclass
class _Outcome:
    results: list[Any]
    failures: list[tuple[int, BaseException]]
    choices: list[int]
    trace: Trace


def _run_once(
    function: Callable[[int, World], Any],
    ranks: int,
    world: ThreadsWorld,
    init: bool,
    timeout: timedelta | None,
    stuck_after: float,
) -> _Outcome:
    outcome = _Outcome([None] * ranks, [], world.turns.choices, world.turns.trace)
    with world:
        given = World(ranks, world.store, world.folder)

        def body(rank: int) -> None:
            error: BaseException | None = None
            try:
                if init:
                    store = PrefixStore("world", world.store)
                    dist.init_process_group("phalanx", store=store, rank=rank, world_size=ranks, timeout=timeout)
                outcome.results[rank] = function(rank, given)
            except BaseException as caught:
                # The one that was thrown in has no message.
                error = caught if not isinstance(caught, Stuck) or world.stuck is None else world.stuck
                if isinstance(caught, SystemExit):
                    error = RuntimeError(f"rank {rank} called sys.exit({caught.code!r})") if caught.code else None
                if error is not None and rank not in world.killed:
                    outcome.failures.append((rank, error))
            world.end(rank, error)

        workers = [
            threading.Thread(target=world.main_of, args=(rank, partial(body, rank)), name=f"rank {rank}", daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        try:
            world.turns.begin()
            _watch(world, workers, stuck_after)
            while world.turns.free(Unwound()):
                _watch(world, workers, stuck_after)
        except BaseException:
            # Ctrl-C, or a rank that is stuck: ranks end where they communicate next.
            world.abandon(Unwound())
            raise
        for worker in workers:
            worker.join()
    return outcome


def _watch(world: ThreadsWorld, workers: list[threading.Thread], stuck_after: float) -> None:
    """Until all have ended. A rank that keeps its turn for too long gets an exception; one that ignores it is left."""
    turns = world.turns
    seen, since, told = turns.num_turns, time.monotonic(), False
    while not turns.all_ended.wait(min(_BETWEEN_LOOKS, stuck_after)):
        if turns.num_turns != seen:
            seen, since, told = turns.num_turns, time.monotonic(), False
        if time.monotonic() - since < stuck_after:
            continue
        rank = turns.current
        thread = workers[rank].ident
        assert thread is not None
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        what = f"rank {rank} did not communicate for {stuck_after:g} s"
        if told:
            raise Stuck(f"{what}, ignored an exception, and its thread was abandoned; it was here:\n{stack}")
        world.stuck = Stuck(f"{what}; it was here:\n{stack}")
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stuck))
        since, told = time.monotonic(), True


def _first(outcome: _Outcome, ranks: int, policy: Policy | None) -> BaseException:
    error = _to_blame(outcome.failures)
    if policy is None:
        return error
    error.add_note(f"again: replay={encode(ranks, policy.at_calls, outcome.choices, outcome.trace.fingerprint())!r}")
    return error


def _to_blame(failures: list[tuple[int, BaseException]]) -> BaseException:
    """Not one that only was told of another."""
    rank, error = next(((r, e) for r, e in failures if not isinstance(e, PeerLost)), failures[0])
    others = sorted(r for r, _ in failures if r != rank)
    error.add_note(f"on rank {rank}" + (f"; because of it also on {_listed(others)}" if others else ""))
    return error


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _policy(schedule: str | None, seed: int | None) -> Policy | None:
    if schedule not in (None, *_SCHEDULES):
        raise ValueError(f"expected a schedule of {', '.join(map(repr, _SCHEDULES))}, got {schedule!r}")
    if schedule == "free":
        return None
    if schedule == "round robin" or (schedule is None and seed is None):
        return RoundRobin()
    return RandomChoice(0 if seed is None else seed)


def _check(function: Callable[..., Any], ranks: int) -> None:
    if threads.place.world is not None:
        raise RuntimeError("expected to be outside of a run, got a call from one of its ranks; runs can't be nested")
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"expected at least one rank, got {ranks!r}")
    try:
        inspect.signature(function).bind(0, None)
    except TypeError as error:
        raise TypeError(f"expected a function that takes (rank, world), got {function!r}: {error}") from None
