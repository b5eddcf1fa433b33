"""What asynchrony costs a small call: all_reduce with `async_op=True` and its wait, beside the synchronous call.

Both run on the same group of two ranks, in interleaved blocks. The ratio is the asynchronous call's time divided by
the synchronous one's: nothing is done between the call and its wait, so all of it is overhead.
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
SIZE = 4
MAX_RATIO = 2.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    row: Row = run_ranks(measure_on_rank, NUM_RANKS, options.quick, backend=options.backend)[0]
    print_rows(f"{NUM_RANKS} ranks, float32, {options.backend}", [row], "sync", "async and wait")
    assert row.ratio is not None
    promise = f"all_reduce, {NUM_RANKS} ranks, {format_size(SIZE)}, async then wait: at most {MAX_RATIO}x the sync call"
    return Result(asdict(row), [Target(promise, f"{format_ratio(row.ratio)}x", row.ratio <= MAX_RATIO)])


def measure_on_rank(rank: int, quick: bool) -> Row:
    group, _, control = groups_to_compare()
    sync = all_reduce(SIZE // ITEM, rank, NUM_RANKS)
    effort = Effort(20, 5, 5, 0.3) if quick else Effort(20, 31, 301, 2.0)
    with progress(1, shown=rank == 0) as announce:
        announce(f"{NUM_RANKS} ranks, all_reduce {format_size(SIZE)}, async and sync")
        contenders = Contender(sync, group), Contender(_all_reduce_then_wait(SIZE // ITEM), group)
        return compare("all_reduce", SIZE, *contenders, control, effort)


def _all_reduce_then_wait(numel: int) -> Case:
    tensor = torch.empty(numel)

    def call(group: dist.ProcessGroup) -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()

    return Case([tensor], [tensor], call)


BENCHMARK = Benchmark("asynchronous", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
