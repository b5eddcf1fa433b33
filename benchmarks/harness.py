"""What every benchmark shares: starting ranks, comparing two groups, targets, tables, progress and the command line.

A benchmark is a `Benchmark`: options to add and a function that measures and returns a `Result`. Benchmarks of calls
let two contenders run the same case: both must give the same answer before they are timed in interleaved blocks. The
time of a block is that of its slowest rank; a ratio is the median over rounds, with a 95 % interval. Everything that
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
import re
import statistics
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

from cases import Case

KIB, MIB = 1 << 10, 1 << 20
NO_SIZE = 0
ITEM = torch.float32.itemsize
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
        spawn(_rank_main, arguments, nprocs=num_ranks, daemon=True)
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


def format_ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def groups_to_compare() -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """The default group, a group of Gloo's to compare it with, and another one for what the ranks tell each other."""
    subject = dist.group.WORLD
    assert subject is not None
    baseline, control = (dist.new_group(backend="gloo") for _ in range(2))
    return subject, baseline, control


@dataclass(frozen=True)
class Effort:
    """How long to measure one case: rounds are added up to `max_rounds` while they fit into `seconds`."""

    block_calls: int
    min_rounds: int
    max_rounds: int
    seconds: float


def usual_effort(size: int, quick: bool, few_if_large: bool = True) -> Effort:
    # Gloo takes up to half a second for a large call: fewer rounds there, but blocks of the same length.
    large = few_if_large and size > 4 * MIB
    min_rounds = 3 if quick or large else 5
    return Effort(20, min_rounds, 5, 0.3) if quick else Effort(20, min_rounds, 31, 0.8)


@dataclass(frozen=True)
class Contender:
    """A case and the group that it is called on."""

    case: Case
    group: dist.ProcessGroup

    def answer(self) -> list[torch.Tensor]:
        """The result of one call on data whose sums are exact in any order."""
        for index, buffer in enumerate(self.case.buffers):
            torch.arange(buffer.numel(), out=buffer).remainder_(251).add_(dist.get_rank() + 10 * index)
        self.case.call(self.group)
        return [tensor.clone() for tensor in self.case.result]

    def time_block(self, num_calls: int) -> float:
        call, group = self.case.call, self.group
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(num_calls):
            call(group)
        return time.perf_counter() - start


@dataclass(frozen=True)
class Row:
    """The measured numbers of one case: seconds a call in each round, and how many times faster the subject was.

    The baseline's numbers are None where it refused the op.
    """

    op: str
    ranks: int
    bytes: int
    subject: list[float]
    baseline: list[float] | None
    ratio: float | None
    interval: tuple[float, float] | None


def compare(
    op: str,
    size: int,
    subject: Contender,
    baseline: Contender,
    control: dist.ProcessGroup,
    effort: Effort,
    baseline_may_fail: bool = False,
) -> Row:
    """Check that both contenders give the same answer, then time them in interleaved blocks.

    `control` carries what the ranks decide together. With `baseline_may_fail` the subject is timed alone where the
    baseline refuses the op.
    """
    own = subject.answer()
    ranks = dist.get_world_size()
    try:
        other = baseline.answer()
    except (RuntimeError, NotImplementedError, ValueError):
        if not baseline_may_fail:
            raise
        (own_times,) = _time_rounds([subject], control, effort)
        return Row(op, ranks, size, own_times, None, None, None)
    require_same(own, other, control)
    own_times, other_times = _time_rounds([subject, baseline], control, effort)
    ratios = [theirs / ours for ours, theirs in zip(own_times, other_times, strict=True)]
    return Row(op, ranks, size, own_times, other_times, statistics.median(ratios), median_interval(ratios))


def pool(rows: Sequence[Row]) -> Row:
    """One row of several that measured the same case with different contenders, each of which has one voice."""
    first = rows[0]
    own_times = [time for row in rows for time in row.subject]
    other_times = [time for row in rows for time in row.baseline or []]
    ratios = [row.ratio for row in rows if row.ratio is not None]
    return Row(
        first.op, first.ranks, first.bytes, own_times, other_times, statistics.median(ratios), median_interval(ratios)
    )


def require_same(own: Sequence[torch.Tensor], other: Sequence[torch.Tensor], control: dist.ProcessGroup) -> None:
    """Raise on every rank if the two contenders' tensors differ on any."""
    differing = sum(not torch.equal(*pair) for pair in zip(own, other, strict=True))
    num_differing = torch.tensor(differing)
    dist.all_reduce(num_differing, group=control)
    if num_differing.item():
        raise AssertionError(f"the contenders' answers differ, on this rank in {differing} of {len(own)} tensors")


def _time_rounds(contenders: list[Contender], control: dist.ProcessGroup, effort: Effort) -> list[list[float]]:
    """Seconds a call of each contender, one a round.

    A round is one block of each. Which of them goes first alternates, so that neither always finds the caches as the
    other left them.
    """
    rounds: list[list[float]] = []
    spent = 0.0
    while len(rounds) < effort.min_rounds or (len(rounds) < effort.max_rounds and spent < effort.seconds):
        order = contenders if len(rounds) % 2 == 0 else contenders[::-1]
        own = {id(contender): contender.time_block(effort.block_calls) for contender in order}
        slowest = torch.tensor([own[id(contender)] for contender in contenders], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
        rounds.append((slowest / effort.block_calls).tolist())
        spent += float(slowest.sum())
    return [list(column) for column in zip(*rounds, strict=True)]


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


def at_least_target(case: str, least: float, ratio: float | None) -> Target:
    promise = f"{case}: at least {least}x Gloo"
    if ratio is None:
        return Target(promise, "-", None)
    return Target(promise, f"{format_ratio(ratio)}x", ratio >= least)


def print_rows(title: str, rows: Sequence[Row], subject: str, baseline: str = "gloo") -> None:
    columns = ["op", "size", f"{subject} µs", f"{baseline} µs", "ratio", "95 % interval"]
    print_table(title, columns, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    cells = [row.op, format_size(row.bytes), _microseconds(row.subject)]
    if row.baseline is None or row.ratio is None or row.interval is None:
        return [*cells, "n/a", "n/a", "n/a"]
    interval = " to ".join(map(format_ratio, row.interval))
    return [*cells, _microseconds(row.baseline), f"{format_ratio(row.ratio)}x", interval]


def _microseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:,.1f}"


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
