"""Calls under way while other things happen: nobody waits, the process forks, waits are cut short, descriptors end."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, run, until, values
from torch.distributed.distributed_c10d import _coalescing_manager

import phalanx
from phalanx import _native


def _nobody_waits(here: Here) -> list[float]:
    """Calls of all lengths end without a wait, and without any other call."""
    here.init()
    sums = []
    for numel in (1, 10_000, 1_000_000):
        tensor = torch.ones(numel)
        work = dist.all_reduce(tensor, async_op=True)
        until(work.is_completed, f"an all_reduce of {numel} elements does not end")
        sums.append(tensor[-1].item())
    return sums


@pytest.mark.parametrize("size", [1, 2])
def test_calls_end_though_nobody_waits(size: int, tmp_path: Path) -> None:
    assert values(_nobody_waits, size, tmp_path) == [[float(size)] * 3] * size


def _crossed_in_threads(here: Here) -> list[float]:
    """A long async call goes on while the thread that made it waits in another group."""
    here.init()
    first, second = dist.new_group(), dist.new_group()
    tensors = [torch.ones(1_000_000), torch.ones(3)]

    def calls() -> None:
        work = dist.all_reduce(tensors[0], group=first, async_op=here.rank == 0)
        dist.all_reduce(tensors[1], group=second)
        if work is not None:
            work.wait()

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    return [tensor[-1].item() for tensor in tensors]


def test_a_long_call_goes_on_behind_a_wait_in_another_group(tmp_path: Path) -> None:
    assert values(_crossed_in_threads, 2, tmp_path) == [[2.0, 2.0]] * 2


def _fork(here: Here) -> tuple[int, float]:
    """A child forked while calls are in flight has none of them, and is told so."""
    here.init()
    tensor = torch.ones(500_000)
    if here.rank == 1:
        assert os.read(os.open(here.folder / "fifo", os.O_RDONLY), 1) == b"x"
        dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(3))
        return 0, tensor[0].item()
    work = dist.all_reduce(tensor, async_op=True)
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda f: f.value()[0].sum())
    child = os.fork()
    if child == 0:
        code = 3
        try:
            work.wait()
        except phalanx.GroupError as error:
            code = 0 if error.code == "GROUP:FORKED" and work.is_completed() else 4
        os._exit(code)
    _, status = os.waitpid(child, 0)
    (here.folder / "fifo").write_text("x")
    work.wait()
    assert future.wait() == 6
    return status, tensor[0].item()


def test_a_forked_child_has_none_of_the_calls_in_flight(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert values(_fork, 2, tmp_path) == [(0, 2.0), (0, 2.0)]


def _interrupted_wait(here: Here) -> float:
    """Ctrl-C in the wait of an async call ends the wait, not the call."""
    here.init()
    tensor = torch.ones(10)
    if here.rank == 1:
        assert os.read(os.open(here.folder / "fifo", os.O_RDONLY), 1) == b"x"
        dist.all_reduce(tensor)
        return tensor[0].item()
    work = dist.all_reduce(tensor, async_op=True)
    here.tell()
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    here.tell()
    work.wait()
    return tensor[0].item()


def test_ctrl_c_ends_the_wait_and_not_the_call(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    world = World(_interrupted_wait, 2, tmp_path)
    world.told(0)
    world.wait_asleep(0)
    world.signal(0, signal.SIGINT)
    world.told(0)
    (tmp_path / "fifo").write_text("x")
    ends = world.ends()
    assert [end.value for end in ends] == [2.0, 2.0], ends[0].trace


def _raise_and_destroy() -> None:
    try:
        raise ValueError("bad \udcff byte")
    finally:
        dist.destroy_process_group()


def _odd_words(here: Here) -> str:
    """An exception whose text is no UTF-8 neither hides itself nor keeps the group open."""
    here.init()
    if here.rank == 1:
        with pytest.raises(ValueError, match="\udcff"):
            _raise_and_destroy()
        return ""
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.barrier()
    return str(caught.value)


def test_last_words_of_any_characters(tmp_path: Path) -> None:
    text, _ = values(_odd_words, 2, tmp_path)
    assert "ValueError: bad \\udcff byte" in text


def _broken_manager(here: Here) -> float:
    """A coalescing manager that ended with an exception does not hold what comes after it."""
    here.init()
    device = torch.device("cpu")
    with pytest.raises(ZeroDivisionError), _coalescing_manager(device=device, async_ops=True):
        dist.broadcast(torch.ones(1 // 0), 0, async_op=True)
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    group = dist.group.WORLD
    assert group is not None
    for _ in range(1000):
        group.broadcast(torch.ones(1), root=0).wait()
    assert len(group._coalesced._works) < 300  # type: ignore[attr-defined]
    tensors = [torch.ones(2), torch.ones(3)]
    with _coalescing_manager(device=device, async_ops=True) as manager:
        for tensor in tensors:
            group.broadcast(tensor * 2, root=0)
    manager.wait()
    return float(len(manager.works))


def test_a_coalescing_manager_that_failed(tmp_path: Path) -> None:
    assert values(_broken_manager, 2, tmp_path) == [1.0, 1.0]


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def _identity(pid: int) -> tuple[int, int]:
    return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_process_is_dead_only_when_it_is() -> None:
    with _sleeper() as process:
        peer = _native.Peer.watch(*_identity(process.pid))
        assert peer is not None
        assert not peer.dead
        process.kill()
        process.wait()
        assert peer.dead
        assert os.WTERMSIG(peer.status) == signal.SIGKILL or peer.status == _native.UNKNOWN_STATUS
    other = _native.Peer.watch(os.getppid(), 1)
    assert other is not None
    assert other.dead  # that process is not the one that was meant


def test_descriptors_that_run_out_are_no_death() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _sleeper() as process:
        identity = _identity(process.pid)
        used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(used)]
        try:
            free = os.open("/dev/null", os.O_RDONLY)
            os.close(free)
            # One more can be opened: the pidfd, and not what tells the start of the process.
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
            peer = _native.Peer.watch(*identity)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        assert peer is None or not peer.dead
        process.kill()


def _pidfds() -> set[int]:
    links = {entry.name: entry for entry in os.scandir("/proc/self/fd")}
    return {
        int(name) for name, entry in links.items() if os.path.lexists(entry.path) and "pidfd" in os.readlink(entry.path)
    }


def test_a_descriptor_that_the_program_closes_is_no_death() -> None:
    with _sleeper() as process:
        before = _pidfds()
        peer = _native.Peer.watch(*_identity(process.pid))
        assert peer is not None
        (ours,) = _pidfds() - before
        os.close(ours)
        assert not peer.dead
        process.kill()
        process.wait()
        assert peer.dead


def _wait_a_second_time(here: Here) -> str:
    """A wait that ran out names who is missing; the call goes on."""
    here.init()
    tensor = torch.ones(5)
    if here.rank == 1:
        assert os.read(os.open(here.folder / "fifo", os.O_RDONLY), 1) == b"x"
        dist.all_reduce(tensor)
        return ""
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(phalanx.CallTimeout) as caught:
        work.wait(timedelta(seconds=0.1))
    (here.folder / "fifo").write_text("x")
    work.wait()
    assert tensor[0] == 2
    return str(caught.value)


def test_a_wait_that_ran_out_names_who_is_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    text, _ = values(_wait_a_second_time, 2, tmp_path)
    assert "gave up waiting after 0.1 s: rank 1 did not come; the call is still under way" in text


def _sums_denormals(here: Here) -> list[float]:
    """A call that another thread carries out treats denormal numbers as its caller does."""
    torch.set_flush_denormal(here.rank == 0)
    here.init()
    sums = []
    for numel in (3, 1_000_000):
        tensor = torch.full((numel,), 1e-310, dtype=torch.float64)
        work = dist.all_reduce(tensor, async_op=True)
        until(work.is_completed, "an all_reduce does not end")
        torch.set_flush_denormal(False)
        sums.append(tensor.view(torch.int64)[0].item())
        torch.set_flush_denormal(here.rank == 0)
    return sums


def test_denormals_in_calls_of_the_progress_thread(tmp_path: Path) -> None:
    expected = torch.tensor(2e-310, dtype=torch.float64).view(torch.int64).item()
    ends = run(_sums_denormals, 2, tmp_path)
    assert ends[0].value[0] == 0
    assert ends[1].value[0] == expected


def _is_asleep(thread: threading.Thread) -> bool:
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _asks_beside_a_waiter(here: Here) -> tuple[str, float]:
    """A thread waits in the lane; another one gives up waiting for a call of the same lane."""
    here.init()
    tensors = [torch.ones(5), torch.ones(5)]
    if here.rank == 1:
        here.hear()
        for tensor in tensors:
            dist.all_reduce(tensor)
        return "", 2.0
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    waiter = threading.Thread(target=works[0].wait)
    waiter.start()
    until(lambda: _is_asleep(waiter), "the thread does not wait")
    with pytest.raises(phalanx.CallTimeout) as caught:
        works[1].wait(timedelta(seconds=0.1))
    here.tell()
    waiter.join()
    works[1].wait()
    return str(caught.value), tensors[1][0].item()


def test_a_wait_names_who_is_missing_while_another_thread_waits(tmp_path: Path) -> None:
    world = World(_asks_beside_a_waiter, 2, tmp_path)
    world.told(0)
    world.tell(1)
    ends = world.ends()
    text, total = ends[0].value
    assert "gave up waiting after 0.1 s: rank 1 did not come; the call is still under way" in text
    assert total == 2.0


class _Waiter:
    """Waits for its call when it is collected, as prefetchers do."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self.myself = self

    def __del__(self) -> None:
        with pytest.raises(phalanx.PhalanxError):
            self.work.wait()


def _collect_in_a_failure(here: Here, makes_garbage: str) -> bool:
    """While a failure is reported, the garbage collector finds another call that failed."""
    here.init()
    if here.rank == 1:
        here.hear()
        return True
    group = dist.group.WORLD
    assert group is not None
    works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(2)]
    if makes_garbage == "waits":
        _Waiter(works.pop())
    else:
        cycle = [works.pop()]
        cycle.append(cycle)
        del cycle
    collected = []

    class CollectingTimer(threading.Timer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            gc.enable()
            collected.append(gc.collect())

    gc.disable()
    threading.Timer = CollectingTimer  # type: ignore[assignment, misc]
    group.abort()
    with pytest.raises(phalanx.Aborted):
        works[0].wait()
    here.tell()
    return any(collected)


@pytest.mark.parametrize("makes_garbage", ["drops", "waits"])
def test_garbage_is_collected_while_a_failure_is_reported(makes_garbage: str, tmp_path: Path) -> None:
    world = World(_collect_in_a_failure, 2, tmp_path, makes_garbage)
    world.told(0)
    world.tell(1)
    assert [end.value for end in world.ends()] == [True, True]
