"""Times tests: ten all_reduces as threads of one process, and as processes started for it; worlds of up to 256 ranks.

Times are medians. Worlds of different sizes run in turns, so that a machine that changes its speed changes all of them.
Beside them as many plain threads take turns, on one CPU as well and without Phalanx: what these take longer for a turn
where they are many is the machine's.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import phalanx.testing as pt
from harness import Benchmark, Result, Target, format_ratio, main, print_table, progress
from phalanx.testing.belongings import Cpus

RANKS = 4
SIZES = (16, 64, 256)
NUMEL = 256
ROUNDS, QUICK_ROUNDS = 15, 3
TESTS = 10
# Of a plain thread: about as many as a rank takes, and objects that it copies in each, for about as long.
TURNS, OBJECTS = 16, 40
SPAWNS, QUICK_SPAWNS = 5, 2

MOST_MS = 10.0
LEAST_RATIO = 50
MOST_SECONDS = 2.0
# By how much two measurements of the same differ on a noisy machine.
NOISE = 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def ten_all_reduces(rank: int, world: pt.World) -> None:
    for _ in range(10):
        dist.all_reduce(torch.ones(NUMEL))


def ten_all_reduces_and_a_barrier(rank: int, world: pt.World) -> None:
    ten_all_reduces(rank, world)
    world.barrier()


def measure(options: argparse.Namespace) -> Result:
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    spawns = QUICK_SPAWNS if options.quick else SPAWNS
    times: dict[str, list[float]] = {"threads": [], "processes that stay": [], "processes": []}
    by_size: dict[int, list[float]] = {size: [] for size in SIZES}
    plain: dict[int, list[float]] = {size: [] for size in SIZES}
    with progress(rounds + spawns) as announce:
        for number in range(rounds + 1):
            announce(f"worlds of threads, round {number}") if number else None
            # As tests come: several, one after another.
            small = [_seconds(lambda: pt.run(ten_all_reduces, RANKS)) for _ in range(TESTS)]
            staying = _seconds(lambda: pt.run(ten_all_reduces, RANKS, processes=True))
            large = [_seconds_of_world(size) for size in SIZES]
            turns = [_seconds_of_plain_threads(size) for size in SIZES]
            # The first round loads code and starts workers.
            if number:
                times["threads"] += small
                times["processes that stay"].append(staying)
                for size, seconds, of_plain in zip(SIZES, large, turns, strict=True):
                    by_size[size].append(seconds)
                    plain[size].append(of_plain)
        for _ in range(spawns):
            announce("processes")
            times["processes"].append(_seconds(_spawn))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows = [[name, f"{seconds * 1e3:,.1f}"] for name, seconds in medians.items()]
    print_table(f"ten all_reduces of 1 KiB, {RANKS} ranks", ["ranks are", "ms"], rows)
    large_medians = {size: statistics.median(seconds) for size, seconds in by_size.items()}
    plain_medians = {size: statistics.median(seconds) for size, seconds in plain.items()}
    rows = [
        [str(size), f"{t * 1e3:,.0f}", f"{t / size * 1e3:.2f}", f"{plain_medians[size] / size * 1e3:.2f}"]
        for size, t in large_medians.items()
    ]
    columns = ["ranks", "ms", "ms per rank", f"plain threads, {TURNS} turns: ms per thread"]
    print_table("ten all_reduces of 1 KiB and a barrier, threads", columns, rows)
    return Result({"small": times, "large": {str(size): t for size, t in by_size.items()}}, _targets(medians, by_size))


def _targets(medians: dict[str, float], by_size: dict[int, list[float]]) -> list[Target]:
    ms, ratio = medians["threads"] * 1e3, medians["processes"] / medians["threads"]
    most, least = max(SIZES), min(SIZES)
    seconds = statistics.median(by_size[most])
    growth = statistics.median(a / b for a, b in zip(by_size[most], by_size[least], strict=True)) / (most / least)
    return [
        Target(f"ten all_reduces, {RANKS} ranks as threads: under {MOST_MS:g} ms", f"{ms:.1f} ms", ms < MOST_MS),
        Target(f"in spawned processes: at least {LEAST_RATIO}x that", f"{format_ratio(ratio)}x", ratio >= LEAST_RATIO),
        Target(f"{most} ranks: under {MOST_SECONDS:g} s", f"{seconds:.2f} s", seconds < MOST_SECONDS),
        Target(f"{most} ranks against {least}: the same time a rank", f"{growth:.2f}x", growth <= 1.0 + NOISE),
    ]


def _seconds_of_world(size: int) -> float:
    """Of as many ranks in all as the largest world has, so that all sizes see the same of a machine that changes its
    speed, and of the garbage collector."""
    repeats = max(SIZES) // size
    return sum(_seconds(partial(pt.run, ten_all_reduces_and_a_barrier, size)) for _ in range(repeats)) / repeats


def _seconds_of_plain_threads(size: int) -> float:
    repeats = max(SIZES) // size
    return sum(_seconds(partial(_take_turns, size)) for _ in range(repeats)) / repeats


def _take_turns(size: int) -> None:
    """Threads that hand on a turn in a ring, and copy some objects of their own when they have it."""
    turns = [threading.Lock() for _ in range(size)]
    for turn in turns:
        turn.acquire()

    def take_turns(number: int) -> None:
        own = [{"number": number, "text": str(each)} for each in range(OBJECTS)]
        for _ in range(TURNS):
            turns[number].acquire()
            copy.deepcopy(own)
            turns[(number + 1) % size].release()

    with Cpus():
        plain = [threading.Thread(target=take_turns, args=(number,)) for number in range(size)]
        for thread in plain:
            thread.start()
    turns[0].release()
    for thread in plain:
        thread.join()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank_main, (Path(folder),), nprocs=RANKS, daemon=True)


def _rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("phalanx", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for _ in range(10):
        dist.all_reduce(torch.ones(NUMEL))
    dist.destroy_process_group()


BENCHMARK = Benchmark("one_process", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
