"""A rank's black box in the format of torch's flight recorder, whenever the program wants it."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.debug import flight
from phalanx.debug.box_reader import read_box
from phalanx.debug.own_box import own_box
from phalanx.errors import GroupError
from phalanx.transports import limits
from phalanx.transports.threads import this_thread

__all__ = ["dump"]


def dump(path: str | os.PathLike[str], *, format: flight.Format = "pickle", short: bool = False) -> Path:  # noqa: A002
    """Writes the last calls of this rank for torch's analyzer, and returns the file.

    `path` is a file, or a folder in which the file gets the name that the analyzer looks for. `format` is "pickle" or
    "json". A short dump leaves out where calls were made and how long they took.
    """
    box = own_box().box if this_thread.run is None else this_thread.run.own_box()
    if box is None:
        raise GroupError(
            "there is no black box: this process has made no group, or PHALANX_BLACK_BOX is 0",
            hint="make a group first; unset PHALANX_BLACK_BOX, or set it to a number of calls",
        )
    contents = read_box(box.contents())
    file = Path(path)
    if file.is_dir():
        file /= flight.file_name(contents.rank, format)
    try:
        flight.dump(contents, file, format, short)
    except OSError as error:
        limit = limits.find(error.errno)
        if limit is None:
            raise
        raise type(error)(error.errno, f"{error.strerror}: {limit.what}; {limit.hint}", str(file)) from None
    return file
