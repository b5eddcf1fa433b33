"""What every benchmark shares: starting ranks, comparing two groups, targets, tables, progress and the command line.

A benchmark is a `Benchmark`: options to add and a function that measures and returns a `Result`. Everything that
ranks decide together (how many rounds to run, whether a call works) they decide from numbers that all of them have,
so that no rank leaves a loop before its peers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import pickle
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

DEFAULT_BACKEND = "phalanx"
BUSY_LOAD = 0.5


@dataclass(frozen=True)
class Target:
    """A number that a benchmark promises. `met` is None where this run did not measure it."""

    promise: str
    measured: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]


@dataclass(frozen=True)
class Result:
    """What one benchmark measured: `numbers` go to the JSON file, `targets` to the exit code."""

    numbers: Any
    targets: list[Target]


@dataclass(frozen=True)
class Benchmark:
    name: str
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Result]


def main(description: str | None, *benchmarks: Benchmark) -> int:
    """Run benchmarks from the command line; returns the exit code."""
    options = _parse(description, benchmarks)
    machine = _machine()
    if machine["load"] > BUSY_LOAD:
        print(f"This machine is busy (load {machine['load']:.1f}): expect wide intervals.", file=sys.stderr)
    try:
        results = {benchmark.name: benchmark.measure(options) for benchmark in benchmarks}
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    targets = [target for result in results.values() for target in result.targets]
    print_table("Targets", ["target", "measured", ""], [[t.promise, t.measured, t.verdict] for t in targets])
    if options.json:
        numbers = {name: result.numbers for name, result in results.items()}
        options.json.write_text(json.dumps({"machine": machine, **numbers}, indent=1) + "\n")
    return int(options.check and any(target.met is False for target in targets))


def _parse(description: str | None, benchmarks: Iterable[Benchmark]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument(
        "--backend", default=DEFAULT_BACKEND, help="what to measure (gloo shows the noise of the machine)"
    )
    for benchmark in benchmarks:
        benchmark.add_options(parser)
    options = parser.parse_args()
    if not dist.is_backend_available(options.backend):
        parser.error(f"torch has no backend {options.backend!r}: is the package installed in this environment?")
    return options


def _machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def run_ranks(body: Callable[..., Any], num_ranks: int, *args: object, backend: str) -> list[Any]:
    """Run `body(rank, *args)` in one process a rank with a default group of `backend`; returns what each returned."""
    # Gloo looks up the host's name to choose an interface, and warns where the name has no address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, Path(folder), backend, body, args)
        spawn(_rank_main, arguments, nprocs=num_ranks, daemon=True)  # type: ignore[no-untyped-call]
        return [pickle.loads(_result_file(folder, rank).read_bytes()) for rank in range(num_ranks)]


def _rank_main(
    rank: int, num_ranks: int, folder: Path, backend: str, body: Callable[..., Any], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    result = body(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
    _result_file(folder, rank).write_bytes(pickle.dumps(result))


def _result_file(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"result.{rank}")


@dataclass(frozen=True)
class Effort:
    """How long to measure one case: rounds are added up to `max_rounds` while they fit into `seconds`."""

    block_calls: int
    min_rounds: int
    max_rounds: int
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """Seconds a call in each round, of the subject and (where it can do the op) of the baseline."""

    subject: list[float]
    baseline: list[float] | None

    def ratios(self) -> list[float] | None:
        """How many times faster the subject was, round by round."""
        if self.baseline is None:
            return None
        return [base / own for own, base in zip(self.subject, self.baseline, strict=True)]


def compare(
    call: Callable[[dist.ProcessGroup], object],
    subject: dist.ProcessGroup,
    baseline: dist.ProcessGroup | None,
    control: dist.ProcessGroup,
    effort: Effort,
) -> Comparison:
    """Time `call` on both groups in interleaved blocks; `control` carries the times between the ranks.

    A round is one block of each group. Which of them goes first alternates, so that neither always finds the
    caches as the other left them.
    """
    groups = [subject] if baseline is None else [subject, baseline]
    rounds: list[list[float]] = []
    spent = 0.0
    while len(rounds) < effort.min_rounds or (len(rounds) < effort.max_rounds and spent < effort.seconds):
        order = groups if len(rounds) % 2 == 0 else groups[::-1]
        own = {id(group): _time_block(call, group, effort.block_calls) for group in order}
        slowest = torch.tensor([own[id(group)] for group in groups], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
        rounds.append((slowest / effort.block_calls).tolist())
        spent += float(slowest.sum())
    columns = [list(column) for column in zip(*rounds, strict=True)]
    return Comparison(columns[0], None if baseline is None else columns[1])


def _time_block(call: Callable[[dist.ProcessGroup], object], group: dist.ProcessGroup, num_calls: int) -> float:
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(num_calls):
        call(group)
    return time.perf_counter() - start


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval for the median from order statistics: it assumes nothing about how the values are distributed.

    With fewer than six values no such interval reaches 95 %; it is then the whole range.
    """
    ordered = sorted(values)
    n = len(ordered)
    depth = 1
    while depth < (n + 1) // 2 and 2 * sum(math.comb(n, i) for i in range(depth + 1)) / 2**n <= 1 - confidence:
        depth += 1
    return ordered[depth - 1], ordered[n - depth]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people: drawn by rich on a terminal, aligned text otherwise. The first column is a name."""
    if sys.stdout.isatty():
        _print_rich_table(title, columns, rows)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}")
    for row in (columns, ["-" * width for width in widths], *rows):
        name, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([name.strip().ljust(widths[0]), *cells]))
    sys.stdout.flush()


def _print_rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(Text(cell, style=_CELL_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


_CELL_STYLES = {"met": "green", "MISSED": "bold red", "not measured": "dim", "n/a": "dim"}


@contextmanager
def progress(total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Yields a function that announces the next of `total` steps on stderr: a bar on a terminal, else a few lines.

    Nothing is drawn between steps: a thread that repaints would take time from the ranks.
    """
    if not shown:
        yield lambda step: None
    elif sys.stderr.isatty():
        with _progress_bar(total) as announce:
            yield announce
    else:
        yield _progress_lines(total)


def _progress_lines(total: int, num_lines: int = 10) -> Callable[[str], None]:
    steps = itertools.count()

    def announce(step: str) -> None:
        number = next(steps)
        if number % math.ceil(total / num_lines) == 0:
            print(f"[{100 * number // total:3d} %] {step}", file=sys.stderr, flush=True)

    return announce


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    steps = itertools.count()
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)

        def announce(step: str) -> None:
            bar.update(task, description=step, completed=next(steps), refresh=True)

        yield announce
