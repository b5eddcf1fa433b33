"""One world in which a rank dies: what each rank does, and how the keeper watches it (judgement.py judges).

Survivors either go on with the program after an error or stop and leave (`Scenario.stops`). One that could not make a
group always stops. Others may then have to do without it, and may name it instead of the victim.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from calls import Call, Place
from judgement import Error, Facts, detail, judge, judge_peace
from ops import build
from resources import Holdings, left_files, left_over, shared_files
from scenarios import Scenario, Step, VictimError
from torch.distributed import Store
from worlds import Event, Here, Rank, Supervisor, World

# Seconds. Nothing here waits for these to pass unless something is wrong.
LIMIT = 10.0
_START_LIMIT = 60.0
_GROUP_TIMEOUT = timedelta(seconds=120)
_TIMEOUT_FOR_UNKNOWN = timedelta(seconds=3)
_TIDY_LIMIT = 5.0
# Of what a rank says: it must go into one message.
_MOST_ERRORS = 25
_LONGEST_TEXT = 1_200


class _Program:
    """One rank on its way through the steps."""

    def __init__(self, here: Here, scenario: Scenario, deadly: bool) -> None:
        self._here = here
        self._scenario = scenario
        self._is_victim = deadly and here.rank == scenario.victim
        self._places: dict[int, Place] = {}
        self._pending: list[tuple[int, Call]] = []
        self._rng = random.Random(f"{scenario.seed} {here.rank}")
        self._stopped = False
        self.errors: list[Error] = []

    def run(self) -> None:
        ends_as_program = self._is_victim and self._scenario.death in ("exception", "sys.exit")
        if ends_as_program or self._scenario.stops:
            self._here.unfreeze_unless_quick()
        store = self._here.connect()
        self._here.tell("ready")
        self._here.wait_told()
        before = Holdings.now()
        for number, step in enumerate(self._scenario.steps):
            if self._stopped:
                break
            self._take(number, step, store)
        if self._is_victim:
            self._await_death()
        stopped = self._stopped
        self._places.clear()
        self._pending.clear()
        self._attempt(len(self._scenario.steps), "leaving", (), _leave)
        left = left_over(before, _TIDY_LIMIT)
        self._here.tell("done", stopped=stopped, left=left, errors=[asdict(error) for error in self.errors])
        # Here, not earlier: closing the connections would hide descriptors that were left open.
        del store

    def _take(self, number: int, step: Step, store: Store) -> None:
        scenario, rank = self._scenario, self._here.rank
        deadly = self._is_victim and number == scenario.target
        if self._is_victim:
            self._here.board.note_step(number)
        if deadly:
            self._die_in(step)
        if step.kind == "make":
            self._attempt(number, "make", step.ranks, lambda: self._make(step, store))
        elif step.kind == "wait":
            self._wait_all()
        elif step.kind == "destroy":
            self._wait_all()
            if rank in step.ranks:
                place = self._places.pop(step.group)
                self._attempt(number, "destroy", step.ranks, lambda: dist.destroy_process_group(place.group))
        elif step.takes_part(rank):
            self._call(number, step)
        if deadly and scenario.moment == "after":
            self._die()

    def _make(self, step: Step, store: Store) -> None:
        rank = self._here.rank
        if step.group == 0:
            timeout = _TIMEOUT_FOR_UNKNOWN if self._scenario.may_die_unknown else _GROUP_TIMEOUT
            dist.init_process_group(
                self._scenario.backend, store=store, rank=rank, world_size=len(step.ranks), timeout=timeout
            )
            group: Any = dist.group.WORLD
        else:
            group = dist.new_group(list(step.ranks), timeout=_GROUP_TIMEOUT)
        if rank in step.ranks:
            self._places[step.group] = Place(group, step.ranks, step.ranks.index(rank))

    def _call(self, number: int, step: Step) -> None:
        assert step.what is not None
        call = build(step.what, self._places[step.group])
        started = self._attempt(number, "start", step.ranks, call.start)
        if started and step.what.async_op:
            self._pending.append((number, call))
        elif started:
            self._attempt(number, "check", step.ranks, call.check)

    def _wait_all(self) -> None:
        """In any order: async calls get on without being waited for."""
        self._rng.shuffle(self._pending)
        for number, call in self._pending:
            ranks = self._scenario.steps[number].ranks
            if not self._stopped and self._attempt(number, "wait", ranks, call.wait):
                self._attempt(number, "check", ranks, call.check)
        self._pending.clear()

    def _attempt(self, number: int, stage: str, ranks: tuple[int, ...], act: Callable[[], object]) -> bool:
        """Whether it went well. Its error is noted, and the keeper hears of the first at once."""
        import phalanx

        try:
            act()
        except VictimError:
            raise
        except Exception as error:
            lost = isinstance(error, phalanx.PeerLost)
            ours = isinstance(error, phalanx.PhalanxError)
            # Without the head, which has the rank that raises it.
            text = str(error)
            text = text[text.find(getattr(error, "message", text)) :][:_LONGEST_TEXT]
            trace = "" if ours else traceback.format_exc()[-_LONGEST_TEXT:]
            met = Error(number, stage, ranks, type(error).__name__, ours, text, trace)
            if not self.errors:
                self._here.tell("lost", errors=[asdict(met)])
            if len(self.errors) < _MOST_ERRORS:
                self.errors.append(met)
            self._stopped |= not lost or stage == "make" or self._scenario.stops
            return False
        return True

    def _die_in(self, step: Step) -> None:
        """Dies now, or has it done while the step is under way."""
        scenario = self._scenario
        if scenario.moment == "before":
            self._die()
        elif scenario.death == "outside":
            self._here.tell("at")
        elif scenario.moment == "during":
            # The other thread must get its turns, also while this one is in Python.
            sys.setswitchinterval(1e-5)
            threading.Thread(target=self._die_soon, daemon=True).start()

    def _die_soon(self) -> None:
        for _ in range(self._scenario.yields):
            os.sched_yield()
        self._die()

    def _die(self) -> None:
        scenario = self._scenario
        self._here.board.note_death()
        if scenario.death == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif scenario.death == "SIGSEGV":
            ctypes.string_at(0)
        elif scenario.death == "_exit":
            os._exit(scenario.code)
        elif scenario.death == "sys.exit":
            sys.exit(scenario.code)
        raise VictimError(scenario.words)

    def _await_death(self) -> None:
        """A victim that came to the end first does not leave: that would be another way to go."""
        while not self.errors:
            signal.pause()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _main(scenario: Scenario, deadly: bool, here: Here) -> None:
    _Program(here, scenario, deadly).run()


def supervise(
    supervisor: Supervisor, seed: int, backend: str = "phalanx", p2p: bool = True, deadly: bool = True
) -> dict[str, Any]:
    """Runs the scenario of a seed. With `deadly` false nobody dies and everybody must come to the end."""
    scenario = Scenario.of(seed, backend=backend, p2p=p2p)
    files = shared_files()
    start = time.monotonic()
    world = World(supervisor, scenario.size, functools.partial(_main, scenario, deadly))
    facts = _watch(world, scenario, deadly)
    facts.processes = world.close()
    facts.statuses = {rank.number: rank.status for rank in world.ranks}
    facts.files = left_files(files, _TIDY_LIMIT)
    problems = judge(scenario, facts) if deadly else judge_peace(scenario, facts)
    lost = [seconds for rank, seconds in facts.reported.items() if facts.errors.get(rank)]
    return {
        "seed": seed,
        "scenario": str(scenario),
        "death": scenario.death,
        "died_in": scenario.steps[facts.begun].name,
        "problems": problems,
        "detail": detail(facts) if problems else "",
        "lost_after": [] if scenario.may_die_unknown else lost,
        "seconds": time.monotonic() - start,
    }


def _watch(world: World, scenario: Scenario, deadly: bool) -> Facts:
    facts = Facts()
    victim = world.ranks[scenario.victim] if deadly else None
    reports: dict[int, float] = {}
    ready = 0
    for event in _until_stuck(world, victim, reports):
        number = event.rank.number
        if event.kind == "ready":
            ready += 1
            if ready == scenario.size:
                world.release()
        elif event.kind == "at":
            for _ in range(scenario.yields):
                os.sched_yield()
            world.board.note_death()
            os.kill(event.rank.pid, signal.SIGKILL)
        elif event.kind in ("lost", "done"):
            reports.setdefault(number, time.monotonic())
            facts.errors[number] = [Error(**error) for error in event.values["errors"]]
            if event.kind == "done":
                facts.done.add(number)
                facts.left[number] = event.values["left"]
                if event.values["stopped"]:
                    facts.stopped.add(number)
        elif event.kind == "ended" and event.rank is victim and not scenario.reaped_late:
            world.reap(event.rank)
    for rank in world.ranks:
        facts.texts[rank.number] = rank.text()[-2 * _LONGEST_TEXT :]
        if not rank.ended:
            facts.stuck[rank.number] = world.where(rank)
        else:
            world.reap(rank)
    facts.begun = world.board.begun
    if world.board.died:
        facts.reported = {rank: max(0.0, at - world.board.died) for rank, at in reports.items()}
    return facts


def _until_stuck(world: World, victim: Rank | None, reports: dict[int, float]) -> Iterable[Event]:
    """The events of a world, until all have ended or one has used up its time."""
    survivors = [rank for rank in world.ranks if rank is not victim]
    deadline = time.monotonic() + _START_LIMIT
    while time.monotonic() < deadline and any(not rank.ended for rank in world.ranks):
        for event in world.events(deadline):
            yield event
            if victim is not None and world.board.died:
                # First all must report; then they have as long again for the rest of their program, and to end.
                silent = any(rank.number not in reports for rank in survivors)
                deadline = world.board.died + (LIMIT if silent else 2 * LIMIT + _TIDY_LIMIT)
                break
