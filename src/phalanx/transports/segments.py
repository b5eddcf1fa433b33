"""Making the segment of a group: a memfd, or a file in /dev/shm where peers can't reach the memfd through /proc.

Rank 0 makes it and offers it while the context lasts: by then every rank has mapped it or said why it could not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx import _native
from phalanx.transports import limits
from phalanx.transports.hello import Hello, Offer
from phalanx.transports.identities import process_namespace

__all__ = ["Made", "check_path", "made_file", "made_memfd", "ranks_by_seat"]

_SHM_FOLDER = Path("/dev/shm")
_FILE_PREFIX = "phalanx-"

# What rank 0 says of the segment (where it is, or why there is none) and its own mapping. None on other ranks.
Made = tuple[Offer | None, _native.Segment | None]


def ranks_by_seat(size: int) -> list[int]:
    """Which rank gets which seat in the memory of a group. Any order is right; tests replace this one."""
    return list(range(size))


@contextlib.contextmanager
def made_memfd(hellos: Sequence[Hello], nonce: bytes, *, own: bool, only_posts: bool = False) -> Iterator[Made]:
    """`own`: this rank makes the segment. `only_posts`: it is not for the bytes of calls."""
    if not own:
        yield None, None
        return
    try:
        size = len(hellos)
        segment = _native.Segment.create_memfd(size, _tuning(hellos, only_posts), nonce, ranks_by_seat(size))
    except (OSError, RuntimeError) as error:
        if limits.is_limit(error):
            raise
        yield Offer(error=str(error) or type(error).__name__), None
        return
    try:
        yield Offer(f"/proc/{os.getpid()}/fd/{segment.fd}", nonce.hex()), segment
    finally:
        segment.close_fd()


@contextlib.contextmanager
def made_file(hellos: Sequence[Hello], nonce: bytes, *, own: bool, only_posts: bool = False) -> Iterator[Made]:
    """Likewise."""
    if not own:
        yield None, None
        return
    _remove_orphans()
    path = _file_path(nonce.hex())
    try:
        segment = _make_file(path, len(hellos), _tuning(hellos, only_posts), nonce)
    except (OSError, RuntimeError) as error:
        if limits.is_limit(error):
            raise
        yield Offer(error=str(error) or type(error).__name__), None
        return
    try:
        yield Offer(str(path), nonce.hex()), segment
    finally:
        path.unlink(missing_ok=True)


def check_path(offer: Offer, maker: Hello) -> None:
    """Raises OSError where a path can't be that of the maker's segment. The core checks what is there."""
    if not offer.path.startswith("/proc/"):
        if offer.path != str(_file_path(offer.nonce)):
            raise OSError(f"{offer.path} is not where rank 0 would make a segment")
        return
    pid = maker.identity[0]
    # Numbers of processes mean nothing in another container: they may be those of anybody here.
    if maker.processes != process_namespace():
        raise OSError(f"{offer.path} is in another namespace of processes")
    if not offer.path.startswith(f"/proc/{pid}/fd/"):
        raise OSError(f"{offer.path} is not of the process {pid} that rank 0 is")


def _file_path(nonce: str) -> Path:
    return _SHM_FOLDER / f"{_FILE_PREFIX}{nonce}"


def _make_file(path: Path, size: int, tuning: _native.Tuning, nonce: bytes) -> _native.Segment:
    while True:
        segment = _native.Segment.create_file(str(path), size, tuning, nonce, ranks_by_seat(size))
        # Locked until the file is unlinked: another group removes files that nobody has locked, and may have taken
        # this one for an orphan before it was locked.
        fcntl.flock(segment.fd, fcntl.LOCK_EX)
        if os.fstat(segment.fd).st_nlink > 0:
            return segment


def _tuning(hellos: Sequence[Hello], only_posts: bool) -> _native.Tuning:
    cpus = len({cpu for hello in hellos for cpu in hello.cpus})
    quotas = [hello.quota for hello in hellos if hello.quota]
    tuning = _native.tuning_for(len(hellos), min([cpus, *quotas]))
    # All ranks compare at the strictest level that any of them asks for.
    tuning.level = max(hello.level for hello in hellos)
    tuning.only_posts = only_posts
    return tuning


def _remove_orphans() -> None:
    """Unlinks files whose maker was killed between making and unlinking: nobody holds their lock."""
    for path in _SHM_FOLDER.glob(f"{_FILE_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                status = os.fstat(fd)
                # Root could remove those of others, too.
                if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                    continue
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
