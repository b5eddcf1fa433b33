"""Tells what the black boxes of a job show: who is where, who is behind, and what came first.

Works while the job runs, and after its processes were killed. Without a folder the newest job is shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.commands.boxes import FOLDERS_HELP, read_folders
from phalanx.debug.folders import base_folder, job_folders
from phalanx.debug.job import Process
from phalanx.debug.records import ending_of
from phalanx.reporters.text import report_lines

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, help=FOLDERS_HELP)


def run(arguments: argparse.Namespace) -> int:
    folders: list[Path] = arguments.folders or [_newest()]
    boxes, problems = read_folders(folders)
    processes = [Process(box, ending_of(box)) for box in boxes]
    title = ", ".join(folder.resolve().name for folder in folders)
    print("\n".join(report_lines(title, processes, time.time_ns(), _texts(folders), problems)))
    return 0


def _newest() -> Path:
    base = base_folder()
    folders = [folder for folder in job_folders(base) if any(folder.glob("*.box"))]
    if not folders:
        raise ValueError(f"there is no job folder in {base}; a job that ended well leaves none behind")
    return folders[-1]


def _texts(folders: Sequence[Path]) -> list[tuple[str, str]]:
    """What processes wrote when they failed, the earliest first."""
    paths = [path for folder in folders for path in folder.glob("*.txt")]
    paths.sort(key=lambda path: path.stat().st_mtime_ns)
    return [(path.name, path.read_text(errors="replace")) for path in paths]
