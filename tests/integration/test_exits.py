"""abort(), the end of groups and of the interpreter while calls are under way, waits that end before their call, and
calls that are refused."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, check_no_files_left, shared_files, until, values

import phalanx
from phalanx.debug.own_box import own_box

_LARGE = 4_000_000  # elements; far more than fits into a channel


def _done(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


# Each waits for rank 2, which does not come.
_WAITS: dict[str, Callable[[Any], object]] = {
    "sync": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "async": lambda group: _done(dist.all_reduce(torch.ones(3), group=group, async_op=True)).wait(),
    "large": lambda group: _done(dist.all_reduce(torch.ones(_LARGE), group=group, async_op=True)).wait(),
    "recv": lambda group: dist.recv(torch.ones(3), 2, group=group),
    "any source": lambda group: dist.recv(torch.ones(3), group=group),
    "send": lambda group: dist.send(torch.ones(_LARGE), 2, group=group),
    "future": lambda group: _done(dist.irecv(torch.ones(3), 2, group=group)).get_future().wait(),
}


def _abort(here: Here, wait: str) -> list[str]:
    here.init()
    group = dist.new_group(list(range(here.size)), group_desc="trio")
    other = dist.new_group(list(range(here.size)))
    dist.barrier(group=group)
    here.tell()
    texts = []
    if here.rank == 2:
        here.hear()
        group.abort()
    else:
        with pytest.raises(RuntimeError) as caught:
            _WAITS[wait](group)
        texts.append(f"{type(caught.value).__name__} {caught.value}")
    # Use after abort, on all ranks alike.
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(1), group=group),
        lambda: dist.all_reduce(torch.ones(1), group=group, async_op=True),
        lambda: dist.isend(torch.ones(1), (here.rank + 1) % here.size, group=group),
        lambda: dist.irecv(torch.ones(1), group=group),
    ]
    for call in calls:
        with pytest.raises(phalanx.Aborted, match="the group is broken: ") as again:
            call()
        texts.append(str(again.value))
    group.abort()
    total = torch.ones(1)
    dist.all_reduce(total, group=other)
    dist.all_reduce(total)
    assert total.item() == 9
    dist.destroy_process_group(group)
    dist.all_reduce(total, group=other)
    dist.destroy_process_group()
    group.abort()
    return texts


@pytest.mark.parametrize("wait", _WAITS)
def test_abort_ends_all_waits_of_the_group_only(wait: str, tmp_path: Path) -> None:
    world = World(_abort, 3, tmp_path, wait)
    world.all_told(0, 1, 2)
    for rank in (0, 1):
        world.wait_asleep(rank)
    world.tell(2)
    ends = world.ends()
    for rank, end in enumerate(ends):
        assert end.error is None, end.trace
        assert end.exitcode == 0
        who = "this rank" if rank == 2 else "rank 2"
        if rank < 2:
            first = end.value.pop(0)
            assert first.startswith("Aborted [ABORTED] " if wait != "future" else "RuntimeError ")
            assert f"group 'trio', rank {rank}: {who} aborted the group: abort() was called\n" in first
        for text in end.value:
            assert f"group 'trio', rank {rank}: the group is broken: {who} aborted the group: abort() was" in text


def _abort_the_broken(here: Here) -> str:
    """What a death did not end, abort does."""
    here.init()
    dist.barrier()
    if here.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = _done(dist.irecv(torch.ones(3), 1 - here.rank))
    with pytest.raises(phalanx.PeerLost):
        dist.barrier()
    assert not work.is_completed()
    here.tell()
    if here.rank == 0:
        here.hear()
        group = dist.group.WORLD
        assert group is not None
        group.abort()
    with pytest.raises(phalanx.PhalanxError) as caught:
        work.wait()
    dist.destroy_process_group()
    return str(caught.value)


def test_abort_ends_the_waits_of_a_group_that_a_death_has_broken(tmp_path: Path) -> None:
    world = World(_abort_the_broken, 3, tmp_path)
    world.all_told(0, 1)
    world.tell(0)
    for end in world.ends()[:2]:
        assert end.error is None, end.trace
        # It has one failure, the first.
        assert "rank 2 died (" in end.value


def _holdings() -> tuple[set[str], set[str], list[str]]:
    """Threads, file descriptors, and segments and black boxes of this process."""
    gc.collect()
    threads = {f"{task} {_text(f'/proc/self/task/{task}/comm')}" for task in os.listdir("/proc/self/task")}
    fds = set()
    for fd in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{fd}"):
            fds.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    maps = [line for line in _text("/proc/self/maps").splitlines() if "phalanx" in line or line.endswith(".box")]
    return threads, fds, [line for line in maps if ".so" not in line]


def _text(path: str) -> str:
    try:
        return Path(path).read_text().rstrip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _children() -> str:
    return _text(f"/proc/self/task/{os.getpid()}/children")


def _leave_much(here: Here) -> list[Any]:
    """Starts what rank 1 will not take part in: works that are kept, works that are dropped, chains of futures."""
    kept: list[Any] = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(5)]
    dist.all_reduce(torch.ones(_LARGE), async_op=True)
    dist.irecv(torch.ones(5), 1)
    dist.isend(torch.ones(_LARGE), 1)
    kept.append(dist.isend(torch.ones(_LARGE), 1))
    futures = [_done(dist.irecv(torch.ones(3), 1)).get_future() for _ in range(50)]
    kept += [future.then(lambda done: done.value()[0] + 1) for future in futures]
    _done(dist.all_reduce(torch.ones(3), async_op=True)).get_future().then(lambda future: future.value())
    return kept


def _receive(group: Any) -> None:
    group.recv(torch.ones(3), 1).wait()


def _destroy(here: Here) -> tuple[list[str], Path]:
    before = _holdings()
    here.init()
    dist.all_reduce(torch.ones(1))
    folder, box = own_box().folder, own_box().path
    assert folder is not None
    here.tell()
    here.hear()
    errors: list[str] = []
    kept = []
    if here.rank == 0:
        group = dist.group.WORLD

        def blocked(call: Callable[[], object]) -> None:
            try:
                call()
            except phalanx.GroupError as error:
                errors.append(str(error))

        kept = _leave_much(here)
        calls = (dist.barrier, functools.partial(_receive, group), kept[0].wait)
        threads = [threading.Thread(target=blocked, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        while group._get_sequence_number_for_group() < 9:  # type: ignore[union-attr]
            os.sched_yield()
        dist.destroy_process_group()
        for thread in threads:
            thread.join()
        assert len(errors) == 3
        with pytest.raises(phalanx.GroupError) as caught:
            kept[1].wait()
        errors.append(str(caught.value))
        assert all(future.done() for future in kept[6:])
        del caught, threads, calls, group
    else:
        dist.destroy_process_group()
    del kept
    # Python's join returns when a thread has run its last Python code; the kernel may still list it.
    until(lambda: not _holdings()[0] - before[0], "threads are left")
    after = _holdings()
    # The black box belongs to the process until its end, whether its file still has a name or not.
    assert not after[1] - before[1]
    assert [box in line for line in after[2]] == [True]
    wrong = [text for text in errors if "the group was destroyed on this rank" not in text]
    return wrong + ([_children()] if _children() else []), folder


def test_a_group_is_destroyed_while_calls_are_under_way(tmp_path: Path) -> None:
    before = shared_files()
    world = World(_destroy, 2, tmp_path)
    world.all_told(0, 1)
    world.tell(0)
    world.processes[0].join(30)
    world.tell(1)
    for end in world.ends():
        assert end.error is None, end.trace
        left, folder = end.value
        assert left == []
        assert end.exitcode == 0
        assert not folder.exists()
    check_no_files_left(before)


def _exit(here: Here, how: str) -> None:
    here.init()
    dist.all_reduce(torch.ones(1))
    if here.rank == 1:
        here.tell()
        here.hear()
        return
    kept = _leave_much(here)
    if how == "a slow callback":

        def slow(future: torch.futures.Future[Any]) -> None:
            for _ in range(30_000):
                torch.ones(1)

        kept += [_done(dist.irecv(torch.ones(3), 1)).get_future().then(slow) for _ in range(10)]
    if how == "threads":
        for call in (dist.barrier, lambda: dist.recv(torch.ones(3), 1), lambda: kept[0].wait()):
            threading.Thread(target=call, daemon=True).start()
    if how == "an exception":
        raise ValueError("enough")
    if how == "os._exit":
        os._exit(0)
    if how == "module":
        # Taken down with the modules, when all else is gone.
        torch.kept = kept  # type: ignore[attr-defined]
    here.tell()


@pytest.mark.parametrize("how", ["return", "threads", "a slow callback", "an exception", "os._exit", "module"])
def test_the_interpreter_ends_while_calls_are_under_way(how: str, tmp_path: Path) -> None:
    before = shared_files()
    world = World(_exit, 2, tmp_path, how, way="program")
    world.told(1)
    world.processes[0].join(30)
    world.tell(1)
    ends = world.ends()
    assert [end.exitcode for end in ends] == [int(how == "an exception"), 0], world.output(0)
    output = world.output(0)
    if how == "an exception":
        *_, error, note = output.rstrip().splitlines()
        assert error.endswith("ValueError: enough")
        assert note.startswith("[rank0]: phalanx: all ranks: phalanx report ")
        assert output.count("Traceback") == 1
    elif how == "threads":
        # They may have had the time to say why they end, or to begin to.
        assert output.count("Exception in thread") <= 3
        assert "terminate" not in output
        assert "Fatal" not in output
    else:
        assert output == ""
    assert world.output(1) == ""
    check_no_files_left(before)


def _run_out(here: Here, op: str) -> list[float]:
    here.init()
    dist.barrier()
    tensor = torch.full((3,), float(here.rank + 1))
    if here.rank == 1:
        here.hear()
    work = dist.all_reduce(tensor, async_op=True) if op == "all_reduce" else _message(here.rank, tensor)
    work = _done(work)
    if here.rank == 0:
        for _ in range(2):
            with pytest.raises(phalanx.CallTimeout, match=r"after 0\.05 s: rank 1 did not come; the call is still"):
                work.wait(timedelta(seconds=0.05))
        assert not work.is_completed()
        assert work.exception() is None
        here.tell()
    work.wait(timedelta(seconds=30))
    assert work.is_completed()
    dist.barrier()
    dist.destroy_process_group()
    return tensor.tolist()


def _message(rank: int, tensor: torch.Tensor) -> dist.Work | None:
    return dist.irecv(tensor, 1) if rank == 0 else dist.isend(tensor, 0)


@pytest.mark.parametrize(("op", "value"), [("all_reduce", 3), ("recv", 2)])
def test_a_wait_that_runs_out_leaves_the_call_under_way(op: str, value: int, tmp_path: Path) -> None:
    world = World(_run_out, 2, tmp_path, op)
    world.told(0)
    world.tell(1)
    ends = world.ends()
    assert ends[0].value == [value] * 3, ends[0].trace
    assert ends[1].error is None, ends[1].trace


def _interrupted(here: Here, op: str) -> list[float]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here.init()
    dist.barrier()
    tensor = torch.full((3,), float(here.rank + 1))
    if here.rank == 1:
        here.hear()
    work = _done(dist.all_reduce(tensor, async_op=True) if op == "all_reduce" else _message(here.rank, tensor))
    if here.rank == 0:
        here.tell()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert not work.is_completed()
        here.tell()
    work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return tensor.tolist()


@pytest.mark.parametrize(("op", "value"), [("all_reduce", 3), ("recv", 2)])
def test_ctrl_c_in_a_wait_leaves_the_call_under_way(op: str, value: int, tmp_path: Path) -> None:
    world = World(_interrupted, 2, tmp_path, op)
    world.told(0)
    world.wait_asleep(0)
    world.signal(0, signal.SIGINT)
    world.told(0)
    world.tell(1)
    ends = world.ends()
    assert ends[0].value == [value] * 3, ends[0].trace
    assert ends[1].error is None, ends[1].trace


def _meta() -> torch.Tensor:
    return torch.zeros(3, device="meta")


_MIXED: dict[str, Callable[[int], object]] = {
    "all_gather": lambda size: dist.all_gather([torch.zeros(3)] * (size - 1) + [_meta()], torch.zeros(3)),
    "all_gather, input": lambda size: dist.all_gather([torch.zeros(3) for _ in range(size)], _meta()),
    "all_gather_single": lambda size: dist.all_gather_single(torch.zeros(3 * size), _meta()),
    "all_to_all": lambda size: dist.all_to_all([torch.zeros(3)] * size, [torch.zeros(3)] * (size - 1) + [_meta()]),
    "all_to_all_single": lambda size: dist.all_to_all_single(torch.zeros(3), torch.zeros(3, device="meta")),
    "reduce_scatter": lambda size: dist.reduce_scatter(torch.zeros(3), [_meta()] + [torch.zeros(3)] * (size - 1)),
    "all_reduce_coalesced": lambda size: dist.group.WORLD.allreduce_coalesced([torch.zeros(3), _meta()]),  # type: ignore[union-attr]
    "batch": lambda size: dist.batch_isend_irecv([dist.P2POp(dist.irecv, _meta(), (dist.get_rank() + 1) % size)]),
}


def _mix(here: Here) -> dict[str, str]:
    here.init()
    codes = {}
    for name, call in _MIXED.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the code is compared)
            call(here.size)
        codes[name] = f"{type(caught.value).__name__} {getattr(caught.value, 'code', caught.value)}"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == here.size
    dist.destroy_process_group()
    return codes


def test_mixed_devices_are_refused(tmp_path: Path) -> None:
    assert values(_mix, 3, tmp_path) == [dict.fromkeys(_MIXED, "InvalidCall INVALID:DEVICE")] * 3
