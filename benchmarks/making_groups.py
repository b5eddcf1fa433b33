"""What a further group of 4 ranks costs: split from a group, or made with torch.distributed.new_group.

The ways take turns; Gloo comes last, because the threads of a group that was left disturb what follows. Ranks start
each of them together; its time is that of the slowest rank. The groups are left afterwards, which is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness import Benchmark, Result, Target, main, median_interval, print_table, progress, run_ranks

NUM_RANKS = 4
ROUNDS, QUICK_ROUNDS = 101, 15
MAX_SPLIT_MS = 2.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    times: dict[str, list[float]] = run_ranks(measure_on_rank, NUM_RANKS, rounds, backend="phalanx")[0]
    rows = []
    for way, seconds in times.items():
        low, high = median_interval(seconds)
        rows.append([way, f"{statistics.median(seconds) * 1e3:.2f}", f"{low * 1e3:.2f} to {high * 1e3:.2f}"])
    print_table(f"A further group of {NUM_RANKS} ranks, ms", ["", "median", "95 % interval"], rows)
    split_ms = statistics.median(times["group.split_group"]) * 1e3
    promise = f"split_group of {NUM_RANKS} ranks: under {MAX_SPLIT_MS:g} ms"
    return Result(times, [Target(promise, f"{split_ms:.2f} ms", split_ms < MAX_SPLIT_MS)])


def measure_on_rank(rank: int, rounds: int) -> dict[str, list[float]]:
    whole: Any = dist.group.WORLD
    ranks = list(range(NUM_RANKS))
    split, make, make_gloo = "group.split_group", "dist.new_group, phalanx", "dist.new_group, gloo"
    ways: dict[str, Callable[[], Any]] = {
        split: lambda: whole.split_group(ranks),
        make: lambda: dist.new_group(ranks),
        make_gloo: lambda: dist.new_group(ranks, backend="gloo"),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    turns = [split, make] * rounds + [make_gloo] * rounds
    with progress(len(turns), shown=rank == 0) as announce:
        for way in turns:
            announce(f"making groups: {way}")
            dist.barrier()
            start = time.perf_counter()
            group = ways[way]()
            times[way].append(_slowest(time.perf_counter() - start))
            group.shutdown() if way == split else dist.destroy_process_group(group)
            # Here, and not where the next one is made: it may take long.
            del group
    return times


def _slowest(seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


BENCHMARK = Benchmark("making_groups", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
