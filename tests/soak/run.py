"""`make soak`: random kills, mixed calls without an end, tensors that share memory, random programs of ranks that are
threads, programs that wait a lot, damaged boxes. Not part of `make test`: it takes about 40 minutes.

Prints the seed that repeats the run, and for every world that fails the command that runs that world alone; what is
known of it is written to build/soak/. A survivor that learns of a death too late fails its world, too.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keeper import Keeper

ROOT = Path(__file__).resolve().parents[2]
DETAILS = ROOT / "build" / "soak"
NOTE_SECONDS = 10.0
MOST_FAILURES = 20
# Of the calls, the part that 2 and 4 ranks make.
PARTS = {2: 0.8, 4: 0.2}
WORLDS_A_SEED = 1_000_000
# In `make test`; see tests/reports/test_random_programs.py.
RANDOM_PROGRAMS = 200
# The same of tests/reports/test_guarded_random_programs.py.
GUARDED_PROGRAMS = 25
# The same, of all sizes; see tests/integration/test_waiting_programs.py.
WAITING_PROGRAMS = 18
# Seconds that a rank which leaves in order gives its peers for its calls in flight.
_PATIENCE = 1.0


@dataclass
class Tally:
    """What has come of the run so far."""

    failures: int = 0
    lines: list[str] = field(default_factory=list)


class Notes:
    """A line now and then, so that a person sees that it goes on."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def say(self, text: str, *, now: bool = False) -> None:
        if now or time.monotonic() > self._last + NOTE_SECONDS:
            self._last = time.monotonic()
            print(f"[{self._last - self._start:6.0f} s] {text}", flush=True)


def main() -> int:
    options = parse()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    tally = Tally()
    try:
        with Keeper() as keeper:
            if options.world is not None:
                replay(keeper, options, tally)
            else:
                same = sys.argv[1:] if options.seed is not None else [*sys.argv[1:], "--seed", str(seed)]
                print(f"soak: seed {seed}; the same again: {command(same)}", flush=True)
                for name, soak in PARTS_OF_A_RUN.items():
                    if options.only in (None, name):
                        soak(keeper, options, seed, tally)
    except KeyboardInterrupt:
        tally.lines.append("interrupted")
    print("\n".join(["", *tally.lines]))
    if "interrupted" in tally.lines:
        return 130
    return 1 if tally.failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill ranks at random points, and make mixed calls without an end.")
    parser.add_argument("--kills", type=int, default=500, help="worlds in which a rank dies (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=1_000_000, help="mixed calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the whole run (default: a new one)")
    parser.add_argument(
        "--programs", type=int, default=1_000, help="programs whose tensors share memory (default: %(default)s)"
    )
    parser.add_argument("--boxes", type=int, default=5_000, help="damaged black boxes (default: %(default)s)")
    parser.add_argument(
        "--random",
        type=int,
        default=2_000,
        help="random programs of ranks that are threads, and a part of that with faults (default: %(default)s)",
    )
    parser.add_argument(
        "--waiting",
        type=int,
        default=3_000,
        help="programs that wait a lot and must not be called deadlocks (default: %(default)s)",
    )
    parser.add_argument("--only", choices=list(PARTS_OF_A_RUN), help="one of the parts")
    parser.add_argument("--world", type=int, help="run this one world of the kills and print all that is known of it")
    parser.add_argument(
        "--within", type=float, default=1.0, help="seconds in which survivors must know (default: %(default)s)"
    )
    parser.add_argument("--backend", default="phalanx", help="another backend, to try the programs themselves")
    parser.add_argument("--no-deaths", action="store_true", help="run the worlds of the kills with nobody dying")
    parser.add_argument("--no-p2p", action="store_true", help="leave out point to point")
    return parser.parse_args()


def command(arguments: Sequence[str]) -> str:
    """This program with these arguments, for a shell in the project's folder."""
    python, script = Path(sys.executable), Path(__file__).resolve().relative_to(ROOT)
    if python.is_relative_to(ROOT):
        python = python.relative_to(ROOT)
    return shlex.join([str(python), str(script), *arguments])


def run_world(keeper: Keeper, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    outcome: dict[str, Any] = keeper.run(
        "kills.supervise",
        seed=seed,
        backend=options.backend,
        p2p=not options.no_p2p,
        deadly=not options.no_deaths,
    )
    # A rank that leaves in order gives its peers a second for its calls in flight before it goes (design.md).
    limit = options.within + (_PATIENCE if outcome["death"] == "sys.exit" else 0.0)
    late = [seconds for seconds in outcome["lost_after"] if seconds > limit]
    if late:
        outcome["problems"].append(f"{len(late)} survivors learnt of the death late: after {max(late):.2f} s")
    return outcome


def replay(keeper: Keeper, options: argparse.Namespace, tally: Tally) -> None:
    outcome = run_world(keeper, options, options.world)
    tally.failures = bool(outcome["problems"])
    tally.lines += [f"world {options.world}: {outcome['scenario']}", *outcome["problems"], outcome["detail"]]
    tally.lines.append(f"{'FAILED' if tally.failures else 'ok'}, {delays(outcome['lost_after'])}")


def soak_kills(keeper: Keeper, options: argparse.Namespace, seed: int, tally: Tally) -> None:
    notes = Notes()
    outcomes: list[dict[str, Any]] = []
    failures = 0
    start = time.monotonic()
    try:
        for number in range(options.kills):
            world = seed * WORLDS_A_SEED + number
            outcome = run_world(keeper, options, world)
            outcomes.append(outcome)
            if outcome["problems"]:
                failures += 1
                report(notes, f"world {world}", outcome, ["--world", str(world)], options)
                if failures == MOST_FAILURES:
                    notes.say(f"giving up after {failures} failures", now=True)
                    break
            notes.say(f"kills: {number + 1} of {options.kills}, {failures} failed")
    finally:
        tally.failures += failures
        seconds = time.monotonic() - start
        verdict = f"{failures} FAILED" if failures else "all ok"
        tally.lines.append(f"kills: {len(outcomes)} worlds in {seconds:.0f} s, {verdict}")
        if not options.no_deaths:
            tally.lines += summary(outcomes, options.within)


def summary(outcomes: Sequence[dict[str, Any]], within: float) -> list[str]:
    """How long survivors took to know, by the way of the death, and where the victims died."""
    everything = [seconds for outcome in outcomes for seconds in outcome["lost_after"]]
    late = sum(seconds > within for seconds in everything)
    lines = [f"  survivors learnt of it: {delays(everything)}; {late} after more than {within:g} s"]
    for death in dict.fromkeys(outcome["death"] for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome["death"] == death]
        learnt = [seconds for outcome in mine for seconds in outcome["lost_after"]]
        lines.append(f"  {death:10} {len(mine):4} worlds, {delays(learnt)}")
    places: dict[str, int] = {}
    for outcome in outcomes:
        places[outcome["died_in"]] = places.get(outcome["died_in"], 0) + 1
    lines.append("  died in: " + ", ".join(f"{name} {count}" for name, count in sorted(places.items())))
    return lines


def delays(seconds: Sequence[float]) -> str:
    if not seconds:
        return "0 times"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    median = statistics.median(ordered)
    return f"{len(ordered)} times, median {1e3 * median:.0f} ms, p99 {1e3 * p99:.0f} ms, max {1e3 * ordered[-1]:.0f} ms"


def soak_mixed(keeper: Keeper, options: argparse.Namespace, seed: int, tally: Tally) -> None:
    for size, part in PARTS.items():
        notes = Notes()
        calls = int(options.calls * part)
        start = time.monotonic()

        def on_note(note: dict[str, Any], size: int = size, calls: int = calls, notes: Notes = notes) -> None:
            memory = ", ".join(f"{one / 2**20:.1f}" for one in note["memory"])
            notes.say(f"mixed, {size} ranks: {note['calls']:,} of {calls:,} calls; private MiB by rank: {memory}")

        outcome = keeper.run(
            "mixed.supervise",
            on_note,
            size=size,
            calls=calls,
            seed=seed,
            backend=options.backend,
            p2p=not options.no_p2p,
        )
        seconds = time.monotonic() - start
        grown = max(outcome["growth"]) / 2**20
        verdict = "FAILED" if outcome["problems"] else "ok"
        tally.lines.append(
            f"mixed: {calls:,} calls on {size} ranks in {seconds:.0f} s, {verdict}; memory grew by {grown:.2f} MiB"
        )
        if outcome["problems"]:
            tally.failures += 1
            arguments = ["--only", "mixed", "--seed", str(seed), "--calls", str(options.calls)]
            report(notes, f"mixed calls on {size} ranks", outcome, arguments, options)


def soak_aliasing(keeper: Keeper, options: argparse.Namespace, seed: int, tally: Tally) -> None:
    for size, part in PARTS.items():
        notes = Notes()
        programs = int(options.programs * part)
        start = time.monotonic()

        def on_note(note: dict[str, Any], size: int = size, programs: int = programs, notes: Notes = notes) -> None:
            notes.say(f"aliasing, {size} ranks: {note['played']:,} of {programs:,} programs")

        outcome = keeper.run("aliasing_worlds.supervise", on_note, size=size, first=seed * WORLDS_A_SEED, num=programs)
        verdict = "FAILED" if outcome["problems"] else "ok"
        tally.lines.append(
            f"aliasing: {programs:,} programs on {size} ranks in {time.monotonic() - start:.0f} s, {verdict}"
        )
        if outcome["problems"]:
            tally.failures += 1
            arguments = ["--only", "aliasing", "--seed", str(seed), "--programs", str(options.programs)]
            report(notes, f"aliasing on {size} ranks", outcome, arguments, options)


def soak_boxes(keeper: Keeper, options: argparse.Namespace, seed: int, tally: Tally) -> None:
    """In a process of its own, which limits its memory."""
    first, start = seed * WORLDS_A_SEED, time.monotonic()
    script = ROOT / "tests" / "unit" / "fuzz_boxes.py"
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, str(script), str(first), str(options.boxes), folder]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
    verdict = "FAILED" if done.returncode else "ok"
    tally.lines.append(f"boxes: {options.boxes:,} damaged in {time.monotonic() - start:.0f} s, {verdict}")
    if done.returncode:
        tally.failures += 1
        outcome = {"problems": done.stdout.splitlines()[-1:], "detail": done.stdout + done.stderr}
        arguments = ["--only", "boxes", "--seed", str(seed), "--boxes", str(options.boxes)]
        report(Notes(), "damaged boxes", outcome, arguments, options)


def soak_random(keeper: Keeper, options: argparse.Namespace, seed: int, tally: Tally) -> None:
    factor = max(1, options.random // RANDOM_PROGRAMS)
    run_random("random", "test_random_programs.py", "threads", factor, RANDOM_PROGRAMS, options, seed, tally)


def soak_guarded(keeper: Keeper, options: argparse.Namespace, seed: int, tally: Tally) -> None:
    """Programs without a fault, on Gloo."""
    factor = max(1, options.random // RANDOM_PROGRAMS)
    run_random("guarded", "test_guarded_random_programs.py", "gloo", factor, GUARDED_PROGRAMS, options, seed, tally)


def run_random(
    name: str,
    file: str,
    chosen_tests: str,
    factor: int,
    num: int,
    options: argparse.Namespace,
    seed: int,
    tally: Tally,
) -> None:
    """By pytest and Hypothesis, which makes a program that fails smaller and shows it."""
    notes, start = Notes(), time.monotonic()
    tests = ROOT / "tests" / "reports" / file
    chosen = ["-k", chosen_tests, "--timeout=3600", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
    program = [sys.executable, "-m", "pytest", "-v", *chosen, str(tests)]
    environment = os.environ | {"PHALANX_RANDOM_PROGRAMS": str(factor)}
    lines: list[str] = []
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line.rstrip())
            done = re.search(r"::(\S.*) (PASSED|FAILED) +\[ *(\d+)%\]", line)
            if done:
                notes.say(f"{name} programs: {done[3]}% of the tests, {done[1]} {done[2].lower()}")
    verdict = "FAILED" if run.returncode else "ok"
    tally.lines.append(
        f"{name}: {factor * num:,} programs without a fault"
        f"{', others with,' if name == 'random' else ''} "
        f"in {time.monotonic() - start:.0f} s, {verdict}"
    )
    if run.returncode:
        tally.failures += 1
        outcome = {"problems": [line for line in lines if line.startswith("FAILED")], "detail": "\n".join(lines)}
        arguments = ["--only", name, "--seed", str(seed), "--random", str(options.random)]
        report(notes, f"{name} programs", outcome, arguments, options)


def soak_waiting(keeper: Keeper, options: argparse.Namespace, seed: int, tally: Tally) -> None:
    """By pytest: right programs in which ranks wait for each other in all ways, while deadlocks are looked for."""
    start = time.monotonic()
    factor = max(1, options.waiting // WAITING_PROGRAMS)
    tests = ROOT / "tests" / "integration" / "test_waiting_programs.py"
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-rP",
        "--timeout=3600",
        "-p",
        "no:cacheprovider",
        str(tests),
    ]
    environment = os.environ | {"PHALANX_WAITING_PROGRAMS": str(factor), "PHALANX_WAITING_SEED": str(seed)}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    looks = sum(int(number) for number in re.findall(r"(\d+) looks", done.stdout))
    verdict = "FAILED" if done.returncode else "none called a deadlock"
    tally.lines.append(
        f"waiting: {factor * WAITING_PROGRAMS:,} programs, {looks:,} looks in {time.monotonic() - start:.0f} s, "
        f"{verdict}"
    )
    if done.returncode:
        tally.failures += 1
        lines = done.stdout.splitlines()
        outcome = {"problems": [line for line in lines if line.startswith("FAILED")], "detail": done.stdout}
        arguments = ["--only", "waiting", "--seed", str(seed), "--waiting", str(options.waiting)]
        report(Notes(), "programs that wait", outcome, arguments, options)


PARTS_OF_A_RUN = {
    "kills": soak_kills,
    "mixed": soak_mixed,
    "aliasing": soak_aliasing,
    "random": soak_random,
    "guarded": soak_guarded,
    "waiting": soak_waiting,
    "boxes": soak_boxes,
}


def report(
    notes: Notes, what: str, outcome: dict[str, Any], arguments: Sequence[str], options: argparse.Namespace
) -> None:
    """Says what failed and how to run it again, and writes down the rest."""
    DETAILS.mkdir(parents=True, exist_ok=True)
    path = DETAILS / f"{what.replace(' ', '-')}.txt"
    lines = [outcome.get("scenario", what), *outcome["problems"], "", outcome["detail"]]
    path.write_text("\n".join(lines))
    same = [*arguments, *([] if options.backend == "phalanx" else ["--backend", options.backend])]
    same += [flag for flag, on in (("--no-deaths", options.no_deaths), ("--no-p2p", options.no_p2p)) if on]
    notes.say(f"FAILED {what}: {lines[0]}", now=True)
    for problem in outcome["problems"]:
        print(f"    {problem}")
    print(f"    details: {path.relative_to(ROOT)}\n    again: {command(same)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
