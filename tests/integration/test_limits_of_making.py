"""Limits of the system that are hit while a group is made: all ranks hear which one, its value, and on which rank."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import End, Here, World
from system_limits import MIB, address_space, fill_handles, set_limit

import phalanx
from phalanx import ProcessGroup, _native  # loaded before there are limits
from phalanx.transports.threads.hub import Hub
from phalanx.types import GroupInfo

LIMITS: dict[str, tuple[str, Callable[[], None]]] = {
    "RLIMIT_FSIZE": (
        r"RLIMIT_FSIZE, the size of a file, is 1024 KiB",
        lambda: set_limit(resource.RLIMIT_FSIZE, MIB),
    ),
    "RLIMIT_AS": (
        r"RLIMIT_AS, the address space per process, is \d+ [MG]iB, and \d+ [MG]iB of it are in use",
        lambda: set_limit(resource.RLIMIT_AS, address_space() + MIB),
    ),
    "RLIMIT_NOFILE": (
        r"RLIMIT_NOFILE, the number of open files per process, is 256",
        lambda: fill_handles(1),
    ),
}


def _store(here: Here) -> dist.Store:
    """Over connections that are there before limits are: a FileStore opens its file for every question."""
    port = here.store("port")
    if here.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(port.get("port")), is_master=False)
    store.set(f"connected {here.rank}", "")
    store.wait([f"connected {rank}" for rank in range(here.size)])
    return store


def _make_group(here: Here, limited: int, name: str) -> None:
    store = _store(here)
    if here.rank == limited:
        LIMITS[name][1]()
    try:
        ProcessGroup(store, here.rank, here.size, name="pair")
    finally:
        # The server stays until the other rank is through.
        set_limit(resource.RLIMIT_AS, -1)
        here.tell()
        here.hear()


@pytest.mark.parametrize(
    ("name", "limited"),
    # Only rank 0 makes a file.
    [("RLIMIT_FSIZE", 0), ("RLIMIT_AS", 0), ("RLIMIT_AS", 1), ("RLIMIT_NOFILE", 0), ("RLIMIT_NOFILE", 1)],
)
def test_making_a_group(tmp_path: Path, name: str, limited: int) -> None:
    world = World(_make_group, 2, tmp_path, limited, name)
    world.all_told(0, 1)
    world.tell_all(0, 1)
    for end in world.ends():
        _is_named(end, LIMITS[name][0])


def _make_hub(here: Here, has_segment: bool) -> None:
    """The first rank of a group of threads makes what they share: a segment, and words of each rank besides."""
    scheduler: Any = None
    room = MIB
    if has_segment:
        before = address_space()
        tuning = _native.tuning_for(_native.MAX_RANKS, 1)
        tuning.only_posts = True
        segment = _native.Segment.create_private(_native.MAX_RANKS, tuning)
        room += address_space() - before
        del segment
    set_limit(resource.RLIMIT_AS, address_space() + room)
    with pytest.raises(phalanx.GroupError) as caught:
        Hub(GroupInfo("threads", 0, _native.MAX_RANKS), scheduler, lambda *_: None)
    set_limit(resource.RLIMIT_AS, -1)
    assert isinstance(caught.value.__cause__, MemoryError if has_segment else OSError)
    raise caught.value


@pytest.mark.parametrize("has_segment", [False, True])
def test_making_a_group_of_threads(has_segment: bool, tmp_path: Path) -> None:
    (end,) = World(_make_hub, 1, tmp_path, has_segment).ends()
    _is_named(end, LIMITS["RLIMIT_AS"][0])


def _is_named(end: End, what: str) -> None:
    assert (end.error, end.code) == ("GroupError", "GROUP:LIMIT"), end.text
    assert re.search(what, end.text), end.text
    assert re.search(r"Next: raise it (where the ranks are started: `ulimit|with `ulimit)", end.text), end.text
    assert "share memory" not in end.text
    assert "hosts the store" not in end.text


def _make_group_with_few_handles(here: Here, free: int) -> str:
    store = _store(here)
    if here.rank == 1:
        fill_handles(free)
    made = ""
    try:
        group = ProcessGroup(store, here.rank, here.size, name="pair")
        group.allreduce(torch.ones(1)).wait()
    except phalanx.GroupError as error:
        made = str(error)
    here.tell()
    here.hear()
    return made


def test_every_step_of_making_a_group_may_lack_a_handle(tmp_path: Path) -> None:
    """The group is made on both ranks or on none."""
    seen = set()
    for free in range(5):
        (tmp_path / str(free)).mkdir()
        world = World(_make_group_with_few_handles, 2, tmp_path / str(free), free)
        world.all_told(0, 1)
        world.tell_all(0, 1)
        texts = [end.value for end in world.ends()]
        what = r"^\[GROUP:LIMIT\] .*: RLIMIT_NOFILE, the number of open files per process, is 256"
        assert texts == ["", ""] or all(re.search(what, text) for text in texts), texts
        seen.add(bool(texts[0]))
    assert seen == {True, False}


def _file_store_without_handles(here: Here) -> None:
    store = here.store()
    fill_handles(0)
    ProcessGroup(store, here.rank, here.size, name="pair")


def test_a_store_that_can_t_open_its_file(tmp_path: Path) -> None:
    for end in World(_file_store_without_handles, 1, tmp_path).ends():
        _is_named(end, LIMITS["RLIMIT_NOFILE"][0])
