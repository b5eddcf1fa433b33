"""Folders for runs. One whose process was killed is removed by the next process that makes one."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["folder_of_run"]

_PREFIX = "phalanx-run-"
# Seconds after which a folder that nobody has locked is left over, and not about to be locked.
_AGE = 60.0


@contextlib.contextmanager
def folder_of_run() -> Iterator[Path]:
    """A folder that is gone in the end. It is locked as long as this process lives."""
    _remove_left_over()
    temporary = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    with temporary as name, _opened(Path(name)) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield Path(name)


@functools.cache
def _remove_left_over() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Those of other users, and those that vanish meanwhile, are not ours to remove.
        with contextlib.suppress(OSError), _opened(path) as folder:
            status = os.fstat(folder)
            # Root could remove the folder that another user's run has not locked yet.
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _AGE:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)
