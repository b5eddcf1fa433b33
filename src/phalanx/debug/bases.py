"""The folders that hold job folders: where jobs put them, and where `phalanx report` looks for them.

$PHALANX_FOLDER, if it is set, and no other. Else, in this order, the first in which a job folder can be made:

1. `$TMPDIR/phalanx-<uid>`, if it is set
2. `/tmp/phalanx-<uid>`
3. `/var/tmp/phalanx-<uid>`
4. `~/.cache/phalanx/jobs` (`$XDG_CACHE_HOME/phalanx/jobs`)

The first three have names that another user can take before us; nobody else can take the fourth. `phalanx report` may
run with another TMPDIR than the job. So a job whose folder is below $TMPDIR leaves a link to it in the first of the
others that can be used. Only links in a folder of ours are read, and what they lead to is checked like all folders.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.debug.job_folder import is_job_name

__all__ = ["Base", "bases", "remake_job", "unlink_job"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Black boxes reserve their space; one with the usual number of calls takes half a MiB.
_LEAST_BYTES = 1024 * 1024
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Base:
    """A folder that holds job folders."""

    path: Path
    # The user's word counts for $PHALANX_FOLDER: it may be a link, or a folder that users share.
    is_chosen: bool = False
    makes_parents: bool = False
    # The same for all processes of this user, whatever their variables are.
    is_fixed: bool = True

    @classmethod
    def chosen(cls, path: Path) -> Base:
        return cls(path, is_chosen=True, makes_parents=True)

    def make_job(self) -> Path:
        """A new job folder. Raises OSError where it can't be made here."""
        moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        name = f"job-{moment}-{os.getpid()}-{secrets.token_hex(2)}"
        self.make_named(name)
        return self.path / name

    def make_named(self, name: str) -> None:
        with self._open(make=True) as handle:
            _check_room(self.path, handle)
            os.mkdir(name, 0o700, dir_fd=handle)
        if not self.is_fixed:
            _link_job(self.path / name)

    def jobs(self, linked: bool = True) -> list[Path]:
        """Folders with the names of jobs, from the oldest to the newest one; none where there is no such base."""
        with contextlib.suppress(OSError), self._open() as handle:
            names = [name for name in sorted(os.listdir(handle)) if is_job_name(name)]
            return [path for name in names if (path := self._job(handle, name, linked)) is not None]
        return []

    def _job(self, handle: int, name: str, linked: bool) -> Path | None:
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(_mode(handle, name)):
                return self.path / name
            if linked and not self.is_chosen and stat.S_ISLNK(_mode(handle, name)):
                return _linked_job(handle, name)
        return None

    @contextlib.contextmanager
    def _open(self, make: bool = False) -> Iterator[int]:
        if make:
            self.path.mkdir(mode=0o700, parents=self.makes_parents, exist_ok=True)
        handle = os.open(self.path, _FOLDER if self.is_chosen else _FOLDER | os.O_NOFOLLOW)
        try:
            if not self.is_chosen:
                self._check_owner(handle)
            yield handle
        finally:
            os.close(handle)

    def _check_owner(self, handle: int) -> None:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}", str(self.path))
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(handle, 0o700)

    def link(self, job: Path) -> None:
        with self._open(make=True) as handle:
            for name in filter(is_job_name, os.listdir(handle)):
                # Links to jobs that were removed, and nothing else that has such a name.
                with contextlib.suppress(OSError):
                    if stat.S_ISLNK(_mode(handle, name)) and _linked_job(handle, name) is None:
                        os.unlink(name, dir_fd=handle)
            os.symlink(job, job.name, dir_fd=handle)

    def unlink(self, name: str) -> None:
        with self._open() as handle:
            if stat.S_ISLNK(_mode(handle, name)):
                os.unlink(name, dir_fd=handle)


def bases() -> list[Base]:
    """The preferred one first."""
    if chosen := os.environ.get("PHALANX_FOLDER"):
        # The program may change its working folder.
        return [Base.chosen(Path(chosen).absolute())]
    name = f"phalanx-{os.geteuid()}"
    found = [Base(parent / name) for parent in _temporary_folders()]
    if (temporary := os.environ.get("TMPDIR")) and (path := Path(temporary).absolute() / name) not in [
        base.path for base in found
    ]:
        found.insert(0, Base(path, is_fixed=False))
    if (cache := _cache_folder()) is not None:
        found.append(Base(cache / "phalanx" / "jobs", makes_parents=True))
    # The memory there is the groups'. A base that is a link is never followed, so its parent decides; another user may
    # have put a circle of links there.
    return [base for base in found if not _real(base.path.parent).is_relative_to(_SHARED_MEMORY)]


def remake_job(path: Path) -> None:
    """A job folder that was removed, under its name. Raises OSError."""
    base = next((base for base in bases() if base.path == path.parent), None)
    if base is None:
        raise FileNotFoundError(errno.ENOENT, "expected a place for job folders", str(path.parent))
    base.make_named(path.name)


def unlink_job(path: Path) -> None:
    """Removes the links to a job folder that was removed."""
    for base in bases():
        if base.is_fixed and not base.is_chosen and base.path != path.parent:
            with contextlib.suppress(OSError):
                base.unlink(path.name)


def _link_job(path: Path) -> None:
    for base in bases():
        if base.is_fixed:
            with contextlib.suppress(OSError):
                base.link(path)
                return


def _mode(handle: int, name: str) -> int:
    """Of a link, where it is one."""
    return os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode


def _linked_job(handle: int, name: str) -> Path | None:
    """Where a link to a job folder leads; None where there is no such folder any more."""
    target = Path(os.readlink(name, dir_fd=handle))
    return target if target.name == name and target.is_dir() else None


def _real(path: Path) -> Path:
    """Without links, as far as it is there. Path.resolve raises RuntimeError where links go in a circle."""
    return Path(os.path.realpath(path))


def _temporary_folders() -> list[Path]:
    return [Path("/tmp"), Path("/var/tmp")]


def _cache_folder() -> Path | None:
    """Of this user; None where the home folder is missing or somebody else's, as under sudo."""
    with contextlib.suppress(OSError, RuntimeError):
        home = Path.home()
        if home.stat().st_uid == os.geteuid():
            asked = os.environ.get("XDG_CACHE_HOME", "")
            return Path(asked) if os.path.isabs(asked) else home / ".cache"
    return None


def _check_room(path: Path, handle: int) -> None:
    system = os.fstatvfs(handle)
    if system.f_blocks and system.f_bavail * system.f_frsize < _LEAST_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
