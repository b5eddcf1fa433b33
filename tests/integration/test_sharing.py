"""How ranks come to share memory, and what they are told where they can't."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from namespaces import Forked, hide_mounts, mount_shm, need_namespaces
from ranks import Here, check_no_files_left, run, shared_files, values

from phalanx import _native
from phalanx.transports import segments
from phalanx.transports.hello import Hello, Offer
from users import can_be_another, give_away


def _sum(store: Path, rank: int, size: int) -> str:
    """A sum over all ranks, or the error."""
    warnings.simplefilter("error")
    timeout = timedelta(seconds=30)
    try:
        dist.init_process_group("phalanx", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        tensor = torch.ones(1_000_000)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
    except dist.DistBackendError as error:
        return str(error)
    return f"sum {tensor.sum().item()}"


def refuse(prefixes: tuple[str, ...], ranks: tuple[int, ...], here: Here) -> None:
    """Makes opening of segments under these prefixes fail on these ranks, as in a container of their own."""
    opened: Callable[[str, bytes, int], _native.Segment] = _native.Segment.open

    class Refusing:
        create_memfd = _native.Segment.create_memfd
        create_file = _native.Segment.create_file

        @staticmethod
        def open(path: str, nonce: bytes, size: int) -> _native.Segment:
            if here.rank in ranks and path.startswith(prefixes):
                raise OSError(13, "Permission denied", path)
            return opened(path, nonce, size)

    _native.Segment = Refusing  # type: ignore[misc, assignment]


def _fall_back(here: Here) -> float:
    refuse(("/proc",), (1,), here)
    here.init()
    tensor = torch.full((1_000_000,), float(here.rank))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.mean().item()


def test_where_proc_is_hidden_a_file_serves(tmp_path: Path) -> None:
    before = shared_files()
    assert values(_fall_back, 3, tmp_path) == [3.0] * 3
    check_no_files_left(before)


def _cannot_share(here: Here) -> None:
    refuse(("/proc", "/dev/shm"), (1, 2), here)
    here.init()


def test_ranks_that_cannot_share_are_told_so(tmp_path: Path) -> None:
    before = shared_files()
    for end in run(_cannot_share, 3, tmp_path):
        assert (end.error, end.code) == ("GroupError", "GROUP:NOT_SHARED")
        assert "the ranks do not share memory" in end.text
        assert "  rank 1 (host " in end.text
        assert "  rank 2 (host " in end.text
        assert "  rank 0 (host " not in end.text
        assert "Next: start all ranks in one container" in end.text
    check_no_files_left(before)


def test_a_file_whose_maker_was_killed_is_removed_by_the_next_group(tmp_path: Path) -> None:
    orphan = Path(f"/dev/shm/phalanx-orphan-{os.getpid()}")
    orphan.write_bytes(b"x")
    try:
        values(_fall_back, 2, tmp_path)
        assert not orphan.exists()
    finally:
        orphan.unlink(missing_ok=True)


def _own_container(here: Here, own_shm: bool) -> list[str]:
    """Rank 1 sees no process of others in /proc; with `own_shm` it also has its own /dev/shm."""

    def be_rank_1() -> str:
        if own_shm:
            mount_shm("64m")
        return _sum(here.folder / "store", 1, 2)

    other = Forked(be_rank_1, own_processes=True)
    return [_sum(here.folder / "store", 0, 2), other.result()]


def test_processes_in_containers_of_their_own_are_told_so(tmp_path: Path) -> None:
    need_namespaces()
    for text in values(_own_container, 1, tmp_path, True)[0]:
        assert text.startswith("[GROUP:NOT_SHARED]"), text
        assert "rank 1 (host " in text


def test_containers_that_share_dev_shm_fall_back_to_it(tmp_path: Path) -> None:
    need_namespaces()
    assert values(_own_container, 1, tmp_path, False) == [["sum 2000000.0"] * 2]


def _small_shm(here: Here, size: str) -> tuple[list[str], list[str]]:
    hide_mounts()
    mount_shm(size)
    ranks = [
        Forked(functools.partial(_sum, here.folder / "store", rank, 4), own_processes=rank >= 2) for rank in range(4)
    ]
    return [rank.result() for rank in ranks], os.listdir("/dev/shm")


@pytest.mark.parametrize("size", ["64m", "2m"])
def test_a_small_dev_shm_is_enough(size: str, tmp_path: Path) -> None:
    """Four ranks in one mount namespace with a tiny /dev/shm, half of them unable to see the others in /proc."""
    need_namespaces()
    assert values(_small_shm, 1, tmp_path, size) == [(["sum 4000000.0"] * 4, [])]


def _full_shm(here: Here) -> tuple[str, list[str]]:
    hide_mounts()
    mount_shm("32k")
    with pytest.raises(RuntimeError) as caught:
        _native.Segment.create_file("/dev/shm/x", 4, _native.tuning_for(4, 2), bytes(16))
    return str(caught.value), os.listdir("/dev/shm")


def test_a_full_dev_shm_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    need_namespaces()
    [(message, left)] = values(_full_shm, 1, tmp_path)
    assert message.endswith("bytes in /dev/shm/x: No space left on device")
    assert left == []


def _offer_planted(here: Here) -> tuple[float, bool]:
    """Rank 0 stands for whoever writes to the store: it offers a file that others can write."""
    nonce = os.urandom(16)
    path = Path(f"/dev/shm/phalanx-{nonce.hex()}")
    if here.rank == 0:
        _native.Segment.create_file(str(path), 2, _native.tuning_for(2, 2), nonce)
        path.chmod(0o666)
        # No orphan, which would be removed.
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
        if can_be_another():
            give_away(path)

        @contextlib.contextmanager
        def offer(hellos: Sequence[Hello], _: bytes, **options: bool) -> Iterator[segments.Made]:
            with made(hellos, _, **options) as (_offer, segment):
                yield Offer(str(path), nonce.hex()), segment

        made = segments.made_memfd
        segments.made_memfd = offer  # type: ignore[assignment]
    before = path.read_bytes() if here.rank == 0 else b""
    try:
        here.init()
        tensor = torch.full((100_000,), 1.5)
        dist.all_reduce(tensor)
        return tensor.mean().item(), here.rank != 0 or path.read_bytes() == before
    finally:
        path.unlink(missing_ok=True)


def test_payload_does_not_go_to_a_file_that_others_can_write(tmp_path: Path) -> None:
    assert values(_offer_planted, 2, tmp_path) == [(3.0, True)] * 2
