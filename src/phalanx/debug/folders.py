"""Job folders: where the black boxes of a job lie while it runs, and after it if it failed.

Every process of a job holds a shared lock on `<folder>/lock` while it lives; the system gives it back when the process
is killed. Whoever gets the lock for itself alone is the last, and knows that nobody writes there any more. It removes
the folder if every box in it says that its process ended well.

Nothing here may break a run: what goes wrong is logged, and the caller goes on without a folder.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import functools
import logging
import os
import re
import secrets
import stat
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from phalanx.debug.records import ENDED_WELL, RUNNING, Box, read_box, read_header

__all__ = ["Membership", "base_folder", "job_folders", "make_job_folder", "read_boxes"]

_logger = logging.getLogger("phalanx")

_LOCK = "lock"
# What a folder of ours is called, and what is in it: nothing else is touched.
_JOB_NAME = re.compile(r"job-\d{8}-\d{6}-\d+-[0-9a-f]{4}")
_CONTENTS = ("*.box", "*.txt", "rank_*", "rank-*.json", _LOCK)
# Of the folders of jobs that are over.
_MOST_KEPT = 10
_MOST_KEPT_BYTES = 256 * 1024 * 1024
# Seconds after which a folder without boxes, which nobody has locked, is left over, and not about to be used.
_AGE = 60.0
# Seconds that a process waits for others that end at the same time, and between two looks.
_PATIENCE, _PAUSE = 1.0, 0.001
# The ending in a box, as in _core/black_box.hpp.
_ENDING_OFFSET = 68
_ENDING = struct.Struct("<I")
_WELL, _FAILED = 1, 2

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _harmless(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Logs what is raised and returns None instead."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _logger.info("black boxes: %s: %s", function.__qualname__, error)
            return None

    return guarded


@_harmless
def make_job_folder() -> Path:
    """A new folder, for this user only. Older ones, of jobs that are over, make room for it."""
    base = base_folder()
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = base / f"job-{moment}-{os.getpid()}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700)
    _make_room(base)
    return folder


def base_folder() -> Path:
    """Where job folders are: $PHALANX_FOLDER, else a folder of this user's own among the temporary files."""
    if chosen := os.environ.get("PHALANX_FOLDER"):
        # The program may change its working folder.
        folder = Path(chosen).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    parent = _temporary_folder()
    folder = parent / f"phalanx-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Others may write among the temporary files: what has our name need not be ours.
    return folder if _is_ours(folder) else Path(tempfile.mkdtemp(prefix=f"phalanx-{os.getuid()}-", dir=parent))


def job_folders(base: Path) -> list[Path]:
    """From the oldest to the newest one."""
    named = [path for path in base.glob("job-*") if _JOB_NAME.fullmatch(path.name)]
    return sorted(path for path in named if path.is_dir() and not path.is_symlink())


def read_boxes(folder: Path) -> tuple[list[Box], list[str]]:
    """All boxes of a folder, and what there is to say of files that are none."""
    boxes, problems = [], []
    for path in sorted(folder.glob("*.box")):
        try:
            boxes.append(read_box(path))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    return boxes, problems


class Membership:
    """This process' part in a job folder. Of a process that forks, only the parent has it."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        # Where this process' own box belongs.
        self.box = folder / f"{os.getpid()}.box"
        self._lock: int | None = lock
        _memberships.add(self)

    @classmethod
    @_harmless
    def join(cls, folder: Path) -> Membership:
        """None where there is no such folder, or not any more."""
        lock = _open_lock(folder)
        try:
            # Whoever has it alone is about to remove the folder, or has.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.fstat(lock).st_nlink:
                raise FileNotFoundError(f"{folder} was removed")
        except BaseException:
            os.close(lock)
            raise
        return cls(folder, lock)

    @_harmless
    def end(self, box_failed: bool) -> None:
        """Says in the box how this process ended, unless the box says so already, and leaves the folder.

        Once; the last process removes the folder where all ended well.
        """
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            _mark(self.box, _FAILED if box_failed else _WELL)
            with _one_by_one(self.folder):
                if _lock_alone(lock) and _all_ended_well(self.folder):
                    _remove(self.folder)
                os.close(lock)
                lock = None
        finally:
            if lock is not None:
                os.close(lock)

    def leave_to_parent(self) -> None:
        """In a forked child, which would keep the folder locked as long as it lives."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for membership in list(_memberships):
        membership.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _mark(path: Path, ending: int) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        if read_header(path).ending == RUNNING:
            file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.pwrite(file, _ENDING.pack(ending), _ENDING_OFFSET)
            finally:
                os.close(file)


def _all_ended_well(folder: Path) -> bool:
    """Boxes that can't be read, and those of processes that died without saying so, did not."""
    try:
        return all(read_header(path).ending == ENDED_WELL for path in folder.glob("*.box"))
    except ValueError:
        return False


@contextlib.contextmanager
def _one_by_one(folder: Path) -> Iterator[None]:
    """Processes that end at once would each find that the other one is still there."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # One that was stopped in here is not waited for: then a folder may be left over.
                if time.monotonic() > until:
                    break
                time.sleep(_PAUSE)
        yield
    finally:
        os.close(handle)


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _lock_alone(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _temporary_folder() -> Path:
    """Not in /dev/shm: its memory is the groups'."""
    for name in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(name).resolve()
        if not path.is_relative_to("/dev/shm") and path.is_dir() and os.access(path, os.W_OK | os.X_OK):
            return path
    raise FileNotFoundError("no folder for temporary files outside of /dev/shm")


def _is_ours(folder: Path) -> bool:
    status = folder.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if is_ours and stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)
    return is_ours


@_harmless
def _make_room(base: Path) -> None:
    """Removes folders of jobs that are over: the oldest, where they are too many or too large. The last one stays."""
    num, size = 0, 0
    for folder in reversed(job_folders(base)):
        # Those of other users, and those that vanish meanwhile, are not ours to remove.
        with contextlib.suppress(OSError), _locked_alone(folder) as is_over:
            if is_over:
                num += 1
                size += _size_of(folder)
                if num > _MOST_KEPT or (num > 1 and size > _MOST_KEPT_BYTES):
                    _remove(folder)


@contextlib.contextmanager
def _locked_alone(folder: Path) -> Iterator[bool]:
    """Whether the job of this folder is over. Nobody comes to it meanwhile."""
    is_young = time.time() - folder.lstat().st_mtime < _AGE and not any(folder.glob("*.box"))
    if is_young:
        yield False
        return
    lock = _open_lock(folder)
    try:
        yield _lock_alone(lock)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """What is ours in it, and the folder if that was all."""
    for pattern in _CONTENTS:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    folder.rmdir()


def _size_of(folder: Path) -> int:
    """In memory or on the disk, without holes."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))
