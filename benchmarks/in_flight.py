"""Times many small asynchronous calls in flight at once on Phalanx beside Gloo.

A round issues 4000 calls on tensors of their own and then waits for all of them, in one of four ways. The answers of
both backends are compared before they are timed. More ranks than CPUs is the hard case: every wake-up of a thread
costs a context switch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.futures import Future, collect_all, wait_all

from cases import OPS, Case
from harness import (
    ITEM,
    Benchmark,
    Contender,
    Effort,
    Result,
    Row,
    at_least_target,
    compare,
    groups_to_compare,
    main,
    parse_size,
    print_rows,
    progress,
    run_ranks,
)

NUM_RANKS = 4
NUM_CALLS = 4000
SIZE = 1024
# The least ratio to Gloo that every op promises, however its calls are waited for.
LEAST = 1.0


@dataclass(frozen=True)
class Way:
    """What a program keeps of each call, and how it waits for all of them."""

    keep: Callable[[dist.Work], Any]
    wait: Callable[[list[Any]], object]


def _future_of(work: dist.Work) -> Future[Any]:
    return work.get_future()


def _chain(work: dist.Work) -> Future[Any]:
    return work.get_future().then(lambda future: future.value())


def _wait_for_each(kept: list[Any]) -> None:
    for each in kept:
        each.wait()


WAYS = {
    "wait": Way(lambda work: work, _wait_for_each),
    "future.wait": Way(_future_of, _wait_for_each),
    "collect_all": Way(_future_of, lambda futures: collect_all(futures).wait()),
    "then": Way(_chain, wait_all),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("in flight")
    group.add_argument("--in-flight-ops", nargs="+", metavar="OP", choices=OPS, help=", ".join(OPS))
    group.add_argument("--in-flight-ways", nargs="+", metavar="WAY", choices=WAYS, help=", ".join(WAYS))
    group.add_argument("--in-flight-size", metavar="SIZE", type=parse_size, default=SIZE, help="as 8, 1KiB")
    group.add_argument("--in-flight-calls", metavar="N", type=int, default=NUM_CALLS, help="calls in flight at once")
    group.add_argument("--in-flight-rounds", metavar="N", type=int, default=3, help="least rounds of each case")


def measure(options: argparse.Namespace) -> Result:
    ops, ways = options.in_flight_ops or list(OPS), options.in_flight_ways or list(WAYS)
    num_calls = options.in_flight_calls // 10 if options.quick else options.in_flight_calls
    effort = Effort(1, options.in_flight_rounds, 15, 3.0)
    arguments = ops, ways, options.in_flight_size // ITEM, num_calls, effort
    rows: list[Row] = run_ranks(measure_on_rank, NUM_RANKS, *arguments, backend=options.backend)[0]
    print_rows(f"{NUM_RANKS} ranks, float32, {num_calls} calls in flight, µs for all", rows, options.backend)
    compared = [row for row in rows if row.ratio is not None]
    targets = [at_least_target(f"{num_calls} calls in flight, {row.op}", LEAST, row.ratio) for row in compared]
    return Result([asdict(row) for row in rows], targets)


def measure_on_rank(
    rank: int, ops: Sequence[str], ways: Sequence[str], numel: int, num_calls: int, effort: Effort
) -> list[Row]:
    subject, baseline, control = groups_to_compare()
    rows = []
    with progress(len(ops) * len(ways), shown=rank == 0) as announce:
        for op in ops:
            calls = [OPS[op](numel, rank, NUM_RANKS) for _ in range(num_calls)]
            for way in ways:
                announce(f"{NUM_RANKS} ranks, {num_calls} x {op}, {way}")
                case = _all_in_flight(calls, WAYS[way])
                contenders = Contender(case, subject), Contender(case, baseline)
                size = 0 if op == "barrier" else numel * ITEM
                rows.append(compare(f"{op}, {way}", size, *contenders, control, effort, baseline_may_fail=True))
    return rows


def _all_in_flight(calls: Sequence[Case], way: Way) -> Case:
    def call(group: dist.ProcessGroup) -> None:
        way.wait([way.keep(case.call(group, async_op=True)) for case in calls])

    buffers = [tensor for case in calls for tensor in case.buffers]
    return Case(buffers, [tensor for case in calls for tensor in case.result], call)


BENCHMARK = Benchmark("in_flight", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
