"""Mixed calls without an end: collectives and point to point, sync and async, on several groups, all results checked.

Every rank draws the same program from the seed. How it ends an async call is its own choice: by `wait`, by its future,
or not at all, so that the call is dropped while it is under way. Memory, threads and file descriptors are sampled ten
times and must stay as they were at the first sample; every op at every size has been called by then.
"""

from __future__ import annotations

import functools
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from calls import Call, Place, What
from ops import OPS, POINT_TO_POINT, build, collectives_of, dtypes_of
from resources import Holdings, left_files, left_over, private_bytes, shared_files
from worlds import Here, Supervisor, World

MEMORY_SLACK = 4 << 20
SAMPLES = 10
# Elements, and how often each is drawn.
_COUNTS = (1, 7, 64, 1_000, 4_096, 30_000, 300_000)
_WEIGHTS = (300, 300, 300, 200, 50, 10, 1)
_LONGEST_WINDOW = 32
# A group is made, used and destroyed once in so many calls.
_NEW_GROUP_EVERY = 1_000
_NEW_GROUP_CALLS = 5
_NOTE_SECONDS = 2.0
_STALL_LIMIT = 60.0
_TIDY_LIMIT = 5.0
_GROUP_TIMEOUT = timedelta(seconds=120)
_LONGEST_TEXT = 4_000

Drawn = tuple[What, int]


class _Program:
    """One rank's way through the calls."""

    def __init__(self, here: Here, backend: str, p2p: bool, seed: int) -> None:
        self._here = here
        self._backend = backend
        self._shared = random.Random(seed)
        self._own = random.Random(f"{seed} {here.rank}")
        self._ops = [op for op in OPS if op in collectives_of(backend) or (p2p and op in POINT_TO_POINT)]
        self._groups: list[tuple[tuple[int, ...], Place | None]] = []
        self._pending: deque[Call] = deque()
        self._salt = 0

    def run(self, calls: int) -> None:
        here = self._here
        store = here.connect()
        here.tell("ready")
        here.wait_told()
        before = Holdings.now()
        dist.init_process_group(
            self._backend, store=store, rank=here.rank, world_size=here.size, timeout=_GROUP_TIMEOUT
        )
        world = tuple(range(here.size))
        assert dist.group.WORLD is not None
        self._groups.append((world, Place(dist.group.WORLD, world, here.rank)))
        for ranks in dict.fromkeys((world, world[:2], world[-2:], world[1:])):
            if len(ranks) > 1:
                self._groups.append(self._made(ranks))
        for drawn in self._everything():
            self._call(*drawn)
        self._mixed(calls)
        self._groups.clear()
        dist.destroy_process_group()
        here.tell("done", left=left_over(before, _TIDY_LIMIT))
        # Here, not earlier: closing the connections would hide descriptors that were left open.
        del store

    def _mixed(self, calls: int) -> None:
        next_sample = 1
        last_note = time.monotonic()
        for number in range(1, calls + 1):
            self._call(*self._draw())
            if number % _NEW_GROUP_EVERY == 0:
                self._use_new_group()
            if number * SAMPLES >= next_sample * calls:
                next_sample += 1
                self._sample(number)
            elif self._here.rank == 0 and time.monotonic() > last_note + _NOTE_SECONDS:
                last_note = time.monotonic()
                self._here.tell("note", calls=number)

    def _draw(self) -> Drawn:
        rng = self._shared
        count = rng.choices(_COUNTS, _WEIGHTS)[0]
        what = self._what(rng.choice(self._ops), count, rng.random() < 0.5)
        return what, rng.randrange(len(self._groups))

    def _everything(self) -> Iterator[Drawn]:
        for op in self._ops:
            for count in _COUNTS:
                for async_op in (False, True):
                    for group in range(len(self._groups)):
                        yield self._what(op, count, async_op), group

    def _what(self, op: str, count: int, async_op: bool) -> What:
        self._salt += 1
        dtype = self._shared.choice(dtypes_of(self._backend))
        # Few tags, as programs have them: messages of one tag queue up behind each other.
        return What(op, count, dtype, self._salt, self._shared.randrange(1 << 16), self._salt % 5, async_op)

    def _call(self, what: What, group: int) -> None:
        place = self._groups[group][1]
        if place is None:
            return
        call = build(what, place)
        call.start()
        if not what.async_op:
            call.check()
            return
        self._pending.append(call)
        while len(self._pending) > _LONGEST_WINDOW:
            self._end(self._pending.popleft())

    def _end(self, call: Call) -> None:
        # Gloo has futures for some ops only, and does not outlive a dropped send.
        way = self._own.random() if self._backend != "gloo" else 0.5
        if way < 0.9:
            call.wait(by_future=way < 0.2 and call.what.op not in POINT_TO_POINT)
            call.check()

    def _end_all(self) -> None:
        while self._pending:
            self._end(self._pending.popleft())
        # Those that were dropped are over, too, when all have been here.
        for _, place in self._groups:
            if place is not None:
                dist.barrier(group=place.group)

    def _made(self, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], Place | None]:
        group = dist.new_group(list(ranks), timeout=_GROUP_TIMEOUT)
        rank = self._here.rank
        return ranks, Place(group, ranks, ranks.index(rank)) if rank in ranks else None

    def _use_new_group(self) -> None:
        size = self._here.size
        ranks, place = self._made(tuple(sorted(self._shared.sample(range(size), self._shared.randint(2, size)))))
        self._groups.append((ranks, place))
        for _ in range(_NEW_GROUP_CALLS):
            what, _ = self._draw()
            self._call(what, len(self._groups) - 1)
        self._end_all()
        self._groups.pop()
        if place is not None:
            dist.destroy_process_group(place.group)

    def _sample(self, number: int) -> None:
        self._end_all()
        held = Holdings.now()
        names = sorted(name.partition(" ")[2].strip() for name in held.threads)
        # Python does not tell the system the names of its threads.
        ours = sum(thread.name.startswith("phalanx") for thread in threading.enumerate()) + names.count("phalanx")
        self._here.tell(
            "sample",
            calls=number,
            memory=private_bytes(),
            threads={"ours": ours, "others": len(names) - ours, "names": names},
            fds=len(held.fds),
        )


def _main(backend: str, p2p: bool, calls: int, seed: int, here: Here) -> None:
    _Program(here, backend, p2p, seed).run(calls)


def supervise(
    supervisor: Supervisor, size: int, calls: int, seed: int, backend: str = "phalanx", p2p: bool = True
) -> dict[str, Any]:
    """Runs the calls on `size` ranks."""
    files = shared_files()
    start = time.monotonic()
    world = World(supervisor, size, functools.partial(_main, backend, p2p, calls, seed))
    samples: dict[int, list[dict[str, Any]]] = {number: [] for number in range(size)}
    problems: list[str] = []
    done: set[int] = set()
    ready = 0
    while any(not rank.ended for rank in world.ranks):
        event = next(iter(world.events(time.monotonic() + _STALL_LIMIT)), None)
        if event is None:
            break
        number = event.rank.number
        if event.kind == "ready":
            ready += 1
            if ready == size:
                world.release()
        elif event.kind == "sample":
            samples[number].append(event.values)
        elif event.kind == "done":
            done.add(number)
            problems += [f"rank {number} still holds {what}" for what in event.values["left"]]
        if number == 0 and event.kind in ("note", "sample"):
            supervisor.note(
                {"calls": event.values["calls"], "memory": [one[-1]["memory"] for one in samples.values() if one]}
            )
    detail = []
    for rank in world.ranks:
        text = rank.text()[-_LONGEST_TEXT:]
        if not rank.ended:
            problems.append(f"rank {rank.number} hung")
            text += f"\nstuck at:\n{world.where(rank)}"
        else:
            world.reap(rank)
        if rank.status != 0 or rank.number not in done:
            problems.append(f"rank {rank.number} ended with {rank.status}")
        detail.append(f"rank {rank.number}:\n{text}")
    if world.close():
        problems.append("a process was left")
    problems += [f"/dev/shm/{name} was left" for name in left_files(files, _TIDY_LIMIT)]
    problems += [f"rank {rank}: {text}" for rank, taken in samples.items() for text in judge(taken)]
    return {
        "size": size,
        "calls": calls,
        "seconds": time.monotonic() - start,
        "growth": [growth(taken) for taken in samples.values()],
        "problems": problems,
        "detail": "\n".join(detail) if problems else "",
    }


# The progress thread, the one that answers peers, and of those that complete futures the two that stay; the program's,
# and the store's on rank 0.
MOST_THREADS = {"ours": 4, "others": 1}


def growth(taken: list[dict[str, Any]]) -> int:
    """Bytes between the first three samples and the last three, by their medians."""
    memory = [sample["memory"] for sample in taken]
    return int(statistics.median(memory[-3:]) - statistics.median(memory[:3])) if memory else 0


def judge(taken: list[dict[str, Any]]) -> list[str]:
    """What is not flat in one rank's samples."""
    if len(taken) < SAMPLES:
        return [f"took {len(taken)} samples instead of {SAMPLES}"]
    problems = []
    if growth(taken) > MEMORY_SLACK:
        memory = ", ".join(f"{sample['memory'] / 2**20:.1f}" for sample in taken)
        problems.append(f"private memory grew: {memory} MiB")
    if taken[-1]["fds"] > taken[0]["fds"]:
        problems.append(f"fds grew: {[sample['fds'] for sample in taken]}")
    for whose in ("ours", "others"):
        threads = [sample["threads"][whose] for sample in taken]
        if statistics.median(threads[-3:]) > max(MOST_THREADS[whose], *threads[:3]):
            problems.append(f"threads grew, {whose}: {threads}; {', '.join(taken[-1]['threads']['names'])}")
    return problems
