"""What is read of the folders of a job: the black boxes and the report that tells most.

Folders may come from anywhere. Whatever they hold, a reader keeps only so much of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from phalanx.debug.box_reader import read_box
from phalanx.debug.box_texts import Room
from phalanx.debug.job_folder import JobFolder, describe_problem
from phalanx.debug.records import Box

__all__ = ["Written", "read_boxes", "read_text"]

# Several processes for each rank that a job can have.
_MOST_BOXES = 4096
# Of a report: more than anybody reads.
_MOST_TEXT_BYTES = 64 * 1024


class Written(NamedTuple):
    """The earliest of the reports that processes wrote when they failed."""

    name: str
    text: str
    num_others: int


def read_boxes(*paths: Path, is_own: bool = False) -> tuple[list[Box], list[str]]:
    """The boxes in these folders, which are one job's, and what there is to say of those that are left out.

    `is_own`: these must be job folders of this user, as `find_jobs` gives them.
    """
    boxes, problems = [], []
    with _opened(paths, is_own) as folders:
        files = [(folder, name) for folder in folders for name in folder.names("*.box")]
        room = Room(min(len(files), _MOST_BOXES))
        for folder, name in files[:_MOST_BOXES]:
            try:
                with folder.open(name) as file:
                    box = read_box(file, room=room)
            except (OSError, ValueError) as error:
                problems.append(describe_problem(error))
                continue
            boxes.append(box)
            if box.num_left_out:
                problems.append(f"{box.path}: calls of {_counted(box.num_left_out, 'group')}, {_NO_ROOM}")
        if len(files) > _MOST_BOXES:
            problems.append(f"{_counted(len(files) - _MOST_BOXES, 'black box')}, {_NO_ROOM}")
    return boxes, problems


def read_text(*paths: Path, is_own: bool = False) -> tuple[Written | None, list[str]]:
    """The report that was written first, and what there is to say of those that can't be read."""
    found, problems = [], []
    with _opened(paths, is_own) as folders:
        for folder in folders:
            for name in folder.names("*.txt"):
                try:
                    with folder.open(name) as file:
                        found.append((os.fstat(file.handle).st_mtime_ns, name, folder))
                except OSError as error:
                    problems.append(describe_problem(error))
        found.sort(key=lambda each: each[:2])
        for _, name, folder in found:
            try:
                text = folder.read(name, _MOST_TEXT_BYTES).decode(errors="replace")
                return Written(name, text, len(found) - 1), problems
            except OSError as error:
                problems.append(describe_problem(error))
    return None, problems


_NO_ROOM = "more than a report has room for"


def _counted(num: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("x") else f"{what}s"
    return f"{num} {what if num == 1 else plural}"


@contextlib.contextmanager
def _opened(paths: tuple[Path, ...], is_own: bool) -> Iterator[list[JobFolder]]:
    with contextlib.ExitStack() as stack:
        open_one = JobFolder.own if is_own else JobFolder.named
        yield [stack.enter_context(open_one(path)) for path in paths]
