"""What a small call costs before bytes move: reading, checking, describing and recording it.

With one rank no bytes move. Each op is called on a Phalanx group and on a group written in Python that does nothing, in
turns: the time on the latter is torch's own. With two ranks each op is called in turns with all_reduce. "torch's share"
is the ratio that would be left if each op cost Phalanx what all_reduce does: torch itself takes longer for lists.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

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
TORCHS_SHARE = "torch's share"
SIZES = (4, KIB)
MOST_ALL_REDUCE, MOST_OTHERS, MOST_TOGETHER = 2.0, 1.5, 1.4


class Alone(NamedTuple):
    """Microseconds per call on both groups, their ratio, and the op's own time as a multiple of all_reduce's."""

    phalanx: float
    nothing: float
    ratio: float
    own: float


class _Done(dist.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


class _DoesNothing(dist.ProcessGroup):
    """A group whose calls return at once."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def _make_group_that_does_nothing(rank: int, size: int) -> dist.ProcessGroup:
    done = _Done()

    def nothing(self: dist.ProcessGroup, *args: object, opts: object = None) -> dist.Work:
        return done

    names = ["allreduce", "broadcast", "reduce", "allgather", "all_gather_single", "gather", "scatter", "barrier"]
    names += ["reduce_scatter", "reduce_scatter_single", "alltoall", "all_to_all_single"]
    for name in names:
        setattr(_DoesNothing, name, nothing)
    group = _DoesNothing(rank, size)
    world = distributed_c10d._world
    world.pg_map[group] = ("nothing", dist.HashStore())
    world.pg_names[group] = "nothing"  # type: ignore[assignment]
    world.pg_group_ranks[group] = {one: one for one in range(size)}
    return group


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    alone: dict[str, Alone] = run_ranks(_measure_alone, 1, options.quick, backend="phalanx")[0]
    rows = [
        [op, f"{each.phalanx:.2f}", f"{each.nothing:.2f}", f"{each.ratio:.2f}x", f"{each.own:.2f}x"]
        for op, each in alone.items()
    ]
    columns = ["op", "phalanx µs", "does nothing µs", "ratio", "own time, against all_reduce's"]
    print_table(f"one rank, {format_size(ITEM)}", columns, rows)
    ratio = alone["all_reduce"].ratio
    worst = max(each.own for each in alone.values())
    together: dict[str, dict[str, float]] = run_ranks(_measure_together, 2, options.quick, backend="phalanx")[0]
    sizes = [format_size(size) for size in SIZES]
    columns = [*sizes, TORCHS_SHARE]
    print_table(
        "2 ranks: times, against all_reduce's of the same size",
        ["op", *columns],
        [[op, *(f"{ratios[column]:.2f}x" for column in columns)] for op, ratios in together.items()],
    )
    most = max(ratios[size] for ratios in together.values() for size in sizes)
    targets = [
        _at_most("one rank, all_reduce 4 B, against a group that does nothing", MOST_ALL_REDUCE, ratio),
        _at_most("one rank, any other op, less torch's time, against all_reduce", MOST_OTHERS, worst),
        _at_most("2 ranks, any op of 4 B to 1 KiB, against all_reduce", MOST_TOGETHER, most),
    ]
    return Result({"alone": {op: each._asdict() for op, each in alone.items()}, "together": together}, targets)


def _at_most(what: str, most: float, ratio: float) -> Target:
    return Target(f"{what}: at most {most}x", f"{format_ratio(ratio)}x", ratio <= most)


def _measure_alone(rank: int, quick: bool) -> dict[str, Alone]:
    """Each op in turns with all_reduce, in short blocks: the speed of a machine changes within seconds.

    Of each alternation the fastest block counts. Whatever disturbs a block that never waits makes it longer.
    """
    group, nothing = dist.group.WORLD, _make_group_that_does_nothing(0, 1)
    assert group is not None
    cases = _cases(1, rank, 1)
    found: dict[str, Alone] = {}
    for op, case in cases.items():
        rounds = []
        for _ in range(ALTERNATIONS):
            contenders = [(one, on) for one in (case, cases["all_reduce"]) for on in (group, nothing)]
            blocks = [[_time(*contender, num=50) for contender in contenders] for _ in range(10 if quick else 50)]
            rounds.append([min(column) for column in zip(*blocks, strict=True)])
        own = [(ours - torchs) / (base - base_torchs) for ours, torchs, base, base_torchs in rounds]
        ours, torchs, *_ = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(each[0] / each[1] for each in rounds)
        found[op] = Alone(ours, torchs, ratio, statistics.median(own))
    return found


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
    nothing, num = _make_group_that_does_nothing(rank, 2), 100 if quick else 1000
    cases = _cases(1, rank, 2)
    torchs = {
        op: statistics.median(_time(case, nothing, num) for _ in range(ALTERNATIONS)) for op, case in cases.items()
    }
    all_reduce = statistics.median(_time(cases["all_reduce"], group, num) for _ in range(ALTERNATIONS))
    for op, time_of_torch in torchs.items():
        found[op][TORCHS_SHARE] = (all_reduce + time_of_torch - torchs["all_reduce"]) / all_reduce
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
