"""Job folders: where the black boxes of a job lie while it runs, and after it if it failed.

Every process of a job holds a shared lock on `<folder>/lock` until it has left its groups in order, or ends; the system
gives it back when the process is killed. Whoever gets the lock for itself alone is the last, and knows that nobody
writes there any more. It removes the folder if every box in it says that its process ended well. A process that comes
back finds the folder, or makes it again under its name.

Nothing here may break a run: what goes wrong is logged, and the caller goes on without a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from phalanx import _native
from phalanx.debug.bases import Base, bases, remake_job, unlink_job
from phalanx.debug.box_layout import FORMATS
from phalanx.debug.box_reader import read_header
from phalanx.debug.job_folder import LOCK, JobFolder, try_lock
from phalanx.debug.records import ENDED_WELL, RUNNING
from phalanx.log import logger

__all__ = ["Membership", "find_jobs", "job_folders", "make_job_folder"]


# What is in a folder of ours: nothing else is touched.
_CONTENTS = ("*.box", "*.txt", "rank_*", "rank-*.json", "*.waits", "crash", ".*.tmp", LOCK)
# Of the folders of jobs that are over.
_MOST_KEPT = 10
_MOST_KEPT_BYTES = 256 * 1024 * 1024
# Seconds after which a folder without boxes, which nobody has locked, is left over, and not about to be used.
_AGE = 60.0
# Seconds that a process waits for others that end at the same time, and between two looks.
_PATIENCE, _PAUSE = 1.0, 0.001
# How often a folder that vanishes while it is joined is made again.
_MOST_TRIES = 10

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _harmless(function: Callable[_P, _T]) -> Callable[_P, _T | None]:
    """Logs what is raised and returns None instead."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            logger.info("black boxes: %s: %s", function.__qualname__, error)
            return None

    return guarded


@_harmless
def make_job_folder() -> Path:
    """A new folder, for this user only. Older ones, of jobs that are over, make room for it."""
    problems = []
    for base in bases():
        try:
            folder = base.make_job()
        except OSError as error:
            problems.append(str(error))
            if base.is_chosen:
                logger.warning("PHALANX_FOLDER can't have job folders: %s; the black box is in memory", error)
            continue
        _make_room(base)
        return folder
    raise FileNotFoundError(f"there is no place for the folder of a job: {'; '.join(problems)}")


def find_jobs() -> list[Path]:
    """The job folders of this user that have boxes, from the oldest to the newest one, wherever jobs put them."""
    found = {}
    for base in bases():
        for path in base.jobs():
            with contextlib.suppress(OSError), JobFolder.own(path) as folder:
                if folder.names("*.box"):
                    found[folder.identity] = path
    return sorted(found.values(), key=lambda path: path.name)


def job_folders(base: Path) -> list[Path]:
    """From the oldest to the newest one, of whatever user."""
    return Base.chosen(base).jobs()


class Membership:
    """This process' part in a job folder. Of a process that forks, only the parent has it."""

    def __init__(self, folder: JobFolder, lock: int) -> None:
        self.folder = folder.path
        self._identity = folder.identity
        # Where this process' own box belongs.
        self.box = folder.path / f"{os.getpid()}.box"
        self._lock: int | None = lock
        self._lock_identity = _identity_of(lock)
        _memberships.add(self)

    @classmethod
    def join(cls, path: str | Path) -> Membership:
        """Raises OSError or ValueError where there is no such folder of this user, or not any more."""
        with JobFolder.own(path) as folder:
            lock = folder.open_lock()
            try:
                # Not while a process that leaves has it alone, only to see whether it may remove the folder.
                with _one_by_one(folder):
                    is_locked = try_lock(lock, fcntl.LOCK_SH)
                # Whoever has it alone is about to remove the folder, or has.
                if not is_locked or not os.fstat(lock).st_nlink:
                    raise FileNotFoundError(f"{folder.path} was removed")
            except BaseException:
                os.close(lock)
                raise
            return cls(folder, lock)

    @classmethod
    def rejoin(cls, path: Path) -> Membership:
        """Of a folder that this process has left; made again under its name where it was removed since."""
        for _ in range(_MOST_TRIES):
            # It may be removed at any time, until this process has its lock.
            with contextlib.suppress(FileNotFoundError):
                return cls.join(path)
            # Another process may make it at the same time.
            with contextlib.suppress(FileExistsError):
                remake_job(path)
        raise FileNotFoundError(f"{path} was removed")

    def take_up(self, move: Callable[[int], None]) -> None:
        """The box of this process goes on, in a new file where the old one was removed (`move`)."""
        with self.open() as folder:
            if not folder.names(self.box.name):
                with self.made_box() as handle:
                    move(handle)
            _mark(folder, self.box.name, _native.BOX_RUNNING, before=ENDED_WELL)

    def open(self) -> JobFolder:
        """The same folder, and no other that has come in its place."""
        return JobFolder.own(self.folder, self._identity)

    @contextlib.contextmanager
    def made_box(self) -> Iterator[int]:
        """The file of this process' box, new and empty. It is removed where the caller fails to make the box."""
        with self.open() as folder:
            handle = folder.create(self.box.name)
            try:
                yield handle
            except BaseException:
                folder.remove(self.box.name)
                raise
            finally:
                os.close(handle)

    def write(self, name: str, data: bytes) -> None:
        with self.open() as folder:
            folder.write(name, data)

    def remove(self, name: str) -> None:
        with self.open() as folder:
            folder.remove(name)

    @_harmless
    def end(self, box_failed: bool) -> None:
        """Says in the box how this process ended, unless the box says so already, and leaves the folder.

        Once; the last process removes the folder where all ended well.
        """
        lock = self._take_lock()
        if lock is None:
            return
        try:
            with self.open() as folder:
                _mark(folder, self.box.name, _native.BOX_FAILED if box_failed else _native.BOX_ENDED_WELL)
                with _one_by_one(folder):
                    if try_lock(lock, fcntl.LOCK_EX) and _all_ended_well(folder):
                        _remove(folder)
                    os.close(lock)
                    lock = None
        finally:
            if lock is not None:
                os.close(lock)

    def leave_to_parent(self) -> None:
        """In a forked child, which would keep the folder locked as long as it lives."""
        lock = self._take_lock()
        if lock is not None:
            os.close(lock)

    def _take_lock(self) -> int | None:
        """None where it was taken before, or the program has closed it: its number may be another file's by now."""
        lock, self._lock = self._lock, None
        with contextlib.suppress(OSError):
            if lock is not None and _identity_of(lock) == self._lock_identity:
                return lock
        return None


_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for membership in list(_memberships):
        membership.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def _identity_of(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_dev, status.st_ino


def _mark(folder: JobFolder, name: str, ending: int, before: str = RUNNING) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError), folder.open(name, os.O_RDWR) as file:
        header = read_header(file)
        if header.ending == before:
            offset, code = FORMATS[header.version].header.places["ending"]
            os.pwrite(file.handle, struct.pack(f"<{code}", ending), offset)


def _all_ended_well(folder: JobFolder) -> bool:
    """Boxes that can't be read, and those of processes that died without recording an exit, did not."""
    try:
        for name in folder.names("*.box"):
            with folder.open(name) as file:
                if read_header(file).ending != ENDED_WELL:
                    return False
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _one_by_one(folder: JobFolder) -> Iterator[None]:
    """Processes that end at once would each find that the other one is still there."""
    with folder.locked_itself() as handle:
        until = time.monotonic() + _PATIENCE
        # One that was stopped in here is not waited for: then a folder may be left over.
        while not try_lock(handle, fcntl.LOCK_EX) and time.monotonic() < until:
            time.sleep(_PAUSE)
        yield


@_harmless
def _make_room(base: Base) -> None:
    """Removes folders of jobs that are over: the oldest, where they are too many or too large. The last one stays."""
    num, size = 0, 0
    for path in reversed(base.jobs(linked=False)):
        # Those of other users, and those that vanish meanwhile, are not ours to remove.
        with contextlib.suppress(OSError), JobFolder.own(path) as folder, _locked_alone(folder) as is_over:
            if is_over:
                num += 1
                size += _size_of(folder)
                if num > _MOST_KEPT or (num > 1 and size > _MOST_KEPT_BYTES):
                    _remove(folder)


@contextlib.contextmanager
def _locked_alone(folder: JobFolder) -> Iterator[bool]:
    """Whether the job of this folder is over. Nobody comes to it meanwhile."""
    is_young = time.time() - folder.modified < _AGE and not folder.names("*.box")
    if is_young:
        yield False
        return
    lock = folder.open_lock()
    try:
        yield try_lock(lock, fcntl.LOCK_EX)
    finally:
        os.close(lock)


def _remove(folder: JobFolder) -> None:
    """What is ours in it, and the folder if that was all."""
    for name in folder.names(*_CONTENTS):
        folder.remove(name)
    folder.remove_itself()
    unlink_job(folder.path)


def _size_of(folder: JobFolder) -> int:
    """In memory or on the disk, without holes."""
    return sum(folder.status(name).st_blocks * 512 for name in folder.names("*"))
