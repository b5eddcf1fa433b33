"""Builds the native stress test with sanitizers, runs it, and shows that a seeded race would be found.

`thread` and `address` (with undefined behaviour) must pass; `seeded` and `seeded posts`, in which the core publishes
without a release, must end with the thread sanitizer's report of a data race. `all orders` runs all orders of the steps
of ranks that post their calls (interleavings.cpp).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMON_FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer"]
OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    "ASAN_OPTIONS": "halt_on_error=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}
RACE = "WARNING: ThreadSanitizer: data race"
# What older thread sanitizers say where the kernel places mappings more randomly than they expect.
BAD_MAPPING = ("unexpected memory mapping", "memory layout is incompatible")
# On a machine that others use, too, a run takes ten times as long as on a quiet one.
LONGEST_RUN = 900.0
LINES_SHOWN = 60


@dataclass(frozen=True)
class Variant:
    name: str
    folder: str
    target: str
    sanitizers: str
    rounds: int
    must_race: bool = False
    # A part of the names of the cases to run; empty: all.
    cases: str = ""

    def arguments(self, seed: int, rounds: int) -> list[str]:
        return ["all"] if self.target == "interleavings" else [str(seed), str(rounds), self.cases]


VARIANTS = [
    Variant("thread", "stress-thread", "stress", "thread", 2),
    Variant("seeded", "stress-thread", "stress_seeded", "thread", 1, must_race=True),
    Variant("seeded posts", "stress-thread", "stress_seeded", "thread", 1, must_race=True, cases="posts"),
    Variant("address", "stress-address", "stress", "address,undefined", 3),
    Variant("all orders", "stress-plain", "interleavings", "", 1),
]


@dataclass(frozen=True)
class Verdict:
    good: bool
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the native stress test under sanitizers.")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random calls (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="rounds of every variant (default: as many as take seconds)")
    parser.add_argument("--only", choices=[variant.name for variant in VARIANTS], help="one variant instead of all")
    arguments = parser.parse_args()
    rows = []
    for variant in VARIANTS:
        if arguments.only in (None, variant.name):
            start = time.monotonic()
            verdict = check(variant, arguments.seed, arguments.rounds or variant.rounds)
            rows.append((variant.name, verdict, time.monotonic() - start))
    print()
    for name, verdict, seconds in rows:
        print(f"{name:12} {'ok' if verdict.good else 'FAILED':7} {seconds:6.1f} s   {verdict.text}")
    return 0 if all(verdict.good for _, verdict, _ in rows) else 1


def check(variant: Variant, seed: int, rounds: int) -> Verdict:
    print(f"{variant.name}: building", flush=True)
    program = build(variant)
    if program is None:
        return Verdict(False, "did not build")
    print(f"{variant.name}: running", " ".join(variant.arguments(seed, rounds)), flush=True)
    code, output = run([str(program), *variant.arguments(seed, rounds)])
    verdict = judge(variant, code, output)
    if not verdict.good:
        print(excerpt(output), flush=True)
    return verdict


def build(variant: Variant) -> Path | None:
    folder = ROOT / "build" / variant.folder
    sanitizers = [f"-fsanitize={variant.sanitizers}"] if variant.sanitizers else []
    flags = ";".join([*COMMON_FLAGS, *sanitizers])
    configure = [tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DPHALANX_STRESS=ON"]
    configure += [f"-DPHALANX_STRESS_FLAGS={flags}", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    for command in (configure, [tool("ninja"), "-C", str(folder), variant.target]):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout, flush=True)
            return None
    return folder / variant.target


def tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"sanitize: {name} is neither beside {sys.executable} nor on PATH; run `make build` first")
    return found


def run(command: list[str]) -> tuple[int, str]:
    """The program's exit code and output; tried again without address randomisation where that is in its way."""
    code, output = run_once(command)
    setarch = shutil.which("setarch")
    if code != 0 and setarch is not None and any(words in output for words in BAD_MAPPING):
        return run_once([setarch, "-R", *command])
    return code, output


def run_once(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | OPTIONS,
            timeout=LONGEST_RUN,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {LONGEST_RUN:.0f} s"
    return done.returncode, done.stdout


def judge(variant: Variant, code: int, output: str) -> Verdict:
    if variant.must_race:
        if code != 0 and RACE in output:
            return Verdict(True, "the seeded race was reported, as it must be")
        return Verdict(False, f"the seeded race was NOT reported (exit code {code})")
    last = output.rstrip().rpartition("\n")[2]
    if code != 0:
        summary = next((line for line in output.splitlines() if line.startswith("SUMMARY:")), last)
        return Verdict(False, f"exit code {code}: {summary}")
    return Verdict(True, last)


def excerpt(output: str) -> str:
    lines = output.splitlines()
    if len(lines) <= LINES_SHOWN:
        return output
    return "\n".join([*lines[:LINES_SHOWN], f"... {len(lines) - LINES_SHOWN} more lines"])


if __name__ == "__main__":
    sys.exit(main())
