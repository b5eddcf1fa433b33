"""Many calls in flight: on crossed groups, from several threads, behind each other, dropped by who made them."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, until, values
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import phalanx


def _full(*shape: int, value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float32)


def _dropped(here: Here) -> float:
    """Rank 0 drops works and tensors while the calls are in flight, and uses the memory for other things."""
    here.init()
    gate = Gate(here)
    # Not of one number: the works of a few all_reduces of those are kept for Join.
    sizes = [2, 10, 1000, 50_000, 300_000] * 4
    if here.rank == 1:
        gate.wait("dropped")
        for i, size in enumerate(sizes):
            tensor, outputs = _full(size, value=1000.0), [torch.empty(size) for _ in range(2)]
            dist.all_reduce(tensor)
            dist.all_gather(outputs, tensor)
            assert torch.equal(tensor, _full(size, value=1000.0 + i))
            assert torch.equal(outputs[0], _full(size, value=-i))
            dist.recv(tensor, 0, tag=i)
            assert torch.equal(tensor, _full(size, value=-i))
            dist.send(tensor, 0, tag=i)
        return 0.0
    refs: list[StorageWeakRef] = []

    def start(i: int, size: int) -> None:
        tensor, outputs = _full(size, value=i), [torch.empty(size) for _ in range(2)]
        source, received = _full(size, value=-i), torch.empty(size)
        refs.extend(StorageWeakRef(t.untyped_storage()) for t in (tensor, source, received, *outputs))
        dist.isend(source, 1, tag=i)
        dist.irecv(received, 1, tag=i)
        dist.all_reduce(tensor, async_op=True)
        work = dist.all_gather(outputs, source, async_op=True)
        if i % 2:
            work.get_future().then(lambda f: f.value()[0].sum())

    for i, size in enumerate(sizes):
        start(i, size)
    gc.collect()
    reused = [_full(size, value=12345.0) for size in sizes * 4]
    gate.open("dropped")
    until(lambda: all(ref.expired() for ref in refs), "tensors of dropped calls are kept for ever")
    assert all(torch.equal(tensor, _full(tensor.numel(), value=12345.0)) for tensor in reused)
    return 1.0


def test_dropped_works(tmp_path: Path) -> None:
    assert values(_dropped, 2, tmp_path) == [1.0, 0.0]


def _crossed(here: Here, size: int) -> list[float]:
    """Rank 0 issues on A, then on B; rank 1 the other way round; each waits for its first before the second."""
    here.init()
    groups = [dist.new_group(range(2)) for _ in range(2)]
    order = (0, 1) if here.rank == 0 else (1, 0)
    found = []
    for _ in range(20):
        tensors = [_full(size, value=10.0 * i + here.rank) for i in range(2)]
        works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
        for work in works:
            work.wait()
        found += [tensor.sum().item() / size for tensor in tensors]
    return found


@pytest.mark.parametrize("size", [1, 500_000])
def test_groups_in_crossed_order(size: int, tmp_path: Path) -> None:
    assert values(_crossed, 2, tmp_path, size) == [[1.0, 21.0] * 20] * 2


# Rank 3 is in all of them.
_MEMBERS = ((0, 1, 2, 3), (0, 3), (1, 3), (2, 3), (0, 1, 3), (1, 2, 3), (0, 2, 3), (3, 2, 1, 0))


def _many(here: Here) -> int:
    """Each rank mixes its groups' calls in an order of its own; rank 3 begins when all others are done with issuing."""
    here.init()
    gate = Gate(here)
    groups = [dist.new_group(members) for members in _MEMBERS]
    mine = [index for index, members in enumerate(_MEMBERS) if here.rank in members]
    chance = random.Random(here.rank)
    order = [index for index in mine for _ in range(200)]
    chance.shuffle(order)
    if here.rank == 3:
        gate.wait(*(f"issued {rank}" for rank in range(3)))
    started: list[tuple[Any, Tensor, float]] = []
    counts = [0] * len(groups)
    for index in order:
        call, members = counts[index], _MEMBERS[index]
        counts[index] += 1
        tensor = _full(20_000 if call % 50 == 0 else call, value=1.0 + here.rank * call)
        work = dist.all_reduce(tensor, group=groups[index], async_op=True)
        started.append((work, tensor, len(members) + sum(members) * float(call)))
    gate.open(f"issued {here.rank}")
    chance.shuffle(started)
    for work, tensor, expected in started:
        work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, expected))
    return len(started)


def test_a_thousand_calls_in_flight(tmp_path: Path) -> None:
    assert values(_many, 4, tmp_path) == [1000, 1000, 1000, 1600]


def _threads(here: Here, shared: bool) -> int:
    """Threads with a group each, or with one group whose calls are alike, so that any of them may meet any other."""
    here.init()
    groups = [dist.new_group(range(here.size)) for _ in range(1 if shared else 4)]
    expected = float(sum(range(1, here.size + 1)))

    def calls(index: int) -> None:
        group = groups[index % len(groups)]
        for number in range(100):
            tensors = [_full(3000, value=here.rank + 1) for _ in range(1 + number % 3)]
            works = [dist.all_reduce(tensor, group=group, async_op=number % 2 == 1) for tensor in tensors]
            for work in works[::-1]:
                assert work is None or work.wait() in (None, True)
            assert all(torch.equal(tensor, _full(3000, value=expected)) for tensor in tensors)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(calls, range(4)))
    return int(groups[0]._get_sequence_number_for_group())


@pytest.mark.parametrize("shared", [False, True])
def test_threads_of_one_rank(shared: bool, tmp_path: Path) -> None:
    assert values(_threads, 2, tmp_path, shared) == [4 * 199 if shared else 199] * 2


def _without_the_gil(here: Here) -> list[float]:
    """Rank 0 keeps the GIL until rank 1 has all it needs of it."""
    here.init()
    gate, fifo = Gate(here), here.folder / "fifo"
    own = [_full(numel, value=here.rank + 1) for numel in (1, 100, 1_000_000)]
    message = _full(1_000_000, value=here.rank + 5)
    if here.rank == 1:
        gate.wait("issued")
        with fifo.open("wb") as pipe:
            for tensor in own:
                dist.all_reduce(tensor)
            dist.recv(message, 0)
            pipe.write(b"x")
        return [*(tensor[-1].item() for tensor in own), message[-1].item()]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in own]
    works.append(dist.isend(message, 1))
    gate.open("issued")
    with fifo.open("rb") as pipe:
        # Functions of a PyDLL keep it.
        assert ctypes.PyDLL(None).read(pipe.fileno(), ctypes.create_string_buffer(1), ctypes.c_size_t(1)) == 1
    for work in works:
        work.wait()
    return [*(tensor[-1].item() for tensor in own), message[-1].item()]


def test_calls_go_on_while_python_keeps_the_gil(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert values(_without_the_gil, 2, tmp_path) == [[3.0, 3.0, 3.0, 5.0]] * 2


def _sync_behind_async(here: Here) -> list[float]:
    here.init()
    gate = Gate(here)
    if here.rank == 1:
        gate.wait("issued")
    tensors = [_full(1 + 1000 * i, value=here.rank + i) for i in range(60)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    if here.rank == 0:
        gate.open("issued")
    last = _full(100_000, value=here.rank + 0.5)
    dist.broadcast(last, 1)
    dist.all_reduce(last)
    for work in works:
        work.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, 1.0 + 2 * i)) for i, tensor in enumerate(tensors))
    found: list[float] = last.unique().tolist()
    return found


def test_a_sync_call_behind_async_ones(tmp_path: Path) -> None:
    assert values(_sync_behind_async, 2, tmp_path) == [[3.0]] * 2


def _destroy_in_flight(here: Here) -> str:
    """A rank that leaves with calls in flight does not hang, and the peer is told."""
    here.init()
    dist.barrier()
    if here.rank == 0:
        work = dist.all_reduce(torch.ones(4_000_000), async_op=True)
        dist.destroy_process_group()
        until(work.is_completed, "a call outlives its group")
        with pytest.raises(phalanx.PhalanxError) as own:
            work.wait()
        Gate(here).open("left")
        return type(own.value).__name__
    Gate(here).wait("left")
    with pytest.raises(phalanx.PhalanxError) as caught:
        dist.all_reduce(torch.ones(4_000_000))
    return type(caught.value).__name__


def test_destroy_with_calls_in_flight(tmp_path: Path) -> None:
    _, second = values(_destroy_in_flight, 2, tmp_path)
    assert second in ("PeerLost", "Aborted")
