"""What a guard costs: guarded Gloo against plain Gloo, and the time that it adds to each call of an engine that does
nothing.

Guarded and plain groups are in the same processes and run in interleaved blocks. Two plain groups of Gloo differ, too:
so there are several of each. Each guarded group stands beside a plain one, and that one beside another plain one: the
control. torch's own wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL) is in the same table. The engine that does nothing is
a group written in Python. Its times are those of the faster blocks: the program's, and not the machine's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

import phalanx
from cases import all_reduce
from harness import (
    ITEM,
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
NUM_GROUPS = 4
SMALL = 4
SIZES = (SMALL, MIB, 16 * MIB)
MOST_SMALL, MOST_LARGE = 1.05, 1.02
MOST_MICROSECONDS = 5.0
CALLS, BLOCKS = 2000, 40


@dataclass(frozen=True)
class _Numbers:
    guarded: list[Row]
    control: list[Row]
    wrapper: list[Row]
    # By op: microseconds that a guard adds to a call.
    added: dict[str, float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    ranks: list[_Numbers] = run_ranks(measure_on_rank, NUM_RANKS, options.quick, backend=options.backend)
    numbers = ranks[0]
    print_rows(f"{NUM_RANKS} ranks, Gloo with a guard", numbers.guarded, "guarded", "plain")
    print_rows(f"{NUM_RANKS} ranks, the control", numbers.control, "plain", "another")
    print_rows(f"{NUM_RANKS} ranks, torch's wrapper on Gloo", numbers.wrapper, "DETAIL", "plain")
    added = {op: max(each.added[op] for each in ranks) for op in numbers.added}
    print_table(
        "an engine that does nothing", ["call", "a guard adds µs"], [[op, f"{more:.2f}"] for op, more in added.items()]
    )
    targets = [_target(row) for row in numbers.guarded]
    most = max(added.values())
    promise = f"a guard on an engine that does nothing: at most {MOST_MICROSECONDS:g} µs per call"
    targets.append(Target(promise, f"{most:.2f} µs", most <= MOST_MICROSECONDS))
    return Result(asdict(numbers), targets)


def _target(row: Row) -> Target:
    assert row.ratio is not None
    most = MOST_SMALL if row.bytes == SMALL else MOST_LARGE
    promise = f"guarded Gloo, all_reduce, {NUM_RANKS} ranks, {format_size(row.bytes)}: at most {most}x plain Gloo"
    return Target(promise, f"{format_ratio(1 / row.ratio)}x", 1 / row.ratio <= most)


def measure_on_rank(rank: int, quick: bool) -> _Numbers:
    control = dist.new_group(backend="gloo")
    groups = [_groups(guarded_first=number % 2 == 0) for number in range(NUM_GROUPS)]
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    wrapped = dist.new_group(backend="gloo")
    dist.set_debug_level(level)
    guarded, plain, wrapper = [], [], []
    with progress(3 * len(SIZES), shown=rank == 0) as announce:
        for size in SIZES:
            case = all_reduce(size // ITEM, rank, NUM_RANKS)
            calls = 40 if size == SMALL else 10 if size == MIB else 2
            effort = Effort(calls, 5, 5 if quick else 61, 0.3 if quick else 3.0)

            def pooled(one: int, other: int, case=case, size=size, effort=effort) -> Row:  # type: ignore[no-untyped-def]
                rows = [
                    compare(
                        "all_reduce", size, Contender(case, each[one]), Contender(case, each[other]), control, effort
                    )
                    for each in groups
                ]
                return pool(rows)

            announce(f"guarded, {format_size(size)}")
            guarded.append(pooled(0, 1))
            announce(f"two plain groups, {format_size(size)}")
            plain.append(pooled(1, 2))
            announce(f"torch's wrapper, {format_size(size)}")
            few = Effort(max(calls // 4, 1), 3, 11, 0.5 if quick else 2.0)
            pair = Contender(case, wrapped), Contender(case, groups[0][1])
            wrapper.append(compare("all_reduce", size, *pair, control, few))
    return _Numbers(guarded, plain, wrapper, _added(4 if quick else BLOCKS))


def _groups(guarded_first: bool) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """A guarded group of Gloo, and two plain ones."""
    made = [dist.new_group(backend="gloo") for _ in range(3)]
    guarded = phalanx.guard(made.pop(0 if guarded_first else -1))
    return guarded, made[0], made[1]


def _added(num_blocks: int) -> dict[str, float]:
    """Microseconds that a guard adds to a call of an engine that does nothing: the faster half of the blocks."""
    dist.Backend.register_backend(
        "nothing", lambda store, rank, size, timeout: _DoesNothing(rank, size), devices=["cpu"]
    )
    plain, guarded = dist.new_group(backend="nothing"), phalanx.guard(dist.new_group(backend="nothing"))
    assert guarded is not plain
    assert type(guarded) is not _DoesNothing
    tensor, outputs = torch.ones(1), [torch.ones(1) for _ in range(NUM_RANKS)]
    calls: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_reduce": lambda group: dist.all_reduce(tensor, group=group),
        "all_reduce, async and wait": lambda group: dist.all_reduce(tensor, group=group, async_op=True).wait(),
        "broadcast": lambda group: dist.broadcast(tensor, 0, group=group),
        "all_gather": lambda group: dist.all_gather(outputs, tensor, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }
    return {op: _faster(call, plain, guarded, num_blocks) for op, call in calls.items()}


class _Done(dist.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _DoesNothing(dist.ProcessGroup):
    """A group whose calls return at once."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._done = _Done()

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "nothing"

    def _nothing(self, *args: object, opts: object = None) -> dist.Work:
        return self._done

    allreduce = broadcast = allgather = barrier = _nothing  # type: ignore[assignment]


def _make_nothing(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return _DoesNothing(rank, size)


def _faster(
    call: Callable[[dist.ProcessGroup], object], plain: dist.ProcessGroup, guarded: dist.ProcessGroup, num_blocks: int
) -> float:
    times: dict[int, list[float]] = {0: [], 1: []}
    for block in range(num_blocks):
        for which in (0, 1) if block % 2 == 0 else (1, 0):
            group = (plain, guarded)[which]
            began = time.perf_counter()
            for _ in range(CALLS):
                call(group)
            times[which].append((time.perf_counter() - began) / CALLS)
    fast = [statistics.median(sorted(each)[: max(len(each) // 2, 1)]) for each in times.values()]
    return (fast[1] - fast[0]) * 1e6


BENCHMARK = Benchmark("guarding", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
