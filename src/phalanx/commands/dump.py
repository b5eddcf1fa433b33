"""Makes traces of black boxes that torch's own analyzer (torchfrtrace) reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from phalanx.commands.boxes import FOLDERS_HELP, read_folders
from phalanx.commands.saying import say
from phalanx.debug import flight
from phalanx.debug.job import Process, newest_processes
from phalanx.debug.records import ending_of

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help=FOLDERS_HELP)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the traces go, a file a rank")
    parser.add_argument("--json", action="store_true", help="for other tools: the analyzer reads pickles only")
    parser.add_argument("--short", action="store_true", help="what the analyzer needs and no more: no source lines")


def run(arguments: argparse.Namespace) -> int:
    boxes, problems = read_folders(arguments.folders)
    processes = newest_processes(Process(box, ending_of(box)) for box in boxes)
    newest = [process.box for process in processes if process.box.rank >= 0]
    # One trace at a time: each takes several times the memory of its box.
    floors = flight.floors_of({box.rank: flight.outline_of(flight.trace_of(box, short=True)) for box in newest})
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    kind: flight.Format = "json" if arguments.json else "pickle"
    for box in newest:
        trace = flight.trace_of(box, arguments.short)
        flight.align(trace, floors)
        flight.write(trace, out / flight.file_name(box.rank, kind), kind)
    kept = {box.path for box in newest}
    problems += [f"{box.path}: without a rank, or of an earlier process" for box in boxes if box.path not in kept]
    say([f"phalanx: left out: {problem}" for problem in problems], sys.stderr)
    say([f"{len(newest)} {'trace' if len(newest) == 1 else 'traces'} in {out}"])
    if kind == "pickle":
        partial = " --allow-incomplete-ranks" if len(newest) < max(box.world_size for box in boxes) else ""
        say([f"Next: torchfrtrace --prefix {flight.PREFIX}{partial} {out}"])
    return 0
