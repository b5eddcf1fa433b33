"""What a small call costs before bytes move: reading, checking, describing and recording it.

With one rank no bytes move. Each op is called on a Phalanx group and on a group written in Python that does nothing, in
turns: the time on the latter is torch's own. With two ranks each op is called in turns with all_reduce.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cases import OPS, Case
from harness import (
    ITEM,
    KIB,
    Benchmark,
    Contender,
    Effort,
    Result,
    Target,
    format_ratio,
    format_size,
    groups_to_compare,
    main,
    print_table,
    progress,
    run_ranks,
)

ALTERNATIONS = 5
SIZES = (4, KIB)
MOST_ALL_REDUCE, MOST_OTHERS, MOST_TOGETHER = 2.0, 1.5, 1.4
Times = dict[str, tuple[float, float]]


class _Done(dist.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class _DoesNothing(dist.ProcessGroup):
    """A group of one rank whose calls return at once."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _make_group_that_does_nothing() -> dist.ProcessGroup:
    done = _Done()

    def nothing(self: dist.ProcessGroup, *args: object, opts: object = None) -> dist.Work:
        return done

    names = ["allreduce", "broadcast", "reduce", "allgather", "all_gather_single", "gather", "scatter", "barrier"]
    names += ["reduce_scatter", "reduce_scatter_single", "alltoall", "all_to_all_single"]
    for name in names:
        setattr(_DoesNothing, name, nothing)
    group = _DoesNothing()
    world = distributed_c10d._world
    world.pg_map[group] = ("nothing", dist.HashStore())
    world.pg_names[group] = "nothing"  # type: ignore[assignment]
    world.pg_group_ranks[group] = {0: 0}
    return group


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    (alone,) = run_ranks(_measure_alone, 1, options.quick, backend="phalanx")
    own = {op: phalanx - nothing for op, (phalanx, nothing) in alone.items()}
    rows = [
        [op, f"{phalanx:.2f}", f"{nothing:.2f}", f"{phalanx / nothing:.2f}x", f"{own[op] / own['all_reduce']:.2f}x"]
        for op, (phalanx, nothing) in alone.items()
    ]
    columns = ["op", "phalanx µs", "does nothing µs", "ratio", "own time, against all_reduce's"]
    print_table(f"one rank, {format_size(ITEM)}", columns, rows)
    ratio = alone["all_reduce"][0] / alone["all_reduce"][1]
    worst = max(own[op] / own["all_reduce"] for op in own)
    together: dict[str, dict[str, float]] = run_ranks(_measure_together, 2, options.quick, backend="phalanx")[0]
    sizes = [format_size(size) for size in SIZES]
    print_table(
        "2 ranks: times, against all_reduce's of the same size",
        ["op", *sizes],
        [[op, *(f"{ratios[size]:.2f}x" for size in sizes)] for op, ratios in together.items()],
    )
    most = max(ratio for ratios in together.values() for ratio in ratios.values())
    targets = [
        _at_most("one rank, all_reduce 4 B, against a group that does nothing", MOST_ALL_REDUCE, ratio),
        _at_most("one rank, any other op, less torch's time, against all_reduce", MOST_OTHERS, worst),
        _at_most("2 ranks, any op of 4 B to 1 KiB, against all_reduce", MOST_TOGETHER, most),
    ]
    return Result({"alone": alone, "together": together}, targets)


def _at_most(what: str, most: float, ratio: float) -> Target:
    return Target(f"{what}: at most {most}x", f"{format_ratio(ratio)}x", ratio <= most)


def _measure_alone(rank: int, quick: bool) -> Times:
    """Microseconds per call on both groups: the median of the alternations."""
    group, nothing = dist.group.WORLD, _make_group_that_does_nothing()
    assert group is not None
    num = 500 if quick else 3000
    times: Times = {}
    for op, case in _cases(1, rank, 1).items():
        rounds = [(_time(case, group, num), _time(case, nothing, num)) for _ in range(ALTERNATIONS)]
        times[op] = statistics.median(one for one, _ in rounds), statistics.median(other for _, other in rounds)
    return times


def _time(case: Case, group: dist.ProcessGroup, num: int) -> float:
    call: Callable[..., object] = case.call
    for _ in range(num // 10):
        call(group)
    start = time.perf_counter()
    for _ in range(num):
        call(group)
    return (time.perf_counter() - start) / num * 1e6


def _measure_together(rank: int, quick: bool) -> dict[str, dict[str, float]]:
    """How many times as long as all_reduce each op takes."""
    group, _, control = groups_to_compare()
    effort = Effort(50, ALTERNATIONS, ALTERNATIONS, 0.1) if quick else Effort(200, ALTERNATIONS, 51, 1.0)
    found: dict[str, dict[str, float]] = {}
    with progress(len(SIZES) * len(OPS), shown=rank == 0) as announce:
        for size in SIZES:
            cases = _cases(size // ITEM, rank, 2)
            for op, case in cases.items():
                announce(f"2 ranks, {op} {format_size(size)}, against all_reduce")
                ratio = _ratio(Contender(case, group), Contender(cases["all_reduce"], group), control, effort)
                found.setdefault(op, {})[format_size(size)] = ratio
    return found


def _ratio(one: Contender, other: Contender, control: dist.ProcessGroup, effort: Effort) -> float:
    ratios = []
    for number in range(effort.max_rounds):
        order = (one, other) if number % 2 == 0 else (other, one)
        times = {id(contender): contender.time_block(effort.block_calls) for contender in order}
        slowest = torch.tensor([times[id(one)], times[id(other)]], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
        ratios.append(float(slowest[0] / slowest[1]))
    return statistics.median(ratios)


def _cases(numel: int, rank: int, ranks: int) -> dict[str, Case]:
    return {op: make(numel, rank, ranks) for op, make in OPS.items()}


BENCHMARK = Benchmark("front", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
