"""Times every collective on Phalanx beside Gloo, in the same processes and in interleaved blocks of calls.

The time of a block is that of its slowest rank. The ratio is the median over rounds of Gloo's time divided by
Phalanx's, with a 95 % interval. A size is the bytes of the op's tensor on its larger side: the whole gathered or
scattered tensor for all_gather, gather and scatter, one rank's input for the rest; ops that divide their tensor
among the ranks use at least one element a rank. Before a case is timed, both backends must give the same answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch.distributed as dist

from cases import OPS
from harness import (
    ITEM,
    KIB,
    MIB,
    NO_SIZE,
    Benchmark,
    Contender,
    Result,
    Row,
    Target,
    at_least_target,
    compare,
    format_ratio,
    format_size,
    groups_to_compare,
    main,
    parse_size,
    print_rows,
    progress,
    run_ranks,
    usual_effort,
)

SIZES = [4, 64, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
QUICK_SIZES = [4, 16 * KIB, MIB]
RANKS = [2, 4]

# The least ratio to Gloo that all_reduce promises, by number of ranks and bytes.
ALL_REDUCE_TARGETS = {
    2: {4: 15, 64: 15, KIB: 15, 16 * KIB: 15, MIB: 5, 64 * MIB: 3},
    4: {4: 10, 16 * KIB: 25, MIB: 8, 64 * MIB: 3},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("collectives")
    group.add_argument("--ops", nargs="+", metavar="OP", choices=OPS, default=list(OPS), help=", ".join(OPS))
    group.add_argument("--sizes", nargs="+", metavar="SIZE", type=parse_size, help="as 4, 16KiB, 64MiB")
    group.add_argument("--ranks", nargs="+", metavar="N", type=int, default=RANKS, help="numbers of ranks")


def measure(options: argparse.Namespace) -> Result:
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    rows: list[Row] = []
    for ranks in options.ranks:
        measured = run_ranks(measure_on_rank, ranks, options.ops, sizes, options.quick, backend=options.backend)[0]
        print_rows(f"{ranks} ranks, float32", measured, options.backend)
        rows += measured
    return Result([asdict(row) for row in rows], _targets(rows))


def measure_on_rank(rank: int, ops: Sequence[str], sizes: Sequence[int], quick: bool) -> list[Row]:
    ranks = dist.get_world_size()
    subject, baseline, control = groups_to_compare()
    cases = [(op, size) for op in ops for size in (sizes if op != "barrier" else [NO_SIZE])]
    rows = []
    with progress(len(cases), shown=rank == 0) as announce:
        for op, size in cases:
            announce(f"{ranks} ranks, {op} {format_size(size)}")
            case = OPS[op](size // ITEM, rank, ranks)
            effort = usual_effort(size, quick, few_if_large=op != "all_reduce")
            contenders = Contender(case, subject), Contender(case, baseline)
            rows.append(compare(op, size, *contenders, control, effort, baseline_may_fail=True))
    return rows


def _targets(rows: Sequence[Row]) -> list[Target]:
    ratios = {(row.op, row.ranks, row.bytes): row.ratio for row in rows}
    targets = [
        at_least_target(
            f"all_reduce, {ranks} ranks, {format_size(size)}", least, ratios.get(("all_reduce", ranks, size))
        )
        for ranks, by_size in ALL_REDUCE_TARGETS.items()
        for size, least in by_size.items()
    ]
    return [*targets, *_never_slower_targets(rows)]


def _never_slower_targets(rows: Sequence[Row]) -> list[Target]:
    """One target if it is met, else one for every case that misses it."""
    promise = "no collective slower than Gloo at any size"
    compared = [(row.ratio, f"{row.op}, {row.ranks} ranks, {format_size(row.bytes)}") for row in rows if row.ratio]
    if not compared:
        return [Target(promise, "-", None)]
    slower = [Target(f"{case}: not slower than Gloo", f"{ratio:.2f}x", False) for ratio, case in compared if ratio < 1]
    ratio, case = min(compared)
    return slower or [Target(promise, f"least {format_ratio(ratio)}x: {case}", True)]


BENCHMARK = Benchmark("collectives", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
