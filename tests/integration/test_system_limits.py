"""Limits of the system, hit at every step: errors name the limit and its value, and what is optional is left out."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import resource
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Here, values
from system_limits import MIB, address_space, fill_handles, limited, set_limit

import phalanx
from default_group import default_group
from phalanx import _native
from phalanx.transports import failures, limits
from phalanx.types import GroupInfo
from users import ANOTHER, can_be_another, can_limit_threads

# Of prctl and capset.
_SET_DUMPABLE, _KEEP_CAPABILITIES = 4, 8
_CAPABILITIES_VERSION = 0x20080522
_READ_ALL_FILES = 1 << 2


# What is optional.


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("phalanx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _box_too_large(here: Here) -> tuple[list[str], float]:
    os.environ["PHALANX_BLACK_BOX"] = "4000000"  # half a GiB
    lines = _Lines().lines
    set_limit(resource.RLIMIT_FSIZE, 256 * MIB)
    here.init()
    tensor = torch.ones(1)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.new_group()
    return lines, tensor.item()


def test_a_black_box_that_may_not_be_a_file(tmp_path: Path) -> None:
    for lines, value in values(_box_too_large, 2, tmp_path):
        (line,) = lines
        assert line.startswith(
            "making the black box failed, it is in memory, or missing: RLIMIT_FSIZE, the size of a file"
        )
        assert value == 8.0


def _box_without_memory(here: Here) -> tuple[list[str], float]:
    here.init()
    os.environ["PHALANX_BLACK_BOX"] = "4000000"
    from phalanx.debug import own_box

    own_box._holder.own = own_box.OwnBox()
    lines = _Lines().lines
    with limited(resource.RLIMIT_AS, address_space() + 200 * MIB):
        dist.new_group()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
    return lines, tensor.item()


def test_a_black_box_that_has_no_memory(tmp_path: Path) -> None:
    for lines, value in values(_box_without_memory, 2, tmp_path):
        (line,) = lines
        assert re.match(r"making the black box failed, .*: RLIMIT_AS, the address space per process, is", line)
        assert value == 2.0


def _report_without_handles(here: Here) -> tuple[list[str], str]:
    here.init()
    lines = _Lines().lines
    if here.rank == 1:
        default_group().abort()
        return [], ""
    fill_handles(0)
    with pytest.raises(phalanx.PhalanxError) as caught:
        dist.all_reduce(torch.ones(1))
    return lines, type(caught.value).__name__


def test_a_report_that_can_t_be_written(tmp_path: Path) -> None:
    (lines, name), _ = values(_report_without_handles, 2, tmp_path)
    assert name == "Aborted"
    (line,) = lines
    assert re.match(r"writing rank0-1\.txt to .* failed, it is missing there: RLIMIT_NOFILE, .* is 256; raise it", line)


def _dump_too_large(here: Here) -> str:
    here.init()
    dist.all_reduce(torch.ones(1))
    with limited(resource.RLIMIT_FSIZE, 100), pytest.raises(OSError, match="RLIMIT_FSIZE") as caught:
        phalanx.dump(here.folder / "trace")
    return str(caught.value)


def test_a_dump_that_is_too_large(tmp_path: Path) -> None:
    (text,) = values(_dump_too_large, 1, tmp_path)
    assert "File too large: RLIMIT_FSIZE, the size of a file, is 100 bytes; raise it" in text
    assert [path.name for path in tmp_path.iterdir() if "trace" in path.name or path.name.endswith(".tmp")] == []


def _not_as_root() -> None:
    """The number of threads is not limited for root."""
    if not can_be_another():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setresuid(ANOTHER, ANOTHER, ANOTHER)
    # The user may have no access to the clone, from which modules are still to be imported.
    kept = (ctypes.c_uint32 * 6)(_READ_ALL_FILES, _READ_ALL_FILES)
    assert libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), kept) == 0, os.strerror(ctypes.get_errno())
    # A process that changes its user shows nothing of itself in /proc any more.
    libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)


def _without_threads() -> None:
    """No thread can be started from now on."""
    set_limit(resource.RLIMIT_NPROC, 1)
    with pytest.raises(RuntimeError):
        threading.Thread(target=lambda: None).start()


def _first_calls_without_threads(here: Here, folder: str, where: str) -> tuple[list[str], list[float]]:
    os.environ["PHALANX_FOLDER"] = f"{folder}/jobs{here.rank}"
    lines = _Lines().lines
    _not_as_root()
    if where == "making":
        _without_threads()
    dist.init_process_group("phalanx", store=dist.FileStore(f"{folder}/store", 2), rank=here.rank, world_size=2)
    group = dist.new_group()
    if where == "calls":
        _without_threads()
    got = []
    # An async call, one whose Work is dropped, messages, and a future.
    tensor, dropped = torch.ones(300_000), torch.ones(300_000)
    work = dist.all_reduce(tensor, async_op=True, group=group)
    dist.all_reduce(dropped, async_op=True, group=group)
    work.wait()
    dist.barrier(group)
    got += [tensor[0].item(), dropped[0].item()]
    received = torch.zeros(300_000)
    receive = dist.irecv(received, 1 - here.rank)
    assert receive is not None
    with pytest.raises(phalanx.GroupError) as caught:
        receive.get_future()
    lines.append(str(caught.value))
    dist.send(torch.ones(300_000), 1 - here.rank)
    receive.wait()
    # The call has ended: its future needs no thread.
    receive.get_future().wait()
    got.append(received[0].item())
    return lines, got


@pytest.fixture
def open_folder() -> Iterator[str]:
    """That other users can write to."""
    folder = tempfile.mkdtemp(prefix="phalanx-limits-")
    os.chmod(folder, 0o777)
    yield folder
    shutil.rmtree(folder)


_needs_a_limit = pytest.mark.skipif(not can_limit_threads(), reason="this user's threads can't be limited")


@_needs_a_limit
@pytest.mark.parametrize("where", ["making", "calls"])
def test_no_more_threads(tmp_path: Path, open_folder: str, where: str) -> None:
    for lines, got in values(_first_calls_without_threads, 2, tmp_path, open_folder, where):
        assert got == [2.0, 2.0, 1.0]
        what = "RLIMIT_NPROC, the number of threads of all processes of this user, is 1"
        assert all(what in line for line in lines), lines
        steps = [line.partition(" failed, ")[0] for line in lines[:-1]]
        optional = ["the progress thread", "the thread that completes futures"]
        optional += ["the thread that answers peers"] * (where == "making")
        assert sorted(steps) == sorted(f"starting {thread}" for thread in optional)
        assert "[GROUP:LIMIT] group 'default_pg'" in lines[-1]
        assert "a limit of the system stopped the thread that completes the future of recv on rank" in lines[-1]


def _ddp_without_threads(here: Here, folder: str) -> tuple[list[str], bool]:
    os.environ["PHALANX_FOLDER"] = f"{folder}/jobs{here.rank}"
    _not_as_root()
    dist.init_process_group("phalanx", store=dist.FileStore(f"{folder}/store", 2), rank=here.rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 300))
    torch.ones(1, requires_grad=True).sum().backward()  # torch's own threads
    lines = _Lines().lines
    _without_threads()
    for _ in range(3):
        model(torch.ones(4, 1000) * (here.rank + 1)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return lines, bool((gradient == gradient[0, 0]).all())


@_needs_a_limit
def test_training_without_more_threads(tmp_path: Path, open_folder: str) -> None:
    for lines, is_right in values(_ddp_without_threads, 2, tmp_path, open_folder):
        assert is_right
        assert len(lines) == len({line.partition(" failed, ")[0] for line in lines})


# Names and values.


@pytest.mark.parametrize(
    ("kind", "number", "what", "hint"),
    [
        (resource.RLIMIT_NOFILE, 24, "RLIMIT_NOFILE, the number of open files per process, is 300", "`ulimit -n 1200`"),
        (resource.RLIMIT_FSIZE, 27, "RLIMIT_FSIZE, the size of a file, is 300 bytes", "`ulimit -f"),
        (resource.RLIMIT_FSIZE, 12, None, None),
        (resource.RLIMIT_FSIZE, 13, None, None),
    ],
)
def test_which_limit_an_error_number_means(kind: int, number: int, what: str | None, hint: str | None) -> None:
    with limited(kind, 300):
        found = limits.find(number)
    if what is None:
        assert found is None or "memory.max" in found.what
    else:
        assert found is not None
        assert found.what == what
        assert hint is not None
        assert hint in found.hint


def test_a_limit_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    for name, value in {
        "memory.max": "max",
        "inner/memory.max": "3221225472",
        "inner/memory.current": "1073741824",
    }.items():
        (tmp_path / name).write_text(value)
    (tmp_path / "pids.max").write_text("20")
    (tmp_path / "pids.current").write_text("20")
    monkeypatch.setattr(limits, "_cgroups", lambda: [tmp_path / "inner", tmp_path])
    found = limits.find(12)
    assert found is not None
    assert found.what == "memory.max, the memory of the container, is 3072 MiB, and 1024 MiB of it are in use"
    assert limits.of_threads().what == f"pids.max, the number of threads of the container, is 20 ({tmp_path})"


def test_a_channel_that_gets_no_room() -> None:
    info = GroupInfo("pair", 0, 2)
    with limited(resource.RLIMIT_FSIZE, 300):
        text = str(failures.explain(None, info, "send", _native.NO_SPACE))
    assert "[GROUP:NO_SPACE] send, group 'pair', rank 0: there is no memory left in /dev/shm" in text
    assert "may not have so large a file: RLIMIT_FSIZE, the size of a file, is 300 bytes" in text
    assert "RLIMIT_FSIZE" not in str(failures.explain(None, info, "send", _native.NO_SPACE))


def test_a_thread_whose_stack_has_no_room() -> None:
    with limited(resource.RLIMIT_AS, address_space() + MIB):
        assert limits.of_threads().what.startswith("RLIMIT_AS, the address space per process, is ")
