"""Which files are opened as segments: the path comes from a store that others may write to."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import _native
from phalanx.transports.hello import Hello, Offer
from phalanx.transports.identities import process_namespace
from phalanx.transports.segments import check_path
from users import ANOTHER, can_be_another, give_away

_NONCE = b"n" * 16
_SIZE = 2
# As large as the header.
_HEADER = 4096
# Where the ranks of the seats are.
_SEATS = 2 * 4096


def _tuning() -> _native.Tuning:
    return _native.tuning_for(_SIZE, 2)


def _open(path: object) -> None:
    _native.Segment.open(str(path), _NONCE, _SIZE)


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a file can be that is opened as a segment."""
    path = Path(f"/dev/shm/phalanx-{os.getpid():032x}")
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)


def _make(path: Path) -> _native.Segment:
    return _native.Segment.create_file(str(path), _SIZE, _tuning(), _NONCE)


def _memfd() -> tuple[_native.Segment, str]:
    segment = _native.Segment.create_memfd(_SIZE, _tuning(), _NONCE)
    return segment, f"/proc/{os.getpid()}/fd/{segment.fd}"


def test_both_kinds_are_opened(path: Path) -> None:
    made = _make(path)
    _open(path)
    memfd, link = _memfd()
    _open(link)
    del made, memfd


def _as_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _as_directory(path: Path) -> None:
    path.mkdir(mode=0o700)


def _as_link(path: Path) -> None:
    other = path.with_name(f"phalanx-{'0' * 32}")
    other.unlink(missing_ok=True)
    _make(other)
    path.symlink_to(other)


def _open_to_others(path: Path) -> None:
    _make(path)
    path.chmod(0o666)


def _open_to_group(path: Path) -> None:
    _make(path)
    path.chmod(0o640)


def _too_small(path: Path) -> None:
    _make(path)
    os.truncate(path, path.stat().st_size - _HEADER)


def _too_large(path: Path) -> None:
    _make(path)
    os.truncate(path, path.stat().st_size + _HEADER)


def _empty(path: Path) -> None:
    path.touch(0o600)


def _without_space(path: Path) -> None:
    _make(path)
    header, size = path.read_bytes()[:_HEADER], path.stat().st_size
    os.truncate(path, 0)
    path.write_bytes(header)
    os.truncate(path, size)


def _of_another_user(path: Path) -> None:
    _make(path)
    give_away(path)


_PLANTED: dict[Callable[[Path], None], str] = {
    _as_fifo: "it is not a regular file",
    _as_directory: "it is not a regular file",
    _as_link: "it is not a regular file",
    _open_to_others: "is open to other users",
    _open_to_group: "is open to other users",
    _too_small: "has the wrong size for a segment",
    _too_large: "has the wrong size for a segment",
    _empty: "is not the segment of this group",
    _without_space: "has no space reserved",
}
if can_be_another():
    _PLANTED[_of_another_user] = f"belongs to user {ANOTHER}, this process runs as user 0"


@pytest.mark.parametrize("plant", _PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_file_is_refused(plant: Callable[[Path], None], path: Path) -> None:
    plant(path)
    try:
        with pytest.raises(RuntimeError, match=_PLANTED[plant]):
            _open(path)
    finally:
        Path(f"/dev/shm/phalanx-{'0' * 32}").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "path",
    [
        "/dev/null",
        __file__,
        "",
        "/dev/shm/phalanx-",
        "/dev/shm/phalanx-xyz",
        "/dev/shm/phalanx-ab/../x",
        "/proc/self/fd/1",
        "/proc/1/fd/../mem",
        "/proc/1/fd/",
        "/proc//fd/1",
        "/proc/1/fd/1/x",
    ],
)
def test_a_path_of_another_shape_is_refused(path: str) -> None:
    with pytest.raises(RuntimeError, match="is not where segments are"):
        _open(path)


def _copied(memfd: _native.Segment, flags: int) -> int:
    copy = os.memfd_create("copy", flags | os.MFD_CLOEXEC)
    os.fchmod(copy, 0o600)
    os.truncate(copy, os.fstat(memfd.fd).st_size)
    os.pwrite(copy, os.pread(memfd.fd, _HEADER, 0), 0)
    return copy


@pytest.mark.parametrize("flags", [0, os.MFD_ALLOW_SEALING], ids=["never", "not yet"])
def test_a_memfd_that_can_shrink_is_refused(flags: int) -> None:
    memfd, _ = _memfd()
    copy = _copied(memfd, flags)
    with pytest.raises(RuntimeError, match="could be truncated: it is not sealed"):
        _open(f"/proc/{os.getpid()}/fd/{copy}")
    os.close(copy)


def test_a_memfd_that_is_open_to_others_is_refused() -> None:
    memfd, link = _memfd()
    os.fchmod(memfd.fd, 0o606)
    with pytest.raises(RuntimeError, match="is open to other users"):
        _open(link)


def test_a_pipe_behind_a_number_is_refused() -> None:
    ours, theirs = os.pipe()
    with pytest.raises(RuntimeError, match="it is not a regular file"):
        _open(f"/proc/{os.getpid()}/fd/{ours}")
    os.close(ours)
    os.close(theirs)


def test_a_segment_of_a_larger_group_is_refused() -> None:
    _, link = held = _memfd()
    with pytest.raises(RuntimeError, match="has a header that does not fit this group"):
        _native.Segment.open(link, _NONCE, _SIZE + 1)
    del held


def test_seats_are_those_of_the_one_who_made_the_segment(path: Path) -> None:
    ranks = [2, 0, 3, 1]
    memfd = _native.Segment.create_memfd(4, _native.tuning_for(4, 2), _NONCE, ranks)
    file = _native.Segment.create_file(str(path), 4, _native.tuning_for(4, 2), _NONCE, ranks)
    for made, where in ((memfd, f"/proc/{os.getpid()}/fd/{memfd.fd}"), (file, str(path))):
        assert made.ranks == ranks
        assert _native.Segment.open(where, _NONCE, 4).ranks == ranks
        # What anybody writes there later has no effect.
        opened = _native.Segment.open(where, _NONCE, 4)
        os.pwrite(made.fd, b"\xff" * 16, _SEATS)
        assert made.ranks == opened.ranks == ranks


def test_without_a_choice_each_rank_has_the_seat_of_its_number() -> None:
    memfd, link = _memfd()
    assert memfd.ranks == [0, 1]
    assert os.pread(memfd.fd, 8, _SEATS) == struct.pack("ii", 0, 1)
    _open(link)


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], [0, 0], [1, 2], [-1, 0]], ids=str)
def test_a_choice_without_a_seat_for_every_rank_is_refused(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="expected each rank in one seat"):
        _native.Segment.create_memfd(_SIZE, _tuning(), _NONCE, ranks)


@pytest.mark.parametrize("ranks", [(0, 0), (1, 1), (1, 2), (-1, 0), (2**31 - 1, 0), (0, -(2**31))], ids=str)
def test_a_table_without_a_seat_for_every_rank_is_refused(ranks: tuple[int, int]) -> None:
    memfd, link = _memfd()
    os.pwrite(memfd.fd, struct.pack("ii", *ranks), _SEATS)
    with pytest.raises(RuntimeError, match="has no seat for every rank of this group"):
        _open(link)


@given(st.lists(st.tuples(st.integers(0, 127), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
@settings(deadline=None)
def test_a_header_of_any_bytes_is_refused_or_fits(changes: list[tuple[int, bytes]]) -> None:
    memfd, link = _memfd()
    for offset, value in changes:
        os.pwrite(memfd.fd, value, offset)
    # No other error, no crash, and no more memory than the file has.
    with contextlib.suppress(RuntimeError):
        _open(link)


def _hello(pid: int, processes: str) -> Hello:
    return Hello("host", [0], 0, (pid, 1, 1), processes, 1, "")


def test_a_path_must_be_of_the_process_that_said_hello() -> None:
    nonce = "a" * 32
    here = process_namespace()
    check_path(Offer("/proc/7/fd/3", nonce), _hello(7, here))
    check_path(Offer(f"/dev/shm/phalanx-{nonce}", nonce), _hello(7, "elsewhere"))
    for path, hello, why in (
        ("/proc/8/fd/3", _hello(7, here), "is not of the process 7 that rank 0 is"),
        ("/proc/7/fd/3", _hello(7, "elsewhere"), "is in another namespace of processes"),
        (f"/dev/shm/phalanx-{'b' * 32}", _hello(7, here), "is not where rank 0 would make a segment"),
    ):
        with pytest.raises(OSError, match=why):
            check_path(Offer(path, nonce), hello)
