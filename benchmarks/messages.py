"""Times messages between two ranks on Phalanx beside Gloo: ping-pong through `dist.send` and `dist.recv`.

A call is one round trip: rank 0 sends a tensor of the given size and waits for one of the same size, which rank 1
sends as soon as it has the first. Each rank has one tensor to send and another to receive into, so that before a size
is timed both directions are checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from cases import Case
from harness import (
    ITEM,
    KIB,
    MIB,
    Benchmark,
    Contender,
    Result,
    Row,
    at_least_target,
    compare,
    format_size,
    groups_to_compare,
    main,
    parse_size,
    print_rows,
    progress,
    run_ranks,
    usual_effort,
)

NUM_RANKS = 2
OP = "ping-pong"
SIZES = [8, KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB]
QUICK_SIZES = [8, MIB]
SHORT_BLOCK = 200

# The least ratio to Gloo that a round trip promises, by bytes each way.
TARGETS = {8: 10, MIB: 3}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("messages")
    group.add_argument("--message-sizes", nargs="+", metavar="SIZE", type=parse_size, help="as 8, 16KiB, 64MiB")


def measure(options: argparse.Namespace) -> Result:
    sizes = options.message_sizes or (QUICK_SIZES if options.quick else SIZES)
    rows: list[Row] = run_ranks(measure_on_rank, NUM_RANKS, sizes, options.quick, backend=options.backend)[0]
    print_rows(f"{NUM_RANKS} ranks, float32, round trips", rows, options.backend)
    ratios = {row.bytes: row.ratio for row in rows}
    targets = [
        at_least_target(f"{OP}, {NUM_RANKS} ranks, {format_size(size)}", least, ratios.get(size))
        for size, least in TARGETS.items()
    ]
    return Result([asdict(row) for row in rows], targets)


def measure_on_rank(rank: int, sizes: Sequence[int], quick: bool) -> list[Row]:
    subject, baseline, control = groups_to_compare()
    rows = []
    with progress(len(sizes), shown=rank == 0) as announce:
        for size in sizes:
            announce(f"{NUM_RANKS} ranks, {OP} {format_size(size)}")
            case = _ping_pong(size // ITEM, rank)
            contenders = Contender(case, subject), Contender(case, baseline)
            effort = usual_effort(size, quick)
            if size <= KIB:
                # The first trips after the other contender's block find the caches full of its code.
                effort = replace(effort, block_calls=SHORT_BLOCK, seconds=2.5)
            rows.append(compare(OP, size, *contenders, control, effort))
    return rows


def _ping_pong(numel: int, rank: int) -> Case:
    outgoing, incoming = torch.empty(numel), torch.empty(numel)

    def ping(group: dist.ProcessGroup) -> None:
        dist.send(outgoing, 1, group=group)
        dist.recv(incoming, 1, group=group)

    def pong(group: dist.ProcessGroup) -> None:
        dist.recv(incoming, 0, group=group)
        dist.send(outgoing, 0, group=group)

    return Case([outgoing, incoming], [incoming], ping if rank == 0 else pong)


BENCHMARK = Benchmark("messages", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
