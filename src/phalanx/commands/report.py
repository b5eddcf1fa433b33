"""Tells what the black boxes of a job show: who is where, who is behind, and what came first.

Works while the job runs, and after its processes were killed. Without a folder the newest job is shown.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from phalanx.commands.boxes import FOLDERS_HELP, read_folders
from phalanx.commands.saying import say
from phalanx.debug.bases import bases
from phalanx.debug.evidence import read_text
from phalanx.debug.folders import find_jobs
from phalanx.debug.job import Process
from phalanx.debug.records import ending_of
from phalanx.reporters.text import report_lines

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help=FOLDERS_HELP)


def run(arguments: argparse.Namespace) -> int:
    # What this user did not name must be this user's.
    is_own = not arguments.folders
    folders: list[Path] = arguments.folders or [_newest()]
    boxes, problems = read_folders(folders, is_own)
    written, others = read_text(*folders, is_own=is_own)
    processes = [Process(box, ending_of(box)) for box in boxes]
    title = ", ".join(Path(os.path.realpath(folder)).name for folder in folders)
    say(report_lines(title, processes, time.time_ns(), written, problems + others))
    return 0


def _newest() -> Path:
    folders = find_jobs()
    if not folders:
        places = ", ".join(str(base.path) for base in bases())
        raise ValueError(f"there is no job folder in {places}; a job that ended well leaves none behind")
    return folders[-1]
