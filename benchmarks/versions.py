"""Small calls beside those of an older version, which is built from the repository: `--old` names its commit.

The versions run in turns, each time in two new processes. The ratio is the new version's time divided by the old one's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from harness import Benchmark, Result, Target, format_ratio, main, print_table, progress

# The last commit before calls had a native front.
OLD = "32cf922"
MOST = 0.85
ALTERNATIONS = 5
CASES = ("all_reduce 4 B", "ping-pong 8 B", "all_reduce 4 B, async then wait")
ROOT = Path(__file__).parent.parent


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--old", default=OLD, metavar="COMMIT", help=f"the older version (default: {OLD})")


def measure(options: argparse.Namespace) -> Result:
    old = _build(options.old)
    rounds: list[dict[str, dict[str, float]]] = []
    with progress(ALTERNATIONS) as announce:
        for number in range(ALTERNATIONS):
            announce(f"new and {options.old}, {number + 1} of {ALTERNATIONS}")
            order = [("new", None), ("old", old)]
            times = {name: _run(path, options.quick) for name, path in (order if number % 2 == 0 else order[::-1])}
            rounds.append(times)
    ratios = {case: statistics.median(times["new"][case] / times["old"][case] for times in rounds) for case in CASES}
    rows = [
        [case, *(f"{statistics.median(t[name][case] for t in rounds):.2f}" for name in ("new", "old")), f"{ratio:.2f}x"]
        for case, ratio in ratios.items()
    ]
    print_table("2 ranks", ["call", "new \u00b5s", f"{options.old} \u00b5s", "ratio"], rows)
    targets = [
        Target(f"2 ranks, {case}: at most {MOST}x the time of {options.old}", f"{format_ratio(ratio)}x", ratio <= MOST)
        for case, ratio in ratios.items()
    ]
    return Result(rounds, targets)


def _build(commit: str) -> Path:
    """The folder with the older version. Built once."""
    folder = ROOT / "build" / "versions" / commit
    if not (folder / "phalanx").exists():
        print(f"building {commit} (a minute)", file=sys.stderr)
        sources = folder.with_name(f"{commit}-sources")
        sources.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", sources], input=archive, check=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-build-isolation", "--no-deps", "--target", folder, sources], check=True)
    return folder


def _run(version: Path | None, quick: bool) -> dict[str, float]:
    """Microseconds per call, of a version that lies in a folder, or of the one that is installed."""
    command = [sys.executable, str(Path(__file__).with_name("versions_rank.py")), "50" if quick else "400"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PHALANX_VERSION_AT": str(version or "")}
    finished = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    times: dict[str, float] = json.loads(finished.stdout)
    return times


BENCHMARK = Benchmark("versions", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
