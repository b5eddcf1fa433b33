"""What the methods of a group cost beside torch.distributed's functions: an all_reduce that is waited for.

Both call the same group of two ranks, in interleaved blocks. The ratio is the function's time divided by the method's.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from cases import Case, all_reduce
from harness import (
    ITEM,
    KIB,
    Benchmark,
    Contender,
    Effort,
    Result,
    Row,
    Target,
    compare,
    format_ratio,
    format_size,
    groups_to_compare,
    main,
    print_rows,
    progress,
    run_ranks,
)

NUM_RANKS = 2
SIZE = KIB
MIN_RATIO = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    row: Row = run_ranks(measure_on_rank, NUM_RANKS, options.quick, backend="phalanx")[0]
    print_rows(f"{NUM_RANKS} ranks, float32", [row], "group.all_reduce", "dist.all_reduce")
    assert row.ratio is not None
    promise = f"group.all_reduce(async_op=False), {NUM_RANKS} ranks, {format_size(SIZE)}: at least {MIN_RATIO}x as fast"
    target = Target(f"{promise} as dist.all_reduce", f"{format_ratio(row.ratio)}x", row.ratio >= MIN_RATIO)
    return Result(asdict(row), [target])


def measure_on_rank(rank: int, quick: bool) -> Row:
    group, _, control = groups_to_compare()
    effort = Effort(20, 5, 5, 0.3) if quick else Effort(20, 31, 301, 2.0)
    with progress(1, shown=rank == 0) as announce:
        announce(f"{NUM_RANKS} ranks, all_reduce {format_size(SIZE)}, method and function")
        method = Contender(_all_reduce_by_method(SIZE // ITEM), group)
        function = Contender(all_reduce(SIZE // ITEM, rank, NUM_RANKS), group)
        return compare("all_reduce", SIZE, method, function, control, effort)


def _all_reduce_by_method(numel: int) -> Case:
    tensor = torch.empty(numel)

    def call(group: dist.ProcessGroup) -> None:
        group.all_reduce(tensor, async_op=False)  # type: ignore[attr-defined]

    return Case([tensor], [tensor], call)


BENCHMARK = Benchmark("methods", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
