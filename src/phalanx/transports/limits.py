"""Limits that stop a step of ours: which limit it was, its value, and how to raise it.

The system answers with an error number only. `find` tells which limits give that answer, as far as this process can
see, with their values.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from phalanx import _native
from phalanx.errors import GroupError
from phalanx.log import logger
from phalanx.types import GroupInfo

__all__ = ["Limit", "check_handles", "check_size", "find", "find_in_text", "is_limit", "named", "of_threads", "warn"]

_CGROUPS = Path("/sys/fs/cgroup")
# What a thread's stack takes where no limit says so.
_STACK = 8 * 1024 * 1024
_KIB = 1024


class Limit(NamedTuple):
    what: str
    hint: str


class _Kind(NamedTuple):
    """A limit of a process: its name, what it counts, the option of `ulimit`, and the value of that to suggest."""

    number: int
    name: str
    counts: str
    option: str
    in_bytes: bool = False
    enough: int = 0

    def limit(self, more: str = "") -> Limit | None:
        """None where it is not set."""
        soft, hard = resource.getrlimit(self.number)
        if soft == resource.RLIM_INFINITY:
            return None
        value = _bytes(soft) if self.in_bytes else str(soft)
        wanted = str(max(4 * soft, self.enough)) if self.enough else "unlimited"
        if hard != resource.RLIM_INFINITY and (not self.enough or hard < int(wanted)):
            allowed = f"the hard limit is {_bytes(hard) if self.in_bytes else hard}"
            hint = f"raise it with `ulimit {self.option}` where the ranks are started; {allowed}"
        else:
            hint = f"raise it where the ranks are started: `ulimit {self.option} {wanted}`"
        return Limit(f"{self.name}, {self.counts}, is {value}{more}", hint)


_FILES = _Kind(resource.RLIMIT_NOFILE, "RLIMIT_NOFILE", "the number of open files per process", "-n", enough=1024)
_FILE_SIZE = _Kind(resource.RLIMIT_FSIZE, "RLIMIT_FSIZE", "the size of a file", "-f", in_bytes=True)
_ADDRESSES = _Kind(resource.RLIMIT_AS, "RLIMIT_AS", "the address space per process", "-v", in_bytes=True)
_PROCESSES = _Kind(
    resource.RLIMIT_NPROC, "RLIMIT_NPROC", "the number of threads of all processes of this user", "-u", enough=4096
)


def find(number: int | None) -> Limit | None:
    """The limit behind an error number; None where it is not one of a limit."""
    if number == errno.EMFILE:
        return _FILES.limit()
    if number == errno.ENFILE:
        most = _read(Path("/proc/sys/fs/file-max"))
        return Limit(f"fs.file-max, the number of open files of the system, is {most or 'reached'}", _ASK)
    if number == errno.EFBIG:
        return _FILE_SIZE.limit()
    if number == errno.ENOMEM:
        return _of_memory()
    return None


def is_limit(error: BaseException) -> bool:
    return _behind(error) is not None


def find_in_text(text: str) -> Limit | None:
    """For errors of torch's stores, which have no number."""
    for number in (errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOMEM):
        if os.strerror(number) in text:
            return find(number)
    # Sockets say the same of a receive that took too long, within a longer text.
    return of_threads() if text.startswith(os.strerror(errno.EAGAIN)) else None


def of_threads() -> Limit:
    """Why no thread can be started."""
    for folder in _cgroups():
        most, now = _read(folder / "pids.max"), _read(folder / "pids.current")
        if most.isdigit() and now.isdigit() and int(now) >= int(most):
            return Limit(f"pids.max, the number of threads of the container, is {most} ({folder})", _ASK)
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft != resource.RLIM_INFINITY and _address_space() + _stack() > soft and (limit := _of_memory()):
        return limit
    # It does not bind root.
    if os.geteuid() != 0 and (limit := _PROCESSES.limit()):
        return limit
    most = _read(Path("/proc/sys/kernel/threads-max"))
    return Limit(f"no limit of this process is set; kernel.threads-max is {most or 'unknown'}", _ASK)


def check_size(info: GroupInfo) -> None:
    """Raises where a group has more ranks than the native core knows."""
    if info.size > _native.MAX_RANKS:
        raise GroupError(
            f"expected at most {_native.MAX_RANKS} ranks, got {info.size}",
            group=info.name,
            rank=info.rank,
            hint="divide the ranks into smaller groups",
        )


def check_handles() -> None:
    """Raises OSError where no file can be opened: what is read from /proc would look as if it were not there."""
    os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


@contextlib.contextmanager
def named(info: GroupInfo, step: str) -> Iterator[None]:
    """Errors that come from a limit become GroupError with its name."""
    try:
        yield
    except (OSError, MemoryError) as error:
        limit = _behind(error)
        if limit is None:
            raise
        raise group_error(info, step, error, limit) from error


def group_error(info: GroupInfo, step: str, error: BaseException, limit: Limit) -> GroupError:
    return GroupError(
        f"a limit of the system stopped {step} on {info.describe(info.rank)}: {limit.what}\n  {describe(error)}",
        code="GROUP:LIMIT",
        group=info.name,
        rank=info.rank,
        hint=limit.hint,
    )


def warn(step: str, error: BaseException, consequence: str) -> None:
    """Logs once per process and step that a limit stopped something that is not needed."""
    if step in _said:
        return
    _said.add(step)
    # Python's word for a thread that can't be started is a plain RuntimeError.
    limit = _behind(error) if isinstance(error, OSError | MemoryError) else of_threads()
    what = f"{limit.what}; {limit.hint}" if limit else describe(error)
    logger.warning("%s failed, %s: %s", step, consequence, what)


def describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


_said: set[str] = set()
os.register_at_fork(after_in_child=_said.clear)

_ASK = "ask the administrator of the host or container to raise it, or start fewer processes"


def _behind(error: BaseException) -> Limit | None:
    if isinstance(error, MemoryError):
        return _of_memory()
    return find(error.errno) if isinstance(error, OSError) else None


def _of_memory() -> Limit | None:
    if limit := _ADDRESSES.limit(f", and {_bytes(_address_space())} of it are in use"):
        return limit
    for folder in _cgroups():
        most, now = _read(folder / "memory.max"), _read(folder / "memory.current")
        if most.isdigit() and now.isdigit():
            used = f"{_bytes(int(now))} of it are in use"
            return Limit(f"memory.max, the memory of the container, is {_bytes(int(most))}, and {used}", _ASK)
    return None


def _stack() -> int:
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return threading.stack_size() or (_STACK if soft == resource.RLIM_INFINITY else soft)


def _address_space() -> int:
    pages = _read(Path("/proc/self/statm")).split()
    return int(pages[0]) * resource.getpagesize() if pages else 0


def _cgroups() -> list[Path]:
    """The groups of the system that this process is in, innermost first."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            inner = _CGROUPS / path.strip("/")
            return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(_CGROUPS)]
    return []


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _bytes(number: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 10 * _KIB:
            return f"{number} {unit}"
        number //= _KIB
    return f"{number} GiB"
