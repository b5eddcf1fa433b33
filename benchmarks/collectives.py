"""Times every collective on Phalanx beside Gloo, in the same processes and in interleaved blocks of calls.

The time of a block is that of its slowest rank. The ratio is the median over rounds of Gloo's time divided by
Phalanx's, with a 95 % interval. A size is the bytes of the op's tensor on its larger side: the whole gathered or
scattered tensor for all_gather, gather and scatter, one rank's input for the rest; ops that divide their tensor
among the ranks use at least one element a rank. Before a case is timed, both backends must give the same answer.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from cases import OPS, Case
from harness import (
    Benchmark,
    Comparison,
    Effort,
    Result,
    Target,
    compare,
    main,
    median_interval,
    print_table,
    progress,
    run_ranks,
)

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, 64, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
QUICK_SIZES = [4, 16 * KIB, MIB]
RANKS = [2, 4]
ITEM = torch.float32.itemsize
NO_SIZE = 0

# The least ratio to Gloo that all_reduce promises, by number of ranks and bytes.
ALL_REDUCE_TARGETS = {
    2: {4: 15, 64: 15, KIB: 15, 16 * KIB: 15, MIB: 5, 64 * MIB: 3},
    4: {4: 10, 16 * KIB: 25, MIB: 8, 64 * MIB: 3},
}


@dataclass(frozen=True)
class Row:
    """The measured numbers of one case. Times are seconds a call, one a round."""

    op: str
    ranks: int
    bytes: int
    subject: list[float]
    baseline: list[float] | None
    ratio: float | None
    interval: tuple[float, float] | None


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("collectives")
    group.add_argument("--ops", nargs="+", metavar="OP", choices=OPS, default=list(OPS), help=", ".join(OPS))
    group.add_argument("--sizes", nargs="+", metavar="SIZE", type=parse_size, help="as 4, 16KiB, 64MiB")
    group.add_argument("--ranks", nargs="+", metavar="N", type=int, default=RANKS, help="numbers of ranks")


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"not a size: {text!r}")
    size = int(match[1]) * {"b": 1, "kib": KIB, "mib": MIB}[(match[2] or "B").lower()]
    if size == 0 or size % ITEM:
        raise argparse.ArgumentTypeError(f"not a multiple of {ITEM} bytes: {text!r}")
    return size


def format_size(size: int) -> str:
    if size == NO_SIZE:
        return "no data"
    unit, name = next((u, n) for u, n in ((MIB, "MiB"), (KIB, "KiB"), (1, "B")) if size >= u)
    return f"{size / unit:.4g} {name}"


def measure(options: argparse.Namespace) -> Result:
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    rows: list[Row] = []
    for ranks in options.ranks:
        measured = run_ranks(measure_on_rank, ranks, options.ops, sizes, options.quick, backend=options.backend)[0]
        _print_rows(measured, ranks, options.backend)
        rows += measured
    return Result([asdict(row) for row in rows], _targets(rows))


def measure_on_rank(rank: int, ops: Sequence[str], sizes: Sequence[int], quick: bool) -> list[Row]:
    ranks = dist.get_world_size()
    subject = _as_group(dist.group.WORLD)
    baseline, control = (_as_group(dist.new_group(backend="gloo")) for _ in range(2))
    cases = [(op, size) for op in ops for size in (sizes if op != "barrier" else [NO_SIZE])]
    rows = []
    with progress(len(cases), shown=rank == 0) as announce:
        for op, size in cases:
            announce(f"{ranks} ranks, {op} {format_size(size)}")
            case = OPS[op](size // ITEM, rank, ranks)
            supported = _has_same_answer(case, rank, subject, baseline, control)
            times = compare(case.call, subject, baseline if supported else None, control, _effort(op, size, quick))
            rows.append(_row(op, ranks, size, times))
    return rows


def _as_group(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)
    return group


def _effort(op: str, size: int, quick: bool) -> Effort:
    # Gloo takes up to half a second for a large call: fewer rounds there, but blocks of the same length.
    large = size > 4 * MIB and op != "all_reduce"
    min_rounds = 3 if quick or large else 5
    return Effort(20, min_rounds, 5, 0.3) if quick else Effort(20, min_rounds, 31, 0.8)


def _has_same_answer(
    case: Case, rank: int, subject: dist.ProcessGroup, baseline: dist.ProcessGroup, control: dist.ProcessGroup
) -> bool:
    """Whether the baseline has the op at all; raises on every rank if the two backends' answers differ."""
    own = _answer(case, rank, subject)
    try:
        other = _answer(case, rank, baseline)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    differing = [not torch.equal(*pair) for pair in zip(own, other, strict=True)]
    num_differing = torch.tensor(sum(differing))
    dist.all_reduce(num_differing, group=control)
    if num_differing.item():
        raise AssertionError(f"the backends' answers differ, on this rank in {sum(differing)} of {len(own)} tensors")
    return True


def _answer(case: Case, rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The result of one call on data whose sums are exact in any order."""
    for index, buffer in enumerate(case.buffers):
        torch.arange(buffer.numel(), out=buffer).remainder_(251).add_(rank + 10 * index)
    case.call(group)
    return [tensor.clone() for tensor in case.result]


def _row(op: str, ranks: int, size: int, times: Comparison) -> Row:
    ratios = times.ratios()
    ratio = statistics.median(ratios) if ratios else None
    interval = median_interval(ratios) if ratios else None
    return Row(op, ranks, size, times.subject, times.baseline, ratio, interval)


def _print_rows(rows: Sequence[Row], ranks: int, backend: str) -> None:
    columns = ["op", "size", f"{backend} µs", "gloo µs", "ratio", "95 % interval"]
    print_table(f"{ranks} ranks, float32", columns, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    cells = [row.op, format_size(row.bytes), _microseconds(row.subject)]
    if row.baseline is None or row.ratio is None or row.interval is None:
        return [*cells, "n/a", "n/a", "n/a"]
    low, high = row.interval
    return [*cells, _microseconds(row.baseline), f"{row.ratio:.1f}x", f"{low:.1f} to {high:.1f}"]


def _microseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:,.1f}"


def _targets(rows: Sequence[Row]) -> list[Target]:
    ratios = {(row.op, row.ranks, row.bytes): row.ratio for row in rows}
    targets = [
        _all_reduce_target(ranks, size, least, ratios.get(("all_reduce", ranks, size)))
        for ranks, by_size in ALL_REDUCE_TARGETS.items()
        for size, least in by_size.items()
    ]
    return [*targets, *_never_slower_targets(rows)]


def _all_reduce_target(ranks: int, size: int, least: float, ratio: float | None) -> Target:
    promise = f"all_reduce, {ranks} ranks, {format_size(size)}: at least {least}x Gloo"
    if ratio is None:
        return Target(promise, "-", None)
    return Target(promise, f"{ratio:.1f}x", ratio >= least)


def _never_slower_targets(rows: Sequence[Row]) -> list[Target]:
    """One target if it is met, else one for every case that misses it."""
    promise = "no collective slower than Gloo at any size"
    compared = [(row.ratio, f"{row.op}, {row.ranks} ranks, {format_size(row.bytes)}") for row in rows if row.ratio]
    if not compared:
        return [Target(promise, "-", None)]
    slower = [Target(f"{case}: not slower than Gloo", f"{ratio:.2f}x", False) for ratio, case in compared if ratio < 1]
    ratio, case = min(compared)
    return slower or [Target(promise, f"least {ratio:.1f}x: {case}", True)]


BENCHMARK = Benchmark("collectives", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
