"""Worlds of ranks that run programs of aliasing.py, for `make soak`."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import aliasing
import torch.distributed as dist
from worlds import Here, Supervisor, World

_STALL_LIMIT = 60.0
_LONGEST_TEXT = 20_000


def _run(here: Here, seeds: Sequence[int]) -> None:
    store = here.connect()
    dist.init_process_group(
        "phalanx", store=store, rank=here.rank, world_size=here.size, timeout=timedelta(seconds=_STALL_LIMIT)
    )
    for text in aliasing.play_all(seeds, lambda seed: here.tell("played", seed=seed)):
        print(text, flush=True)
        here.tell("wrong", text=text.splitlines()[0])
    dist.destroy_process_group()
    here.tell("done")


def supervise(supervisor: Supervisor, size: int, first: int, num: int) -> dict[str, Any]:
    """Runs the programs of these seeds, one after another, in one world."""
    world = World(supervisor, size, functools.partial(_run, seeds=range(first, first + num)))
    problems, played, done = [], 0, set()
    # Every program that ends is an event: the limit is for one of them.
    while event := next(iter(world.events(time.monotonic() + _STALL_LIMIT)), None):
        if event.kind == "wrong":
            problems.append(event.values["text"])
        elif event.kind == "done":
            done.add(event.rank.number)
        elif event.kind == "played" and event.rank.number == 0:
            played += 1
            supervisor.note({"played": played})
    detail = []
    for rank in world.ranks:
        text = rank.text()[-_LONGEST_TEXT:]
        if not rank.ended:
            problems.append(f"rank {rank.number} hung")
            text += f"\nstuck at:\n{world.where(rank)}"
        elif rank.number not in done:
            world.reap(rank)
            problems.append(f"rank {rank.number} ended with {rank.status}")
        detail.append(f"rank {rank.number}:\n{text}")
    world.close()
    return {"problems": problems, "detail": "\n".join(detail) if problems else ""}
