"""What registering the backend adds to `import torch`.

Fresh interpreters import torch with torch's autoload on and off, in turns; the cost is the median difference of the
pairs. The entry points are also loaded and called alone, in the interpreters where autoload was off: the same work
without the noise of importing torch, which on a busy machine is many times larger. The target holds for that number,
and the difference must not contradict it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from harness import Benchmark, Result, Target, main, median_interval, print_table, progress

PAIRS, QUICK_PAIRS = 11, 3
MAX_ADDED_MS = 20

CHILD = """
import time
start = time.perf_counter()
import torch
imported = time.perf_counter()
import json, os
from importlib.metadata import entry_points
if os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0":
    for entry_point in entry_points(group="torch.backends"):
        entry_point.load()()
print(json.dumps([imported - start, time.perf_counter() - imported]))
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    pairs = QUICK_PAIRS if options.quick else PAIRS
    without, with_autoload, alone = _import_in_turns(pairs)
    added = [on - off for on, off in zip(with_autoload, without, strict=True)]
    rows = [
        _row("import torch, autoload off", without),
        _row("import torch, autoload on", with_autoload),
        _row("added by autoload, pair by pair", added),
        _row("entry points alone", alone),
    ]
    print_table(f"import time, {pairs} pairs", ["", "median ms", "95 % interval"], rows)
    numbers = {"without_ms": without, "with_ms": with_autoload, "entry_points_alone_ms": alone}
    return Result(numbers, [_target(alone, added)])


def _target(alone: list[float], added: list[float]) -> Target:
    cost = statistics.median(alone)
    least_difference, _ = median_interval(added)
    return Target(
        f"autoload adds less than {MAX_ADDED_MS} ms to import torch",
        f"{cost:.1f} ms",
        cost < MAX_ADDED_MS and least_difference < MAX_ADDED_MS,
    )


def _row(name: str, values: list[float]) -> list[str]:
    low, high = median_interval(values)
    return [name, f"{statistics.median(values):.1f}", f"{low:.1f} to {high:.1f}"]


def _import_in_turns(pairs: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of every import without autoload, with it, and of the entry points alone."""
    without, with_autoload, alone = [], [], []
    with progress(pairs + 1) as announce:
        # The first pair reads files from disk and writes bytecode.
        for pair in range(pairs + 1):
            announce(f"import torch, pair {pair} of {pairs}" if pair else "import torch, warming up")
            off_ms, alone_ms = _import_torch(autoload=False)
            on_ms, _ = _import_torch(autoload=True)
            if pair:
                without.append(off_ms)
                with_autoload.append(on_ms)
                alone.append(alone_ms)
    return without, with_autoload, alone


def _import_torch(autoload: bool) -> tuple[float, float]:
    """Milliseconds to import torch in a fresh interpreter, and then to run the entry points if autoload was off."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload))}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    import_seconds, entry_points_seconds = json.loads(child.stdout)
    return import_seconds * 1e3, entry_points_seconds * 1e3


BENCHMARK = Benchmark("import_time", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
