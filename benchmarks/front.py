"""What a small call costs before bytes move: reading, checking, describing and recording it.

With one rank no bytes move. Each op is called on a Phalanx group and on a group written in Python that does nothing, in
turns: the time on the latter is torch's own. With two ranks each op is called in turns with all_reduce. torch itself
takes longer for lists: "torch's share" is the ratio that would be left if each op cost Phalanx what all_reduce does,
and "less torch's" is the op's ratio divided by it.
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
SIZES = (4, KIB)
# Ops for which torch walks through lists of tensors.
LISTS = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
MOST_ALL_REDUCE, MOST_OTHERS, MOST_TOGETHER = 2.0, 1.5, 1.4


class Alone(NamedTuple):
    """Microseconds per call on both groups, their ratio, and the op's own time as a multiple of all_reduce's."""

    phalanx: float
    nothing: float
    ratio: float
    own: float


class Together(NamedTuple):
    """An op's time as a multiple of all_reduce's; that multiple if Phalanx took as long as for all_reduce; the quotient
    of both."""

    ratio: float
    torchs_share: float
    less_torchs: float


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
    together: dict[str, dict[str, Together]] = run_ranks(_measure_together, 2, options.quick, backend="phalanx")[0]
    sizes = [format_size(size) for size in SIZES]
    print_table(
        "2 ranks: times, against all_reduce's of the same size",
        ["op", *(f"{size}{column}" for size in sizes for column in ("", ", torch's share", ", less torch's"))],
        [[op, *(f"{value:.2f}x" for size in sizes for value in found[size])] for op, found in together.items()],
    )
    singles = max(each.ratio for op, found in together.items() if op not in LISTS for each in found.values())
    lists = max(each.less_torchs for op, found in together.items() if op in LISTS for each in found.values())
    targets = [
        _at_most("one rank, all_reduce 4 B, against a group that does nothing", MOST_ALL_REDUCE, ratio),
        _at_most("one rank, any other op, less torch's time, against all_reduce", MOST_OTHERS, worst),
        _at_most("2 ranks, any op of single tensors of 4 B to 1 KiB, against all_reduce", MOST_TOGETHER, singles),
        _at_most("2 ranks, any op of lists, less torch's longer time, against all_reduce", MOST_TOGETHER, lists),
    ]
    together_json = {op: {size: each._asdict() for size, each in found.items()} for op, found in together.items()}
    return Result({"alone": {op: each._asdict() for op, each in alone.items()}, "together": together_json}, targets)


def _at_most(what: str, most: float, ratio: float) -> Target:
    return Target(f"{what}: at most {most}x", f"{format_ratio(ratio)}x", ratio <= most)


def _measure_alone(rank: int, quick: bool) -> dict[str, Alone]:
    """Each op in turns with all_reduce, in short blocks: the speed of a machine changes within milliseconds.

    So ratios are taken of blocks right after one another, and their median counts.
    """
    group, nothing = dist.group.WORLD, _make_group_that_does_nothing(0, 1)
    assert group is not None
    cases = _cases(1, rank, 1)
    found: dict[str, Alone] = {}
    for op, case in cases.items():
        contenders = [(one, on) for one in (case, cases["all_reduce"]) for on in (group, nothing)]
        rounds = []
        for _ in range(ALTERNATIONS):
            blocks = [_time_in_turns(contenders, backwards=number % 2 == 1) for number in range(10 if quick else 50)]
            figures = [
                (ours, torchs, ours / torchs, (ours - torchs) / (base - base_torchs))
                for ours, torchs, base, base_torchs in blocks
            ]
            rounds.append([statistics.median(column) for column in zip(*figures, strict=True)])
        found[op] = Alone(*(statistics.median(column) for column in zip(*rounds, strict=True)))
    return found


def _time_in_turns(contenders: list[tuple[Case, dist.ProcessGroup]], backwards: bool) -> list[float]:
    order = -1 if backwards else 1
    return [_time(*contender, num=50) for contender in contenders[::order]][::order]


def _time(case: Case, group: dist.ProcessGroup, num: int) -> float:
    call: Callable[..., object] = case.call
    for _ in range(num // 10):
        call(group)
    start = time.perf_counter()
    for _ in range(num):
        call(group)
    return (time.perf_counter() - start) / num * 1e6


def _measure_together(rank: int, quick: bool) -> dict[str, dict[str, Together]]:
    """How many times as long as all_reduce each op takes, by op and size."""
    group, _, control = groups_to_compare()
    nothing = _make_group_that_does_nothing(rank, 2)
    effort = Effort(50, ALTERNATIONS, ALTERNATIONS, 0.1) if quick else Effort(200, ALTERNATIONS, 51, 1.0)
    found: dict[str, dict[str, Together]] = {}
    with progress(len(SIZES) * len(OPS), shown=rank == 0) as announce:
        for size in SIZES:
            cases = _cases(size // ITEM, rank, 2)
            for op, case in cases.items():
                announce(f"2 ranks, {op} {format_size(size)}, against all_reduce")
                rounds = [
                    _compare((case, cases["all_reduce"]), group, nothing, control, effort.block_calls, number % 2 == 1)
                    for number in range(effort.max_rounds)
                ]
                medians = (statistics.median(column) for column in zip(*rounds, strict=True))
                found.setdefault(op, {})[format_size(size)] = Together(*medians)
    return found


def _compare(
    cases: tuple[Case, Case],
    group: dist.ProcessGroup,
    nothing: dist.ProcessGroup,
    control: dist.ProcessGroup,
    num: int,
    backwards: bool,
) -> Together:
    """Of one round, in which both cases are timed on both groups. The slower rank counts."""
    times = [0.0] * 4
    for index in (1, 0) if backwards else (0, 1):
        times[index] = Contender(cases[index], group).time_block(num) / num * 1e6
        times[2 + index] = _time(cases[index], nothing, num)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
    op, all_reduce, op_of_torch, all_reduce_of_torch = slowest.tolist()
    ratio, share = op / all_reduce, 1 + (op_of_torch - all_reduce_of_torch) / all_reduce
    return Together(ratio, share, ratio / share)


def _cases(numel: int, rank: int, ranks: int) -> dict[str, Case]:
    return {op: make(numel, rank, ranks) for op, make in OPS.items()}


BENCHMARK = Benchmark("front", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
