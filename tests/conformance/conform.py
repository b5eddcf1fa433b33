"""`make conformance`: torch's own distributed suite on Phalanx and on guarded Gloo, beside Gloo, with 2 and 4 ranks.

Prints what is to be mended; else writes docs/conformance.md. The results are kept in tests/conformance/results, in one
folder for each version of torch, Gloo's too: they are made again with `--backend gloo "guarded gloo" phalanx`. A run
makes those of the torch that it runs on. What a failed test printed is in build/conformance/.

Fails where a test fails on Phalanx, or is skipped though it passes on Gloo, or is skipped for another reason than the
want of a GPU or of ranks; but for the tests that tests/conformance/plan.py leaves out, with reasons. Fails, too, where
a test does on guarded Gloo what it does not do on Gloo.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from plan import adaptation_of
from table import AllResults, Results, Verdict, objections, only_on_gloo, write_table
from torch_suite import BACKENDS, Outcome, Suite, report, status_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
VERSION = ".".join(torch.__version__.split(".")[:2])
DETAILS = ROOT / "build" / "conformance"
NOTE_SECONDS = 10.0
# Some tests of Gloo wait for that long.
LIMIT_S = 120.0
_ALL = " ".join(f'"{backend}"' if " " in backend else backend for backend in BACKENDS)


def main() -> int:
    options = parse()
    shutil.rmtree(DETAILS, ignore_errors=True)
    try:
        for ranks in options.ranks:
            for backend in options.backend:
                run_suite(backend, ranks, options.only)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.only:
        return 0
    absent = [path for version in versions() for path in paths(version) if not path.exists()]
    if absent:
        names = ", ".join(str(path.relative_to(RESULTS)) for path in absent)
        print(f"results that were never made: {names}; run with --backend {_ALL}, and all numbers of ranks")
        return 1
    by_version = {version: load_all(version) for version in versions()}
    problems = [f"torch {version}: {text}" for version, kept in by_version.items() for text in objections(kept)]
    if problems:
        print("\n".join(problems))
        return 1
    write_table(ROOT / "docs" / "conformance.md", by_version)
    exceptions = ", ".join(only_on_gloo(by_version[VERSION])) or "none"
    print(
        f"torch {VERSION}: every test that passes on Gloo passes on guarded Gloo, and on Phalanx but for: {exceptions}"
    )
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run torch's own distributed suite on Phalanx, on Gloo and on guarded Gloo."
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4], help="world sizes (default: both)"
    )
    parser.add_argument(
        "--backend",
        nargs="+",
        default=[backend for backend in BACKENDS if backend != "gloo"],
        choices=BACKENDS,
        help="whose results are made again (default: all but those of plain Gloo, which are kept in a file)",
    )
    parser.add_argument("--only", metavar="PATTERN", help="only tests whose name matches; writes no results")
    return parser.parse_args()


def run_suite(backend: str, ranks: int, only: str | None) -> None:
    tests: dict[str, Verdict] = {}
    began = last = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(backend, Path(folder), ranks)
        try:
            names = [name for name in suite.tests if only is None or fnmatch.fnmatchcase(name, only)]
            for number, name in enumerate(names):
                if only or time.monotonic() > last + NOTE_SECONDS:
                    last = time.monotonic()
                    print(
                        f"[{last - began:4.0f} s] {backend}, {ranks} ranks: test {number + 1} of {len(names)}, {name}",
                        flush=True,
                    )
                tests[name] = run_test(suite, backend, ranks, name)
        finally:
            suite.close()
    tally = ", ".join(
        f"{sum(test['status'] == status for test in tests.values())} {status}"
        for status in ("passed", "failed", "skipped")
    )
    print(f"{backend}, {ranks} ranks: {tally} in {time.monotonic() - began:.0f} s", flush=True)
    if only is None:
        results: Results = {
            "backend": backend,
            "ranks": ranks,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seconds": round(time.monotonic() - began, 1),
            "tests": tests,
        }
        path = path_of(VERSION, backend, ranks)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def run_test(suite: Suite, backend: str, ranks: int, name: str) -> Verdict:
    adaptation = adaptation_of(name) if backend == "phalanx" else None
    if adaptation is not None and ranks < adaptation.ranks:
        return {"status": "skipped", "why": f"Needs {adaptation.ranks} ranks.", "seconds": 0.0}
    if backend == "phalanx" and adaptation is None and suite.tests[name]["cuda"] and not torch.cuda.is_available():
        return {"status": "skipped", "why": "Needs CUDA devices.", "seconds": 0.0}
    began = time.monotonic()
    outcomes = suite.run(name, ranks, adaptation, limit=LIMIT_S)
    seconds = round(time.monotonic() - began, 2)
    status = status_of(outcomes)
    if status == "failed":
        DETAILS.mkdir(parents=True, exist_ok=True)
        (DETAILS / f"{backend.replace(' ', '-')}-{ranks}-{name}.txt").write_text(report(outcomes) + "\n")
        print(f"    {name} failed: {first_line(outcomes)}", flush=True)
    return {"status": status, "why": first_line(outcomes) if status != "passed" else "", "seconds": seconds}


def first_line(outcomes: Iterable[Outcome]) -> str:
    """The end of the first traceback, or why it was skipped."""
    texts = [outcome["text"].strip() for outcome in outcomes if outcome["status"] != "passed"]
    return next((text.splitlines()[-1] for text in texts if text), "")


def versions() -> list[str]:
    """The versions of torch that results are kept of, the oldest first."""
    return sorted((path.name for path in RESULTS.iterdir()), key=lambda name: [int(part) for part in name.split(".")])


def load_all(version: str) -> AllResults:
    every: list[Results] = [json.loads(path.read_text()) for path in paths(version)]
    return {(results["backend"], results["ranks"]): results for results in every}


def paths(version: str) -> list[Path]:
    return [path_of(version, backend, ranks) for ranks in (2, 4) for backend in BACKENDS]


def path_of(version: str, backend: str, ranks: int) -> Path:
    return RESULTS / version / f"{backend.replace(' ', '-')}-{ranks}.json"


if __name__ == "__main__":
    sys.exit(main())
