"""Trains a small classifier with DistributedDataParallel on Phalanx, then times the group beside Gloo.

    torchrun --nproc-per-node 4 examples/train_ddp.py
    python examples/train_ddp.py                        the same: it starts torchrun itself, and ends quietly on Ctrl-C

The only line that has to do with Phalanx is `dist.init_process_group("phalanx")`. The data are points on three
intertwined spirals, made from a fixed seed. In the end the weights of all ranks must be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from spirals import BATCH, network, say, spirals

# By size: how many float32 to send, and the calls in a block.
TIMED_SIZES = {"4 B": (1, 20), "16 KiB": (4 << 10, 20), "1 MiB": (256 << 10, 10), "4 MiB": (1 << 20, 5)}
TIMED_ROUNDS = 5

GroupCall = Callable[[dist.ProcessGroup], object]


def main() -> int:
    options = parse_options()
    if "RANK" not in os.environ:
        return launch(options.ranks)
    try:
        run_rank(options)
    except KeyboardInterrupt:
        return 130
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="phalanx", help="backend to train on (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks to start without torchrun (default: %(default)s)")
    parser.add_argument("--no-table", action="store_true", help="train only, without the table of collective times")
    return parser.parse_args()


def launch(num_ranks: int) -> int:
    """Start this script again under torchrun. Ctrl-C ends the ranks with SIGTERM, which they don't comment on."""
    from torch.distributed import run

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable(logging.WARNING)  # torchrun's word on every signal that it sends
    signals = "SIGTERM,SIGHUP,SIGQUIT"
    try:
        run.main(["--nproc-per-node", str(num_ranks), "--signals-to-handle", signals, __file__, *sys.argv[1:]])
    except KeyboardInterrupt:
        show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
        print(f"{show_cursor}\nInterrupted.")
        return 130
    return 0


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    say(f"{dist.get_world_size()} ranks on {options.backend}: {options.steps} steps of {BATCH} points a rank")
    model = train(options.steps)
    check_identical_weights(model)
    if not options.no_table:
        show_times(options.backend)
    dist.barrier()
    dist.destroy_process_group()


def train(steps: int) -> nn.Module:
    plain = network()
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    test_points, test_labels = spirals(1500, seed=2)
    report_every = max(1, steps // 10)
    losses = []
    with progress(steps) as advance:
        for step, (points, labels) in zip(range(1, steps + 1), batches(), strict=False):
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            line = ""
            if step % report_every == 0:
                loss_now = mean_over_ranks(statistics.mean(losses))
                accuracy_now = accuracy(plain, test_points, test_labels)
                line = f"step {step:4d}   loss {loss_now:.4f}   test accuracy {accuracy_now:6.1%}"
                losses.clear()
            advance(line)
    return plain


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of the training data, epoch after epoch, without an end."""
    data = TensorDataset(*spirals(6000, seed=1))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, seed=3, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.inference_mode()
def accuracy(model: nn.Module, points: Tensor, labels: Tensor) -> float:
    """The share of right answers; every rank looks at its part of the points."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    right = (model(points[mine]).argmax(dim=1) == labels[mine]).sum()
    dist.all_reduce(right)
    return int(right) / len(labels)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Yields what each step calls, with a line to show or an empty one. On a terminal a bar runs below the lines."""
    if dist.get_rank() != 0:
        yield lambda line: None
    elif not has_rich_terminal():
        yield lambda line: print(line, flush=True) if line else None
    else:
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task("training", total=steps)

            def advance(line: str) -> None:
                bar.advance(task)
                if line:
                    bar.console.print(line, highlight=False)

            yield advance


def has_rich_terminal() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def check_identical_weights(model: nn.Module) -> None:
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    differing = [rank for rank, theirs in enumerate(everyone) if not same_bits(mine, theirs)]
    if differing:
        raise SystemExit(f"The weights of rank {dist.get_rank()} differ from those of ranks {differing}.")
    say(f"All {len(everyone)} ranks hold the same {mine.numel():,} weights, bit for bit.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike a comparison of floats, this tells 0.0 from -0.0 and calls a NaN equal to itself."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def show_times(backend: str) -> None:
    own, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert isinstance(own, dist.ProcessGroup)
    assert isinstance(gloo, dist.ProcessGroup)
    rows = []
    for size, (numel, num_calls) in TIMED_SIZES.items():
        for op, call in timed_calls(numel).items():
            own_us, gloo_us = time_in_turns(call, own, gloo, num_calls)
            rows.append([size, op, f"{own_us:,.0f}", f"{gloo_us:,.0f}", f"{gloo_us / own_us:.1f}x"])
    if dist.get_rank() == 0:
        print_table(["size", "op", f"{backend} µs", "gloo µs", "faster"], rows)


def timed_calls(numel: int) -> dict[str, GroupCall]:
    """The ops to time. The size of all_gather is what each rank gives."""
    tensor = torch.zeros(numel)
    gathered = [torch.zeros(numel) for _ in range(dist.get_world_size())]
    return {
        "all_reduce": lambda group: dist.all_reduce(tensor, group=group),
        "broadcast": lambda group: dist.broadcast(tensor, src=0, group=group),
        "all_gather": lambda group: dist.all_gather(gathered, tensor, group=group),
    }


def time_in_turns(call: GroupCall, own: dist.ProcessGroup, gloo: dist.ProcessGroup, num_calls: int) -> list[float]:
    """Microseconds a call on each group: the median of several blocks, one after the other in turns."""
    rounds = [[time_block(call, group, num_calls) for group in (own, gloo)] for _ in range(TIMED_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def time_block(call: GroupCall, group: dist.ProcessGroup, num_calls: int) -> float:
    """Microseconds a call on the slowest rank."""
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(num_calls):
        call(group)
    slowest = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item() / num_calls * 1e6


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    title = "Time of one call on the slowest rank"
    if has_rich_terminal():
        from rich.console import Console
        from rich.table import Column, Table

        numeric = [Column(name, justify="right") for name in columns[2:]]
        table = Table(*columns[:2], *numeric, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    print(f"\n{title}")
    for size, op, *numbers in [columns, *rows]:
        print(f"{size:8}{op:12}" + "".join(number.rjust(14) for number in numbers))


if __name__ == "__main__":
    sys.exit(main())
