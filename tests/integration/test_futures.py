"""Works and their futures: callbacks, timeouts, failures, and what implies a wait.

Where a test has to be sure that a call is in flight, a peer holds back until it is told through a store.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, until, values
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.futures import Future, collect_all, wait_all

import phalanx

_SOON = timedelta(seconds=20)


def _full(*shape: int, value: float) -> Tensor:
    return torch.full(shape, value, dtype=torch.float32)


def _ops(rank: int) -> list[tuple[str, list[Tensor], list[float], Callable[[list[Tensor]], Any]]]:
    """Of each op, for three ranks with 1 as root: outputs, what they must hold five times each, how to start it."""
    root, go = rank == 1, dict[str, Any](async_op=True)

    def own() -> Tensor:
        return _full(5, value=rank + 1)

    def blocks() -> list[Tensor]:
        return [_full(5, value=10 * rank + i) for i in range(3)]

    def block() -> Tensor:
        return torch.cat(blocks())

    def three() -> list[Tensor]:
        return [torch.zeros(5) for _ in range(3)]

    ranks, part, parts = [1.0, 2.0, 3.0], [30.0 + 3 * rank], [0.0 + rank, 10.0 + rank, 20.0 + rank]
    rooted: tuple[list[Tensor], list[float]] = (three(), ranks) if root else ([], [])
    return [
        ("all_reduce", [own()], [6.0], lambda o: dist.all_reduce(o[0], **go)),
        ("reduce", [own()], [6.0 if root else rank + 1.0], lambda o: dist.reduce(o[0], 1, **go)),
        ("broadcast", [own()], [2.0], lambda o: dist.broadcast(o[0], 1, **go)),
        ("all_gather", three(), ranks, lambda o: dist.all_gather(o, own(), **go)),
        ("all_gather_single", [torch.zeros(15)], ranks, lambda o: dist.all_gather_single(o[0], own(), **go)),
        ("gather", *rooted, lambda o: dist.gather(own(), o or None, 1, **go)),
        ("scatter", [own()], [10.0 + rank], lambda o: dist.scatter(o[0], blocks() if root else None, 1, **go)),
        ("reduce_scatter", [own()], part, lambda o: dist.reduce_scatter(o[0], blocks(), **go)),
        ("reduce_scatter_single", [own()], part, lambda o: dist.reduce_scatter_single(o[0], block(), **go)),
        ("all_to_all", three(), parts, lambda o: dist.all_to_all(o, blocks(), **go)),
        ("all_to_all_single", [torch.zeros(15)], parts, lambda o: dist.all_to_all_single(o[0], block(), **go)),
        ("barrier", [], [], lambda o: dist.barrier(**go)),
    ]


def _addresses(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _every_op(here: Here) -> None:
    """All ops in flight at once, each twice, and every way to wait for them. Their inputs are dropped at once."""
    here.init()
    ops = _ops(here.rank) + _ops(here.rank)
    works = [start(outputs) for _, outputs, _, start in ops]
    futures = [work.get_future() for work in works]
    for index in random.Random(here.rank).sample(range(len(ops)), len(ops)):
        (name, outputs, expected, _), work, future = ops[index], works[index], futures[index]
        if index % 3 == 0:
            work.wait()
        elif index % 3 == 1:
            future.wait()
        else:
            until(work.is_completed, f"{name} did not complete by itself")
        found = [value for tensor in outputs for value in tensor.tolist()]
        assert found == [value for value in expected for _ in range(5)], name
        assert _addresses(future.wait()) == _addresses(outputs), name
        assert _addresses(future.value()) == _addresses(outputs), name
        # A work that has ended can be asked as often as one likes.
        assert work.wait() in (None, True)
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert future.done()
    tensors = [_full(n, value=1.0) for n in (1, 5)]
    # Of this one torch gives the future only.
    assert _addresses(dist.all_reduce_coalesced(tensors, async_op=True).wait()) == _addresses(tensors)
    assert [tensor.sum().item() for tensor in tensors] == [3.0, 15.0]
    dist.destroy_process_group()


def test_every_op_in_flight(tmp_path: Path) -> None:
    values(_every_op, 3, tmp_path)


def _late_peer(here: Here) -> list[float]:
    """Callbacks and waits that are there before the call can end."""
    here.init()
    gate = Gate(here)
    if here.rank == 1:
        gate.wait("attached")
        for value in (10.0, 20.0, 30.0):
            dist.all_reduce(_full(4, value=value))
        return []
    tensors = [_full(4, value=1.0 + i) for i in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    assert not any(work.is_completed() for work in works)
    futures: list[Future[list[Tensor]]] = [work.get_future() for work in works]
    assert not any(future.done() for future in futures)
    called = threading.Event()
    threads = []

    def note(future: Future[list[Tensor]]) -> None:
        threads.append(threading.current_thread())
        called.set()

    futures[0].add_done_callback(note)
    chain = futures[0].then(lambda f: f.value()[0] * 2).then(lambda f: f.wait() + 1)
    bad = futures[0].then(lambda f: 1 // 0)
    after_bad = futures[1].then(lambda f: f.value()[0].sum().item())
    every = collect_all(futures).then(lambda f: sum(part.value()[0][0].item() for part in f.value()))
    gate.open("attached")
    assert called.wait(20)
    assert threads[0] is not threading.main_thread()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        bad.wait()
    waited = [part[0][2].item() for part in wait_all(futures)]
    # The callback of a complete future is called at once.
    late = futures[2].then(lambda f: f.value()[0][1].item())
    assert late.done()
    return [*chain.wait().tolist(), after_bad.wait(), every.wait(), late.wait(), *waited]


def test_callbacks_run_when_the_peer_comes(tmp_path: Path) -> None:
    first, _ = values(_late_peer, 2, tmp_path)
    assert first == [23.0] * 4 + [88.0, 66.0, 33.0] + [11.0, 22.0, 33.0]


def _calls_in_callbacks(here: Here) -> list[float]:
    """A callback starts a call and waits for it, by its work or its future: comm hooks do so."""
    here.init()
    gate = Gate(here)
    if here.rank == 1:
        gate.wait("attached")

    def by_future(future: Future[list[Tensor]]) -> Tensor:
        result: Tensor = dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]
        return result

    def by_work(future: Future[Tensor]) -> Tensor:
        dist.all_reduce(future.value(), async_op=True).wait()
        return future.value()

    def by_sync(future: Future[Tensor]) -> list[float]:
        dist.all_reduce(future.value())
        return future.value().tolist()

    future = dist.all_reduce(_full(3, value=here.rank + 1), async_op=True).get_future()
    last = future.then(by_future).then(by_work).then(by_sync)
    if here.rank == 0:
        gate.open("attached")
    found: list[float] = last.wait()
    return found


def test_calls_in_callbacks(tmp_path: Path) -> None:
    assert values(_calls_in_callbacks, 2, tmp_path) == [[24.0] * 3] * 2


class _Freeing(torch.autograd.Function):
    """Communicates in its backward pass, layer by layer, and is done with the buffer at once."""

    buffers: ClassVar[list[weakref.ref[Tensor]]] = []

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        buffer = _full(300_000, value=1)
        work = dist.all_reduce(buffer, async_op=True)
        work.wait()
        _Freeing.buffers.append(weakref.ref(buffer))
        del work, buffer
        assert not any(reference() is not None for reference in _Freeing.buffers)
        return gradients[0]


def _calls_in_backward(here: Here) -> int:
    here.init()
    tensor = torch.ones(2, requires_grad=True)
    result = tensor
    for _ in range(6):
        result = _Freeing.apply(result)  # type: ignore[no-untyped-call]
    result.sum().backward()
    return len(_Freeing.buffers)


def test_a_backward_pass_does_not_keep_the_tensors_of_its_calls(tmp_path: Path) -> None:
    assert values(_calls_in_backward, 2, tmp_path) == [6, 6]


class _Late(torch.autograd.Function):
    """The last step of a backward pass: begins when the calls of the pass have failed, and the keeper knows."""

    future: ClassVar[Future[Any] | None] = None

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        future = _Late.future
        if future is not None:
            until(future.done, "the call does not fail")
        return gradients[0]


def _fails_before_the_pass_ends(here: Here) -> str:
    """DDP takes the future and drops the Work; the exception keeps its class all the same."""
    here.init()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))

    # DDP compares annotations with the classes themselves, and these are strings.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        _Late.future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return _Late.future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    dist.barrier()
    if here.rank == 1:
        dist.destroy_process_group()
        return ""
    late = _Late.apply(torch.ones(2, 3, requires_grad=True))  # type: ignore[no-untyped-call]
    with pytest.raises(phalanx.PeerLost) as caught:
        model(late).sum().backward()
    return caught.value.code


def test_a_failure_before_the_end_of_a_backward_pass_keeps_its_class(tmp_path: Path) -> None:
    assert values(_fails_before_the_pass_ends, 2, tmp_path)[0] == "PEER_LOST"


def _alone(name: str) -> phalanx.ProcessGroup:
    return phalanx.ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20), name=name)


def _while_the_last_group_ends(here: Here) -> list[float]:
    """A thread leaves the last group, and waits for a callback that is running; another one makes a group meanwhile."""
    first, running, go_on = _alone("first"), threading.Event(), threading.Event()

    def hold(future: Future[Any]) -> None:
        running.set()
        go_on.wait(20)

    received = first.recv([torch.zeros(1)], 0)
    received.get_future().then(hold)
    first.send([torch.ones(1)], 0)
    assert running.wait(20)
    leaving = threading.Thread(target=first.shutdown)
    leaving.start()
    ident = leaving.ident
    assert ident is not None
    until(lambda: "keeper.py" in _stack(ident), "nobody waits for the callback")
    second, tensor = _alone("second"), torch.zeros(1)
    future = second.recv([tensor], 0).get_future()
    go_on.set()
    leaving.join()
    second.send([torch.full((1,), 3.0)], 0)
    until(future.done, "nobody heard of the call's end")
    second.shutdown()
    return [tensor.item()]


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def test_a_future_that_is_wanted_while_the_last_group_ends(tmp_path: Path) -> None:
    assert values(_while_the_last_group_ends, 1, tmp_path) == [[3.0]]


def _no_more_threads(here: Here) -> int:
    """Where the system has no more threads one of them hears of all calls."""
    group = _alone("alone")
    works = [group.recv([torch.zeros(1)], 0, tag) for tag in range(4)]
    futures = [work.get_future() for work in works]
    until(lambda: any("keeper" in thread.name for thread in threading.enumerate()), "nobody listens")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[assignment, method-assign]
    for tag in range(4):
        group.send([torch.ones(1)], 0, tag)
    until(lambda: all(future.done() for future in futures), "nobody heard of the calls' end")
    threading.Thread.start = start  # type: ignore[method-assign]
    group.shutdown()
    return len(futures)


def test_futures_where_no_more_threads_are_to_be_had(tmp_path: Path) -> None:
    assert values(_no_more_threads, 1, tmp_path) == [4]


def _timeouts(here: Here) -> list[str]:
    here.init()
    gate = Gate(here)
    group = dist.new_group(range(2), group_desc="pair")
    if here.rank == 1:
        gate.wait("in flight")
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(2))
        gate.wait("given up")
        return []
    work, other = dist.all_reduce(torch.ones(2), async_op=True), dist.all_reduce(torch.ones(2), async_op=True)
    gate.open("in flight")
    assert work.wait(_SOON) in (None, True)
    assert other.wait(timeout=timedelta(0)) in (None, True)
    # An ended call is not waited for.
    assert work.wait(timedelta(microseconds=1)) in (None, True)
    assert [work.get_future().wait()[0].tolist(), other.get_future().wait()[0].tolist()] == [[2.0, 2.0]] * 2
    missing = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    with pytest.raises(phalanx.CallTimeout) as caught:
        missing.wait(timedelta(seconds=0.2))
    gate.open("given up")
    return [caught.value.code, str(caught.value)]


def test_wait_with_a_timeout(tmp_path: Path) -> None:
    code, text = values(_timeouts, 2, tmp_path)[0]
    assert code == "MISSING"
    assert [part in text for part in ("all_reduce", "group 'pair'", "0.2 s", "rank 1 did not come")] == [True] * 4, text


def _failed(here: Here) -> None:
    """The group's timeout ends calls that nobody waits for; works and futures know of it."""
    here.init()
    gate = Gate(here)
    group = dist.new_group(range(2), timeout=timedelta(seconds=1))
    if here.rank == 1:
        gate.wait("seen")
        return
    works = [dist.all_reduce(torch.ones(n), group=group, async_op=True) for n in (1, 10, 100_000)]
    futures = [work.get_future() for work in works]
    chains = [future.then(lambda f: f.value()[0].sum()) for future in futures]
    done = threading.Event()
    futures[0].add_done_callback(lambda f: done.set())
    for work in works:
        until(work.is_completed, "a call did not end with its timeout")
    for work, future, chain in zip(works, futures, chains, strict=True):
        assert not work.is_success()
        assert isinstance(work.exception(), phalanx.CallTimeout)
        with pytest.raises(phalanx.CallTimeout, match="rank 1 did not come"):
            work.wait()
        for failed in (future, chain):
            with pytest.raises(RuntimeError, match="rank 1 did not come"):
                failed.wait()
    assert done.wait(20)
    with pytest.raises(phalanx.CallTimeout, match="the group is broken"):
        dist.barrier(group=group, async_op=True).wait()
    gate.open("seen")
    dist.destroy_process_group()


def test_a_failure_reaches_works_and_futures(tmp_path: Path) -> None:
    values(_failed, 2, tmp_path)


def _refused(here: Here) -> float:
    """Bad arguments raise in the call itself and leave the group as it was, in flight calls included."""
    here.init()
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(phalanx.InvalidCall):
        dist.all_reduce(torch.ones(2, 2).to_sparse_csr(), async_op=True)
    with pytest.raises(phalanx.InvalidCall):
        dist.all_gather_single(torch.empty(3), torch.ones(2), async_op=True)
    work.wait()
    with pytest.raises(phalanx.Mismatch):
        dist.all_reduce(torch.ones(2 + here.rank), async_op=True).wait()
    return tensor.sum().item()


def test_bad_arguments_of_async_calls(tmp_path: Path) -> None:
    assert values(_refused, 2, tmp_path) == [4.0, 4.0]


def _barrier_implies_wait(here: Here, async_op: bool) -> None:
    """Tensors whose result has to be scattered over their memory once it is there."""
    here.init()
    for _ in range(10):
        bases = [_full(300, 200, value=here.rank + 1) for _ in range(3)]
        tensors = [bases[0][:, ::2], bases[1].t(), bases[2][::3, 100:]]
        gathered = [_full(100, 300, value=0).t() for _ in range(2)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        works.append(dist.all_gather(gathered, bases[0][:, 1::2], async_op=True))
        barrier = dist.barrier(async_op=async_op)
        assert barrier is None or barrier.wait() in (None, True)
        # What of it is done later does not count.
        found = [tensor.clone() for tensor in (*bases, *gathered)]
        for tensor, base, count in zip(tensors, found, (30_000, 60_000, 10_000), strict=False):
            assert (base == 3).sum() == (tensor == 3).sum() == count
            assert (base == here.rank + 1).sum() == 60_000 - count
        assert [tensor.unique().tolist() for tensor in found[3:]] == [[1.0], [2.0]]
        assert all(work.is_success() for work in works)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_implies_wait(async_op: bool, tmp_path: Path) -> None:
    values(_barrier_implies_wait, 2, tmp_path, async_op)


def _coalesced(here: Here, async_ops: bool, device: bool) -> None:
    here.init()
    own = here.rank + 1.0
    sizes = (1, 7, 70_000)
    reduced = [_full(n, value=own * n) for n in sizes]
    gathered, scattered = [torch.empty(2 * n) for n in sizes], [torch.empty(n) for n in sizes]
    calls: list[tuple[list[Tensor], Callable[[Tensor], Any]]] = [
        (reduced, dist.all_reduce),
        (gathered, lambda t: dist.all_gather_single(t, _full(len(t) // 2, value=own))),
        (scattered, lambda t: dist.reduce_scatter_single(t, torch.arange(2.0).repeat_interleave(len(t)) * own)),
    ]
    managers = []
    for tensors, call in calls:
        with _coalescing_manager(device=torch.device("cpu") if device else None, async_ops=async_ops) as manager:
            for tensor in tensors:
                call(tensor)
        managers.append(manager)
    assert [len(manager.works) for manager in managers] == [int(async_ops)] * 3
    for manager in reversed(managers):
        manager.wait()
    assert all(torch.equal(t, _full(len(t), value=3 * len(t))) for t in reduced)
    assert all(torch.equal(t, torch.tensor([1.0, 2.0]).repeat_interleave(len(t) // 2)) for t in gathered)
    assert all(torch.equal(t, _full(len(t), value=3 * here.rank)) for t in scattered)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("async_ops", [False, True])
def test_coalescing_manager(async_ops: bool, device: bool, tmp_path: Path) -> None:
    values(_coalesced, 2, tmp_path, async_ops, device)


def _callbacks_wait_for_later_calls(here: Here) -> list[float]:
    """With many futures in flight, callbacks of early ones wait for late ones, whose ends come behind them."""
    here.init()
    tensors = [torch.full((2,), float(i)) for i in range(200)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    chained = [
        futures[i].then(lambda done, late=futures[-1 - i]: done.value()[0][0].item() + late.wait()[0][0].item())
        for i in range(3)
    ]
    return [future.wait() for future in chained]


def test_callbacks_wait_for_later_calls(tmp_path: Path) -> None:
    assert values(_callbacks_wait_for_later_calls, 2, tmp_path) == [[398.0] * 3] * 2


def _future_at_the_second_try(here: Here) -> list[float]:
    here.init()
    received = torch.zeros(1)
    if here.rank == 1:
        Gate(here).wait("asked twice")
        dist.send(torch.ones(1), 0)
        return []
    work = dist.irecv(received, 1)
    assert work is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse_to_start)
        with pytest.raises(phalanx.GroupError, match="GROUP:LIMIT"):
            work.get_future()
    future = work.get_future()
    Gate(here).open("asked twice")
    return [tensor.item() for tensor in wait_all([future])[0]]


def _refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_future_can_be_asked_for_again_after_no_thread_could_be_started(tmp_path: Path) -> None:
    assert values(_future_at_the_second_try, 2, tmp_path) == [[1.0], []]
