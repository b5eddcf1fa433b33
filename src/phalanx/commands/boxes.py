"""The boxes that a verb looks at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.debug.evidence import read_boxes
from phalanx.debug.folders import job_folders
from phalanx.debug.records import Box

__all__ = ["FOLDERS_HELP", "read_folders"]

FOLDERS_HELP = "where the boxes are; several folders are taken for one job"


def read_folders(folders: Sequence[Path], is_own: bool = False) -> tuple[list[Box], list[str]]:
    """All boxes, and what there is to say of files that are none. Raises where there is no box at all."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
    boxes, problems = read_boxes(*folders, is_own=is_own)
    if boxes:
        return boxes, problems
    names = ", ".join(map(str, folders))
    jobs = [job.name for folder in folders for job in job_folders(folder)]
    hint = f"; it has the folders of jobs, the newest is {jobs[-1]}" if jobs else ""
    raise ValueError("\n  ".join([f"there are no black boxes in {names}{hint}", *problems]))
