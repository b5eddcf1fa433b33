"""The only way to the files of a job: a folder that is open, and files opened relative to its handle.

Paths of folders come from the store and from temporary directories, where other users write, too. So a process uses a
folder, and a file in it, only if the effective user owns it and nobody else can write to it. No link is followed, what
is not a regular file is not opened, and new files are created exclusively. A handle is held for a moment and never
kept: a program may close any number and open another file under it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from phalanx.printable import printable

__all__ = ["LOCK", "Bytes", "File", "JobFolder", "check_owner", "describe_problem", "is_job_name", "open_file"]

LOCK = "lock"
_JOB_NAME = re.compile(r"job-\d{8}-\d{6}-\d+-[0-9a-f]{4}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Nothing here may wait or take a terminal.
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_job_name(name: str) -> bool:
    """Whether a folder of ours has such a name. Others are never joined or removed, whoever owns them."""
    return _JOB_NAME.fullmatch(name) is not None


def check_owner(path: str | Path, status: os.stat_result) -> None:
    """Raises PermissionError unless the effective user owns it and nobody else can write to it."""
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}, not to {os.geteuid()}", str(path))
    if status.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(errno.EPERM, f"others can write to it (mode {mode:04o})", str(path))


def describe_problem(error: Exception) -> str:
    """For people, the file first, as in our own messages."""
    if isinstance(error, OSError) and error.filename:
        return printable(f"{error.filename}: {error.strerror}")
    return printable(str(error))


class File:
    """An open regular file. Closed by the folder that opened it."""

    def __init__(self, path: str, handle: int) -> None:
        self.path = path
        self.handle = handle

    def read(self, most: int | None = None) -> bytes:
        """From its beginning, as it is now."""
        size = os.fstat(self.handle).st_size
        return self.read_at(0, size if most is None else min(size, most))

    def read_at(self, offset: int, size: int) -> bytes:
        """So many bytes, or what is there of them."""
        # Read and not mapped: a file that somebody cuts meanwhile must not end this process.
        parts = []
        while size > 0 and (part := os.pread(self.handle, size, offset)):
            parts.append(part)
            offset += len(part)
            size -= len(part)
        return b"".join(parts)


class Bytes:
    """What is read as a file, and is none."""

    path = ""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = bytes(data)

    def read_at(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]


class JobFolder:
    """A folder of black boxes and reports, open until `close`."""

    def __init__(self, path: Path, handle: int, *, is_own: bool) -> None:
        self.path = path
        self._handle = handle
        self._is_own = is_own
        status = os.fstat(handle)
        self.identity = (status.st_dev, status.st_ino)
        self._owner = status.st_uid

    @classmethod
    def own(cls, path: str | Path, identity: tuple[int, int] | None = None) -> JobFolder:
        """A job folder of this user, to write to. With `identity`, the one that had it before and no other."""
        path = Path(path)
        if not path.is_absolute() or not is_job_name(path.name):
            raise PermissionError(errno.EPERM, "expected the folder of a job", str(path))
        folder = cls(path, os.open(path, _FOLDER | os.O_NOFOLLOW), is_own=True)
        try:
            check_owner(path, os.fstat(folder._handle))
            if identity not in (None, folder.identity):
                raise FileNotFoundError(errno.ENOENT, "another folder is in its place", str(path))
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def named(cls, path: str | Path) -> JobFolder:
        """Any folder that a person asks to see. Files of third parties in it are not read."""
        return cls(Path(path), os.open(path, _FOLDER), is_own=False)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> JobFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def names(self, *patterns: str) -> list[str]:
        """Of what is in the folder, in order."""
        return sorted(
            name for name in os.listdir(self._handle) if any(fnmatch.fnmatchcase(name, each) for each in patterns)
        )

    def status(self, name: str) -> os.stat_result:
        """Of a link, where it is one."""
        return os.stat(name, dir_fd=self._handle, follow_symlinks=False)

    @property
    def modified(self) -> float:
        """When something was last added or removed, in seconds since the epoch."""
        return os.fstat(self._handle).st_mtime

    @contextlib.contextmanager
    def open(self, name: str, access: int = os.O_RDONLY) -> Iterator[File]:
        """A file that is there. Raises OSError for what this process must not use."""
        handle = self._open(name, access)
        try:
            yield File(str(self.path / name), handle)
        finally:
            os.close(handle)

    def read(self, name: str, most: int | None = None) -> bytes:
        with self.open(name) as file:
            return file.read(most)

    def create(self, name: str) -> int:
        """A new file, for this user only; the caller closes the handle."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self._handle)

    def write(self, name: str, data: bytes) -> None:
        """A file with these contents, whole or not at all. One that has the name gives way to it, a link too."""
        # A name that no reader takes for a box, a report or a trace, should it stay behind.
        temporary = f".{secrets.token_hex(4)}.tmp"
        handle = self.create(temporary)
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.rename(temporary, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            self.remove(temporary)
            raise

    def open_lock(self) -> int:
        """The file that processes of the job lock, made if there is none; the caller closes the handle."""
        while True:
            with contextlib.suppress(FileExistsError):
                return self.create(LOCK)
            with contextlib.suppress(FileNotFoundError):
                return self._open(LOCK, os.O_RDWR)

    @contextlib.contextmanager
    def locked_itself(self) -> Iterator[int]:
        """A second handle, for a lock that goes with it."""
        handle = os.open(".", _FOLDER, dir_fd=self._handle)
        try:
            yield handle
        finally:
            os.close(handle)

    def remove(self, name: str) -> None:
        """A file or a link. A folder stays."""
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self._handle)

    def remove_itself(self) -> None:
        """If it is empty, and still where it was."""
        parent = os.open(self.path.parent, _FOLDER)
        try:
            status = os.stat(self.path.name, dir_fd=parent, follow_symlinks=False)
            if (status.st_dev, status.st_ino) == self.identity:
                os.rmdir(self.path.name, dir_fd=parent)
        finally:
            os.close(parent)

    def _open(self, name: str, access: int) -> int:
        path = self.path / name
        try:
            handle = os.open(name, access | _FILE, dir_fd=self._handle)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise OSError(error.errno, "expected a regular file, got something else", str(path)) from None
            raise type(error)(error.errno, os.strerror(error.errno or 0), str(path)) from None
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "expected a regular file, got something else", str(path))
            if self._is_own:
                check_owner(path, status)
            elif status.st_uid not in (os.geteuid(), self._owner):
                raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(path))
        except BaseException:
            os.close(handle)
            raise
        return handle


@contextlib.contextmanager
def open_file(path: str | os.PathLike[str]) -> Iterator[File]:
    """A file that a person asks to see."""
    path = Path(path)
    with JobFolder.named(path.parent) as folder, folder.open(path.name) as file:
        yield file


def try_lock(handle: int, kind: int) -> bool:
    """Whether the lock was free."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
