"""Tensors that do not lie in plain memory: calls write to copies, and what they wrote comes back in time and in order.

Where a test has to be sure that a call is in flight, rank 1 holds back until rank 0 has issued its calls.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, until, values
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import phalanx


def _matrix(value: float) -> Tensor:
    return torch.full((30, 40), value)


def _one_after_another(here: Here, chained: bool, backwards: bool) -> list[float]:
    """The second call takes what the first one gives: the very same tensor, or other views of its memory."""
    here.init()
    gate = Gate(here)
    base = _matrix(here.rank + 1.0)
    one, other = base.t(), base.t() if chained else base
    if here.rank == 1:
        gate.wait("issued")
    works = [dist.broadcast(one, 1, async_op=True)]
    if here.rank == 0 and chained:
        # Both are in flight now. Other views wait for the first call.
        works.append(dist.all_reduce(other, async_op=True))
        gate.open("issued")
    else:
        gate.open("issued")
        works.append(dist.all_reduce(other, async_op=True))
    for work in works[:: -1 if backwards else 1]:
        work.wait()
    found: list[float] = base.unique().tolist()
    return found


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_calls_see_what_calls_before_them_wrote(chained: bool, backwards: bool, tmp_path: Path) -> None:
    assert values(_one_after_another, 2, tmp_path, chained, backwards) == [[4.0]] * 2


def _through_other_views(here: Here, case: str) -> list[float]:
    """The second call copies its input while the first one, which needs no copy or has one, is in flight."""
    here.init()
    gate = Gate(here)
    base = _matrix(here.rank + 1.0)
    if here.rank == 1:
        gate.wait("issued")
    first = base if case == "view" else base.t()
    works = [dist.all_reduce(first, async_op=True)]
    gate.open("issued")
    if case == "view":
        works.append(dist.all_reduce(base.t(), async_op=True))
    else:
        # Its input lies where it writes.
        works.append(dist.all_to_all_single(first, first, async_op=True))
    for work in works:
        work.wait()
    found: list[float] = base.unique().tolist()
    return found


@pytest.mark.parametrize(("case", "expected"), [("view", 6.0), ("overlap", 3.0)])
def test_input_that_is_copied_is_up_to_date(case: str, expected: float, tmp_path: Path) -> None:
    assert values(_through_other_views, 2, tmp_path, case) == [[expected]] * 2


def _behind_mixed(here: Here, case: str) -> list[float]:
    """The second call copies memory that the first one, which has a copy for another tensor, writes without one."""
    here.init()
    gate = Gate(here)
    base, other = torch.full((100_000,), here.rank + 1.0), torch.zeros(20, 2)[:, 0]
    if here.rank == 1:
        gate.wait("issued")
    if case == "gathered":
        work = dist.all_gather([base, torch.zeros(100_000, 2)[:, 0]], base.clone(), async_op=True)
    else:
        group = dist.group.WORLD
        assert group is not None
        work = group.allreduce_coalesced([base, other])
    gate.open("issued")
    if case == "sparse":
        indices = torch.arange(100_000)[None]
        # Not marked as coalesced: adding up the entries reads them at once.
        total = torch.sparse_coo_tensor(indices, base, (100_000,), check_invariants=False)
        dist.all_reduce(total)
        work.wait()
        base = total.to_dense()
    else:
        dist.all_reduce(base[::2])
        work.wait()
    found: list[float] = base.unique().tolist()
    return found


@pytest.mark.parametrize(("case", "expected"), [("reduced", [3.0, 6.0]), ("gathered", [1.0, 2.0]), ("sparse", [6.0])])
def test_a_list_of_plain_and_strided_tensors_is_up_to_date(case: str, expected: list[float], tmp_path: Path) -> None:
    assert values(_behind_mixed, 2, tmp_path, case) == [expected] * 2


def _columns(here: Here) -> list[float]:
    """Calls on columns of one matrix do not wait for each other: rank 1 begins when rank 0 has issued them all."""
    here.init()
    gate = Gate(here)
    base = _matrix(here.rank + 1.0)
    if here.rank == 1:
        gate.wait("issued")
    works = [dist.all_reduce(part, async_op=True) for part in (base[:, 0], base[:, 1], base[:, 2:20], base[:, 20:])]
    if here.rank == 0:
        gate.open("issued")
    for work in works:
        work.wait()
    found: list[float] = base.unique().tolist()
    return found


def _plain_between(here: Here) -> list[float]:
    """A call whose plain memory lies between the columns that the next one copies keeps nobody waiting."""
    here.init()
    gate = Gate(here)
    base = _matrix(here.rank + 1.0)
    if here.rank == 1:
        gate.wait("issued")
    works = [dist.all_reduce(part, async_op=True) for part in (base[3, 20:], base[:, :20])]
    if here.rank == 0:
        gate.open("issued")
    for work in works:
        work.wait()
    return [base[:, :20].unique().item(), base[3, 20:].unique().item()]


def test_plain_memory_between_columns(tmp_path: Path) -> None:
    assert values(_plain_between, 2, tmp_path) == [[3.0, 3.0]] * 2


def test_calls_on_columns_go_on_side_by_side(tmp_path: Path) -> None:
    assert values(_columns, 2, tmp_path) == [[3.0]] * 2


def _sync_behind_async(here: Here) -> list[float]:
    here.init()
    base = _matrix(here.rank + 1.0)
    work = dist.broadcast(base.t(), 1, async_op=True)
    dist.all_reduce(base.t())
    found: list[float] = base.unique().tolist()
    work.wait()
    return [*found, *base.unique().tolist()]


def test_a_sync_call_behind_an_async_one(tmp_path: Path) -> None:
    assert values(_sync_behind_async, 2, tmp_path) == [[4.0, 4.0]] * 2


def _written_once(here: Here) -> list[float]:
    """What the program writes when it has waited for the last call is not overwritten by a wait for the first."""
    here.init()
    base = _matrix(here.rank + 1.0)
    works = [dist.all_reduce(base.t(), async_op=True) for _ in range(2)]
    works[1].wait()
    base.add_(1)
    works[0].wait()
    found: list[float] = base.unique().tolist()
    return found


def test_copies_come_back_in_the_order_of_the_calls(tmp_path: Path) -> None:
    assert values(_written_once, 2, tmp_path) == [[7.0]] * 2


def _asked(here: Here, receive: bool) -> list[float]:
    """A call that says that it is completed has written to its tensor."""
    here.init()
    base = _matrix(here.rank + 1.0)
    gate = Gate(here)
    if here.rank == 1:
        gate.wait("issued")
        dist.send(base.t(), 0) if receive else dist.all_reduce(base.t())
        return []
    work = dist.irecv(base.t(), 1) if receive else dist.all_reduce(base.t(), async_op=True)
    assert work is not None
    assert not work.is_completed()
    gate.open("issued")
    until(work.is_completed, "the call does not end")
    found: list[float] = base.unique().tolist()
    return found


@pytest.mark.parametrize("receive", [False, True])
def test_a_completed_call_has_written(receive: bool, tmp_path: Path) -> None:
    assert values(_asked, 2, tmp_path, receive)[0] == ([2.0] if receive else [3.0])


def _all_three(tensor: Tensor) -> bool:
    return bool((tensor == 3).all())


def _dropped(here: Here) -> list[float]:
    """Works that are dropped before or after the end of their calls write, and let go of everything."""
    here.init()
    gate = Gate(here)
    if here.rank == 1:
        for _ in range(2):
            dist.all_reduce(_matrix(2.0).t())
        gate.wait("dropped")
        for _ in range(2):
            dist.all_reduce(_matrix(2.0).t())
        return []
    bases = [_matrix(1.0) for _ in range(4)]
    views = [base.t() for base in bases]
    works = [dist.all_reduce(view, async_op=True) for view in views[:2]]
    # The second has ended, then the first has as well; nobody asked it.
    works[1].wait()
    del works
    assert dist.all_reduce(views[2], async_op=True) is not None
    assert dist.all_reduce(views[3], async_op=True) is not None
    gate.open("dropped")
    refs = [StorageWeakRef(view.untyped_storage()) for view in views]
    for base in bases:
        until(partial(_all_three, base), "what dropped calls wrote does not come back")
    del base, bases, views
    gc.collect()
    until(lambda: all(ref.expired() for ref in refs), "tensors of dropped calls are kept")
    return []


def test_dropped_calls_write_and_let_go(tmp_path: Path) -> None:
    values(_dropped, 2, tmp_path)


def _read_only(here: Here) -> list[str]:
    """Not even through a copy."""
    here.init()
    told = []
    with (here.folder / f"data{here.rank}").open("w+b") as file:
        file.write(bytes(8 * mmap.PAGESIZE))
        file.flush()
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        array = numpy.frombuffer(memory, numpy.float32)
        # torch warns of arrays that can't be written; the address alone says nothing of it.
        address = array.__array_interface__["data"][0]
        view = _at(address, array.size)[::2]
        with pytest.raises(phalanx.InvalidCall) as caught:
            dist.recv(view, 1 - here.rank)
        told.append(caught.value.code)
        del array, view
    dist.barrier()
    return told


def _at(address: int, num: int) -> Tensor:
    return torch.from_numpy(numpy.ctypeslib.as_array((ctypes.c_float * num).from_address(address)))


def test_a_receive_through_a_copy_into_read_only_memory_is_refused(tmp_path: Path) -> None:
    assert values(_read_only, 2, tmp_path) == [["INVALID:MEMORY"]] * 2


def _columns_of(num: int, numel: int) -> list[Tensor]:
    """Tensors that are not contiguous and have memory of their own."""
    return [torch.full((numel, 2), -1.0)[:, 0] for _ in range(num)]


def _write(op: str, rank: int, is_async: bool) -> tuple[list[Tensor], Any]:
    """Makes a call; its outputs, which are not contiguous, and its Work."""
    numel = 6
    own = torch.full((numel,), rank + 1.0)
    outputs = _columns_of(2 if op in ("all_gather", "all_to_all") else 1, numel)
    match op:
        case "all_gather":
            return outputs, dist.all_gather(outputs, own, async_op=is_async)
        case "all_to_all":
            return outputs, dist.all_to_all(outputs, [own, own], async_op=is_async)
        case "reduce_scatter":
            return outputs, dist.reduce_scatter(outputs[0], [own, own], async_op=is_async)
        case "broadcast":
            return outputs, dist.broadcast(outputs[0] if rank else own, 0, async_op=is_async)
        case "scatter":
            return outputs, dist.scatter(outputs[0], None if rank else [own, own], 0, async_op=is_async)
        case "all_reduce":
            outputs[0].copy_(own)
            return outputs, dist.all_reduce(outputs[0], async_op=is_async)
    # A message to oneself would be refused.
    work = dist.irecv(outputs[0], 0) if rank else dist.isend(own, 1)
    if not is_async and work is not None:
        work.wait()
    return outputs, work


_WRITING = {
    "all_gather": [1.0, 2.0],
    "all_to_all": [1.0, 2.0],
    "reduce_scatter": [3.0],
    "broadcast": [1.0],
    "scatter": [1.0],
    "recv": [1.0],
    "all_reduce": [3.0],
}


def _watched(here: Here) -> dict[str, list[Any]]:
    """What rank 1 got by each op, and how often an output was copied when the call was made."""
    here.init()
    found: dict[str, list[Any]] = {}
    for op in _WRITING:
        for is_async in (False, True):
            copied: list[int] = []

            def watch(frame: FrameType, event: str, function: Any, copied: list[int] = copied) -> None:
                if event == "c_call" and function.__name__ in ("contiguous", "clone"):
                    copied.append(function.__self__.data_ptr())

            sys.setprofile(watch)
            try:
                outputs, work = _write(op, here.rank, is_async)
            finally:
                sys.setprofile(None)
            if work is not None:
                work.wait()
            num_copied = sum(address in [output.data_ptr() for output in outputs] for address in copied)
            found[f"{op} {is_async}"] = [[output.unique().item() for output in outputs], num_copied]
    return found


def test_outputs_that_a_call_overwrites_are_not_copied_first(tmp_path: Path) -> None:
    found = values(_watched, 2, tmp_path)[1]
    for op, expected in _WRITING.items():
        # Only what the call reads, too.
        assert found[f"{op} False"] == found[f"{op} True"] == [expected, int(op == "all_reduce")], op


class _Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.own = self


_NUM_THREADS, _NUM_ROUNDS = 3, 40
# Elements of calls that are in flight for a while.
_LONG = 20_000


def _forked(work: Any) -> int:
    """What became of a child that waits for a call of its parent."""
    child = os.fork()
    if child == 0:
        # It must not wait for a lock that a thread of its parent held.
        signal.alarm(20)
        try:
            work.wait()
        except phalanx.GroupError as error:
            os._exit(0 if error.code == "GROUP:FORKED" else 3)
        # The call had ended before the fork.
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _stress(here: Here) -> list[str]:
    """Threads with groups of their own, and calls that are waited for, dropped, left to the collector, or seen by a
    forked child."""
    here.init()
    groups = [dist.new_group() for _ in range(_NUM_THREADS)]
    wrong: list[str] = []

    def work_in(own: int) -> None:
        chance = random.Random(own)
        matrix = torch.zeros(_LONG, _NUM_ROUNDS)
        for number in range(_NUM_ROUNDS):
            # Twice the same column: the second call takes the copy of the first.
            column = matrix[:, number]
            column.fill_(here.rank + 1.0)
            works = [dist.all_reduce(column, group=groups[own], async_op=True) for _ in range(2)]
            outputs = _columns_of(2, _LONG)
            works.append(dist.all_gather(outputs, column, group=groups[own], async_op=True))
            if number % 10 == own and (status := _forked(works[0])):
                wrong.append(f"a child ended with {status}")
            # The same on all ranks, or not: what is dropped comes back all the same.
            if chance.random() < 0.5:
                _Cycle(works.pop(0))
                _Cycle(works.pop(0))
            if chance.random() < 0.2:
                gc.collect()
            works[-1].wait()
            # Collectives come back in the order of the calls.
            seen = [column.unique().tolist(), *(output.unique().tolist() for output in outputs)]
            if seen != [[6.0]] * 3:
                wrong.append(f"thread {own}, round {number}: {seen}")

    threads = [threading.Thread(target=work_in, args=(own,)) for own in range(_NUM_THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    dist.barrier()
    return wrong


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_threads_garbage_and_forks_come_in_between(tmp_path: Path) -> None:
    assert values(_stress, 2, tmp_path) == [[], []]
