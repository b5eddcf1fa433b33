"""Times DistributedDataParallel with torch's default options on Phalanx beside Gloo: an MLP of 25 million parameters.

Two things are timed on two ranks. The buckets alone: all_reduce of tensors as large as the buckets that DDP makes for
this model, all started before the first is waited for, as in a backward pass. The whole step: forward, backward and
optimizer, one step on each backend in turns. The two replicas start from the same weights and see the same data, and
the sum of two gradients has the same bits in any order: after all the timed steps their weights must be equal, bit for
bit.
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from cases import Case
from harness import (
    ITEM,
    Benchmark,
    Contender,
    Effort,
    Result,
    Row,
    Target,
    at_least_target,
    compare,
    format_ratio,
    groups_to_compare,
    main,
    print_rows,
    progress,
    require_same,
    run_ranks,
)

NUM_RANKS = 2
WIDTHS = [1024, 2048, 2048, 2048, 2048, 2048, 2048, 1024]
BATCH = 64
LEARNING_RATE = 0.01
MIN_BUCKETS_RATIO = 3
# DDP divides the parameters into buckets anew when it has seen in which order the gradients come.
STEPS_TO_FINAL_BUCKETS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    sizes, rows = run_ranks(measure_on_rank, NUM_RANKS, options.quick, backend=options.backend)[0]
    print_rows(f"{NUM_RANKS} ranks, float32, {len(sizes)} buckets", rows, options.backend)
    return Result({"bucket_bytes": sizes, "rows": [asdict(row) for row in rows]}, _targets(*rows))


def _targets(buckets: Row, step: Row) -> list[Target]:
    at_least = at_least_target(f"DDP's {buckets.op}, {buckets.ranks} ranks", MIN_BUCKETS_RATIO, buckets.ratio)
    promise = f"DDP's {step.op}, {step.ranks} ranks: not slower than on Gloo"
    assert step.ratio is not None
    assert step.interval is not None
    low, high = step.interval
    measured = f"{format_ratio(step.ratio)}x ({format_ratio(low)} to {format_ratio(high)})"
    # Missed only where the whole interval is on the slow side: within it the two can't be told apart.
    return [at_least, Target(promise, measured, high >= 1)]


def measure_on_rank(rank: int, quick: bool) -> tuple[list[int], list[Row]]:
    subject, baseline, control = groups_to_compare()
    network = _mlp()
    with progress(3, shown=rank == 0) as announce:
        announce(f"{NUM_RANKS} ranks, DDP: finding the buckets")
        bucket_numels = _bucket_numels(network, rank, control)
        total = sum(bucket_numels) * ITEM
        announce(f"{NUM_RANKS} ranks, DDP's buckets alone")
        case = _all_reduce_buckets(bucket_numels)
        effort = Effort(5, 3, 5, 0.3) if quick else Effort(5, 11, 31, 8.0)
        contenders = Contender(case, subject), Contender(case, baseline)
        buckets = compare("buckets alone", total, *contenders, control, effort)
        announce(f"{NUM_RANKS} ranks, DDP's whole step")
        step = _compare_steps(network, rank, (subject, baseline, control), total, quick)
    return [numel * ITEM for numel in bucket_numels], [buckets, step]


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Trainer:
    """A replica of the network with its own DDP on one group, and the same data as every other trainer of its rank."""

    def __init__(self, network: nn.Module, rank: int, group: dist.ProcessGroup) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.inputs, self.targets = (torch.randn(BATCH, n, generator=generator) for n in (WIDTHS[0], WIDTHS[-1]))
        self.model = DistributedDataParallel(copy.deepcopy(network), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def step(self) -> None:
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]


def _bucket_numels(network: nn.Module, rank: int, control: dist.ProcessGroup) -> list[int]:
    """How many elements DDP's buckets have, in the order in which it starts them."""
    trainer = Trainer(network, rank, control)
    numels: list[int] = []

    # torch compares the annotations with these very types, so this module must not turn them into strings.
    def note(
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,
    ) -> torch.futures.Future[Tensor]:
        numels.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    trainer.model.register_comm_hook(control, note)
    for _ in range(STEPS_TO_FINAL_BUCKETS):
        numels.clear()
        trainer.step()
    return numels


def _all_reduce_buckets(numels: Sequence[int]) -> Case:
    buckets = [torch.empty(numel) for numel in numels]

    def call(group: dist.ProcessGroup) -> None:
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()

    return Case(buckets, buckets, call)


def _compare_steps(
    network: nn.Module,
    rank: int,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup],
    total: int,
    quick: bool,
) -> Row:
    subject, baseline, control = groups
    own, other = Trainer(network, rank, subject), Trainer(network, rank, baseline)
    for trainer in (own, other):
        for _ in range(STEPS_TO_FINAL_BUCKETS):
            trainer.step()
    contenders = _as_contender(own, subject), _as_contender(other, baseline)
    effort = Effort(1, 6, 6, 0.3) if quick else Effort(1, 20, 60, 30.0)
    row = compare("whole step", total, *contenders, control, effort)
    require_same(own.weights(), other.weights(), control)
    return row


def _as_contender(trainer: Trainer, group: dist.ProcessGroup) -> Contender:
    return Contender(Case([], trainer.weights(), lambda _: trainer.step()), group)


BENCHMARK = Benchmark("ddp", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
