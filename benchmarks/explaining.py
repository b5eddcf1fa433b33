"""What it costs that every failure is explained: checks and black box on, against neither, and how soon a report comes.

Both groups of a comparison are in the same processes and run in interleaved blocks: one made with PHALANX_CHECK=off
and PHALANX_BLACK_BOX=0, one made without either. Where a group's memory happens to lie counts for more than what is
measured here; so there are several such pairs. Beside them, torch's own wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL) on
Gloo against plain Gloo. The time to a report is that from the last rank's coming to a call about which the ranks
disagree until the last of them has the exception.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import phalanx
from cases import all_reduce
from harness import (
    ITEM,
    KIB,
    MIB,
    Benchmark,
    Contender,
    Effort,
    Result,
    Row,
    Target,
    compare,
    format_ratio,
    format_size,
    main,
    pool,
    print_rows,
    print_table,
    progress,
    run_ranks,
)

NUM_RANKS = 2
NUM_PAIRS = 16
SMALL = 4
SIZES = (SMALL, 64 * KIB, MIB, 16 * MIB)
MOST_MICROSECONDS = 1.5
MOST_RATIO = 1.03
MOST_MILLISECONDS = 100.0
RANKS_OF_REPORT = 4
NUM_REPORTS = 10
CALLS_BEFORE = 2000


@dataclass(frozen=True)
class _Numbers:
    checks: list[Row]
    wrapper: list[Row]


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    numbers: _Numbers = run_ranks(measure_on_rank, NUM_RANKS, options.quick, backend=options.backend)[0]
    delays = [
        max(each) for each in zip(*run_ranks(time_reports, RANKS_OF_REPORT, backend=options.backend), strict=True)
    ]
    print_rows(f"{NUM_RANKS} ranks, checks and black box", numbers.checks, "on", "off")
    print_rows(f"{NUM_RANKS} ranks, torch's wrapper on Gloo", numbers.wrapper, "DETAIL", "off")
    slowest = max(delays) * 1e3
    print_table(
        f"{RANKS_OF_REPORT} ranks, a mismatch",
        ["", "ms"],
        [["median until all have the report", f"{statistics.median(delays) * 1e3:.1f}"], ["slowest", f"{slowest:.1f}"]],
    )
    targets = [_target(row) for row in numbers.checks]
    promise = f"a mismatch among {RANKS_OF_REPORT} ranks: all have the report within {MOST_MILLISECONDS:g} ms"
    targets.append(Target(promise, f"{slowest:.1f} ms", slowest <= MOST_MILLISECONDS))
    return Result(asdict(numbers) | {"report_seconds": delays}, targets)


def _target(row: Row) -> Target:
    case = f"checks and black box, all_reduce, {NUM_RANKS} ranks, {format_size(row.bytes)}"
    if row.bytes == SMALL:
        more = _more(row) * 1e6
        return Target(f"{case}: at most {MOST_MICROSECONDS} µs more", f"{more:.2f} µs more", more <= MOST_MICROSECONDS)
    assert row.ratio is not None
    return Target(f"{case}: at most {MOST_RATIO}x", f"{format_ratio(1 / row.ratio)}x", 1 / row.ratio <= MOST_RATIO)


def _more(row: Row) -> float:
    """Seconds that the subject takes longer than the baseline: the median over rounds."""
    assert row.baseline is not None
    return statistics.median(ours - theirs for ours, theirs in zip(row.subject, row.baseline, strict=True))


def measure_on_rank(rank: int, quick: bool) -> _Numbers:
    pairs = [_pair(checked_first=number % 2 == 0) for number in range(NUM_PAIRS)]
    gloo, control = (dist.new_group(backend="gloo") for _ in range(2))
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    wrapped = dist.new_group(backend="gloo")
    dist.set_debug_level(level)
    checks, wrapper = [], []
    with progress(2 * len(SIZES), shown=rank == 0) as announce:
        for size in SIZES:
            case = all_reduce(size // ITEM, rank, NUM_RANKS)
            announce(f"checks on and off, {format_size(size)}")
            effort = Effort(_block_calls(size), 5, 5 if quick else 101, 0.05 if quick else 0.3)
            rows = [
                compare("all_reduce", size, Contender(case, checked), Contender(case, plain), control, effort)
                for checked, plain in pairs
            ]
            checks.append(pool(rows))
            announce(f"torch's wrapper on Gloo, {format_size(size)}")
            effort = Effort(20, 3, 11, 0.5 if quick else 2.0)
            wrapper.append(
                compare("all_reduce", size, Contender(case, wrapped), Contender(case, gloo), control, effort)
            )
    return _Numbers(checks, wrapper)


def _pair(checked_first: bool) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A group with checks and black box, and one without."""
    if checked_first:
        checked, plain = dist.new_group(), _plain_group()
    else:
        plain, checked = _plain_group(), dist.new_group()
    return checked, plain


def _plain_group() -> dist.ProcessGroup:
    with _environment({"PHALANX_CHECK": "off", "PHALANX_BLACK_BOX": "0"}):
        group: dist.ProcessGroup = dist.new_group()
    return group


def _block_calls(size: int) -> int:
    if size == SMALL:
        return 200
    return 20 if size <= MIB else 4


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def time_reports(rank: int) -> list[float]:
    """Seconds from the coming of the last rank until this one has its exception, for each of several mismatches."""
    control = dist.new_group(backend="gloo")
    groups = [dist.new_group() for _ in range(NUM_REPORTS)]
    # As in a job that has run for a while: the black boxes are full.
    for _ in range(CALLS_BEFORE):
        dist.barrier()
    delays = []
    for group in groups:
        dist.barrier(group=group)
        came = time.monotonic()
        try:
            dist.all_reduce(torch.ones(5 if rank == 2 else 4), group=group)
        except phalanx.Mismatch:
            told = time.monotonic()
        # The clock is the same for all processes of a host.
        last = torch.tensor([came], dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=control)
        delays.append(told - last.item())
    return delays


BENCHMARK = Benchmark("explaining", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
