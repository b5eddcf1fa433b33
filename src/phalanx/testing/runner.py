"""Runs a function as several ranks."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from phalanx.errors import InvalidCall
from phalanx.testing.faults import Fault, check_all_happened
from phalanx.testing.first_failure import RankError, first_failure
from phalanx.testing.options import STUCK_AFTER, Options
from phalanx.testing.processes import Tell, run_in_processes
from phalanx.testing.schedules import Policy, Recorded, Replay, Trace
from phalanx.testing.scheduling import Interruption, Unwound
from phalanx.testing.world import Stuck, ThreadsRun, World, exit_error

__all__ = ["execute", "run"]

# Seconds between two looks at whether a run gets on.
_BETWEEN_LOOKS = 0.25
# torch has one world for all threads, and a run has it replaced.
_running = threading.Lock()


def run(
    function: Callable[[int, World], Any],
    ranks: int,
    *,
    seed: int | None = None,
    schedule: str | None = None,
    replay: str | None = None,
    check: bool = False,
    faults: Fault | Iterable[Fault] = (),
    init: bool = True,
    timeout: timedelta | None = None,
    stuck_after: float = STUCK_AFTER,
    processes: bool = False,
) -> list[Any]:
    """Calls function(rank, world) once for each rank and returns what each returned, by rank.

    torch.distributed's functions work inside, each rank with groups of its own. The first failure is raised; its notes
    name the rank, what it caused on others, and the call that repeats the schedule. Ranks take turns where they
    communicate: one after another, or with `schedule="random"` (or a `seed`) as the seed has it; with
    `schedule="free"` all run at once. With `check` the program is run twice, and it is an error if it does not do the
    same. Without `timeout` calls of the default group wait for ever; a deadlock is found at once. A rank that does not
    communicate for `stuck_after` seconds, of real time, gets an exception. `faults` (`kill`, `delay`, `fail`) happen to
    ranks when they come to a call. With `init=False` the function makes the default group itself.

    With `processes` the ranks are processes, on shared memory, and run freely.
    """
    __tracebackhide__ = True
    return execute(
        Options(function, ranks, seed, schedule, replay, check, faults, init, timeout, stuck_after, processes)
    )


def execute(options: Options, command: Callable[[str], str] | None = None, tell: Tell | None = None) -> list[Any]:
    """`command` makes of a replay string what the user is told to do with it; `tell` gets what processes print."""
    __tracebackhide__ = True
    if options.processes:
        results, failures, num_calls = run_in_processes(options, tell)
        if failures:
            _raise(first_failure(failures))
        check_all_happened(options.faults_by_call, num_calls)
        return results
    if not _running.acquire(blocking=False):
        raise RuntimeError("expected one run at a time in a process, got a second one in another thread")
    try:
        return _execute(options, command or options.call_to_replay)
    finally:
        _running.release()


def _raise(error: BaseException) -> None:
    """The one frame that a report shows of an error that comes without any, as that of a rank that was killed."""
    __tracebackhide__ = error.__traceback__ is not None
    raise error


def _execute(options: Options, command: Callable[[str], str]) -> list[Any]:
    __tracebackhide__ = True
    policy = options.policy()
    outcome = _run_once(options, policy)
    recorded = options.recorded
    if recorded is not None and (outcome.choices, outcome.trace.fingerprint()) != recorded[2:]:
        raise ValueError("expected the schedule of this program, got one of a program that does other things")
    if options.check and policy is not None:
        again = _run_once(options, Replay(outcome.choices, policy.at_calls))
        difference = outcome.trace.first_difference(again.trace)
        if difference is not None:
            raise RuntimeError(f"expected a program that does the same each time, got other events: {difference}")
        if again.failures and not outcome.failures:
            error = first_failure(again.failures)
            error.add_note("in the second run of two: expected a program that does the same each time")
            raise error
    if outcome.strangers:
        # Whatever else went wrong, it lacked this call.
        raise outcome.strangers[0]
    if not outcome.failures:
        check_all_happened(options.faults_by_call, outcome.num_calls)
        return outcome.results
    error = first_failure(outcome.failures)
    if policy is not None:
        schedule = Recorded(options.ranks, policy.at_calls, outcome.choices, outcome.trace.fingerprint())
        error.add_note(f"again: {command(schedule.encode())}")
    raise error


@dataclass
class _Outcome:
    results: list[Any]
    failures: list[RankError]
    choices: list[int]
    trace: Trace
    num_calls: list[int] = field(default_factory=list)
    # Calls from threads of which nobody knows whose they are.
    strangers: list[InvalidCall] = field(default_factory=list)


def _run_once(options: Options, policy: Policy | None) -> _Outcome:
    ranks = options.ranks
    with ThreadsRun(ranks, policy, options.faults_by_call) as world:
        outcome = _Outcome([None] * ranks, [], world.turns.choices, world.turns.trace)
        world.failures_of_helpers = outcome.failures
        # A deadlock is told before the run counts as stuck.
        world.turns.patience = options.stuck_after / 2
        given = World(ranks, world.store, world.folder)

        def body(rank: int) -> None:
            __tracebackhide__ = True
            error: BaseException | None = None
            try:
                if options.init:
                    store = PrefixStore("world", world.store)
                    dist.init_process_group(
                        "phalanx", store=store, rank=rank, world_size=ranks, timeout=options.timeout
                    )
                try:
                    result = options.function(rank, given)
                except SystemExit as end:
                    if end.code:
                        raise
                    result = None
                world.complete(rank)
                if rank not in world.killed:
                    outcome.results[rank] = result
            except BaseException as caught:
                world.end_if_forked(caught)
                error = caught
                if isinstance(caught, Interruption):
                    error = world.stuck.get(rank, caught)
                elif isinstance(caught, SystemExit):
                    error = exit_error(rank, caught)
                if error is not None and rank not in world.killed:
                    outcome.failures.append((rank, error))
            world.end_if_forked(None)
            world.end(rank, error)

        try:
            world.start(body)
            world.turns.begin()
            _watch(world, options.stuck_after)
            while world.turns.free():
                _watch(world, options.stuck_after)
            for rank, worker in enumerate(world.workers):
                if rank not in world.left_behind:
                    worker.join()
            outcome.num_calls = world.turns.num_calls()
            outcome.strangers = list(world.turns.strangers)
        except BaseException:
            # Ctrl-C, a rank that is stuck, or no more threads to be had.
            world.abandon(Unwound())
            raise
    return outcome


def _watch(world: ThreadsRun, stuck_after: float) -> None:
    """Until all have ended. A rank that keeps its turn for too long gets an exception; one that ignores it is left."""
    turns = world.turns
    seen, since, told = turns.num_steps, time.monotonic(), False
    while not turns.all_ended.wait(min(_BETWEEN_LOOKS, stuck_after)):
        if turns.num_steps != seen:
            seen, since, told = turns.num_steps, time.monotonic(), False
        resting = turns.has_come_to_rest()
        if resting is not None:
            world.leave_behind(resting)
            turns.all_ended.set()
            return
        if time.monotonic() - since < stuck_after:
            continue
        rank = turns.current
        worker = world.workers[rank]
        thread = turns.current_thread or None
        frame = None if thread is None else sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        what = f"rank {rank} did not communicate for {stuck_after:g} s"
        waits = world.describe_waits()
        if told:
            raise Stuck(f"{what}, ignored an exception, and its thread was abandoned; it was here:\n{stack}{waits}")
        world.stuck[rank] = Stuck(f"{what}; it was here:\n{stack}{waits}")
        # To look at the stack takes a while.
        if thread is not None and worker.is_alive() and (turns.num_steps, turns.current) == (seen, rank):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interruption))
        since, told = time.monotonic(), True
