"""Guards around an engine that behaves like NCCL (device_engine.py): calls are enqueued, and nobody waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import device_engine
import pytest
import torch
import torch.distributed as dist
from device_engine import NAME, NAME_WITHOUT_ABORT, DeviceEngine, device_tensor
from guarded import init, logged
from ranks import Here, World, until, values
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.debug.own_box import own_box
from phalanx.guards import watch


def _init(here: Here, name: str = NAME, timeout: float = 600) -> DeviceEngine:
    device_engine.register()
    engine = init(here, timeout, name).plain  # type: ignore[attr-defined]
    assert isinstance(engine, DeviceEngine)
    return engine


def _sum(count: int = 4) -> dist.Work:
    """Enqueued, and waited for as a stream does: at once."""
    work: dist.Work | None = dist.all_reduce(device_tensor(count), async_op=True)
    assert work is not None
    return work


def _states() -> list[str]:
    box = own_box().read()
    assert box is not None
    return [one.state for one in box.records if one.op != "making"]


def _agree(here: Here) -> list[float]:
    engine = _init(here)
    assert dist.get_backend() == NAME
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert engine.works[-1].is_success()
    works = [_sum() for _ in range(50)]
    for work in works:
        assert work.wait()
    until(lambda: all(work.is_completed() for work in works), "a call has not completed")
    assert all(work.is_success() for work in works)
    dist.destroy_process_group()
    return tensor.tolist()


def test_a_group_that_is_written_in_python_is_guarded(tmp_path: Path) -> None:
    assert values(_agree, 2, tmp_path) == [[2.0] * 3] * 2


def _complete(here: Here) -> None:
    engine = _init(here)
    work = _sum()
    del work
    kept = _sum()
    until(lambda: _states()[-1:] == ["completed"], "nobody noticed that the call has completed")
    assert kept.is_success()
    assert [work.synchronized for work in engine.works] == [0, 0]


def test_the_end_of_a_call_is_noticed_without_waiting_for_the_device(tmp_path: Path) -> None:
    values(_complete, 2, tmp_path)


def _differ(here: Here) -> dict[str, Any]:
    engine = _init(here)
    _sum()
    # Rank 1 comes last, and does not even begin the call.
    if here.rank == 1:
        here.hear()
        with pytest.raises(phalanx.Mismatch) as caught:
            _sum(5)
    else:
        work = _sum()
        assert work.wait()
        here.tell()
        assert engine.aborted.wait(30)
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), phalanx.Mismatch)
        with pytest.raises(phalanx.Mismatch) as caught:
            work.wait()
    assert engine.aborted.wait(30)
    with pytest.raises(phalanx.Mismatch):
        _sum()
    return {"text": str(caught.value), "begun": len(engine.works)}


def test_a_difference_aborts_the_engine_of_every_rank(tmp_path: Path) -> None:
    world = World(_differ, 3, tmp_path)
    world.all_told(0, 2)
    world.tell(1)
    ends = world.ends()
    for rank, end in enumerate(ends):
        assert end.error is None, end.trace
        assert end.value["text"].startswith("[MISMATCH:COUNT] all_reduce, seq 2, group 'default_pg', rank ")
        assert "rank 1: all_reduce(SUM, 5 elements of float32 on another device)  <-- 5 elements" in end.value["text"]
        assert "ranks 0, 2: all_reduce(SUM, 4 elements of float32 on another device)" in end.value["text"]
        assert end.value["begun"] == (1 if rank == 1 else 2)


def _other_device(here: Here) -> str:
    _init(here)
    tensor = torch.ones(4) if here.rank == 1 else device_tensor(4)

    def call() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        until(work.is_completed, "the call hangs")
        work.wait()

    with pytest.raises(phalanx.Mismatch) as caught:
        call()
    return str(caught.value)


def test_tensors_of_different_devices(tmp_path: Path) -> None:
    for text in values(_other_device, 3, tmp_path):
        assert text.startswith("[MISMATCH:DEVICE] all_reduce, seq 1, ")
        assert "rank 1: all_reduce(SUM, 4 elements of float32" in text
        assert "<-- cpu" in text


def _die(here: Here) -> str:
    """Rank 1 dies before the call; nobody waits for anything when the guard finds out."""
    engine = _init(here)
    _sum()
    here.tell()
    here.hear()
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = _sum()
    assert engine.aborted.wait(30)
    with pytest.raises(phalanx.PeerLost) as caught:
        work.wait()
    return str(caught.value)


def test_a_death_aborts_the_engine(tmp_path: Path) -> None:
    world = World(_die, 3, tmp_path)
    world.all_told(0, 1, 2)
    world.keep_dead()
    world.tell(1)
    world.wait_dead(1)
    world.tell_all(0, 2)
    ends = world.ends()
    for rank in (0, 2):
        assert ends[rank].error is None, ends[rank].trace
        assert "rank 1 died (killed by SIGKILL) while rank " in ends[rank].value
        assert "waited for it in all_reduce, seq 2, at tests/integration/" in ends[rank].value


def _time_out(here: Here) -> str:
    """No engine of devices waits on the host: the guard sees that time is up."""
    engine = _init(here, timeout=1.5)
    if here.rank == 1:
        assert engine.aborted.wait(60)
        return ""
    work = _sum()
    assert engine.aborted.wait(60)
    with pytest.raises(phalanx.CallTimeout) as caught:
        work.wait()
    return str(caught.value)


def test_a_timeout_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    for rank, text in enumerate(values(_time_out, 3, tmp_path)):
        if rank != 1:
            assert text.startswith("[MISSING] all_reduce, seq 1, ")
            assert "rank 1" in text.splitlines()[0]


def _coalesce(here: Here, wrong: bool) -> str:
    engine = _init(here)
    sizes = [2, 5 if wrong and here.rank == 1 else 3]

    def block() -> None:
        with _coalescing_manager(device=torch.device("meta"), async_ops=True) as manager:
            for size in sizes:
                dist.all_reduce(device_tensor(size))
        manager.wait()
        until(lambda: all(work.is_completed() for work in engine.works), "a call hangs")
        dist.barrier()

    if not wrong:
        block()
        return ""
    with pytest.raises(phalanx.Mismatch) as caught:
        block()
    return str(caught.value)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_the_coalescing_manager(wrong: bool, tmp_path: Path) -> None:
    for text in values(_coalesce, 2, tmp_path, wrong):
        assert text.startswith("[MISMATCH:") == wrong


def _endless(here: Here) -> dict[str, Any]:
    """The engine can't be aborted: everybody is told so, and what is known."""
    _init(here, NAME_WITHOUT_ABORT)
    texts = logged()
    with contextlib.suppress(phalanx.Mismatch):
        _sum(4 + here.rank).wait()
    text = ""
    while "could not be ended" not in text:
        text = texts.get(timeout=30)
    with pytest.raises(phalanx.Mismatch) as caught:
        _sum()
    return {"logged": text, "notes": caught.value.__notes__}


def test_an_engine_that_can_not_be_aborted(tmp_path: Path) -> None:
    problem = f"the backend {NAME_WITHOUT_ABORT} has no abort()"
    for told in values(_endless, 2, tmp_path):
        assert "[MISMATCH:COUNT] all_reduce, seq 1" in told["logged"]
        assert told["logged"].endswith(f"the calls that are under way could not be ended: {problem}")
        assert f"calls under way could not be ended: {problem}" in told["notes"]


def _train(here: Here, wrong: bool) -> str:
    """DDP waits for the engine's futures."""
    _init(here)
    model = DistributedDataParallel(torch.nn.Linear(2, 3 if wrong and here.rank == 1 else 2), init_sync=False)
    if not wrong:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
        return ""
    with pytest.raises(phalanx.Mismatch) as caught:
        model(torch.ones(1, 2)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_ddp_waits_for_the_engines_futures(wrong: bool, tmp_path: Path) -> None:
    for text in values(_train, 2, tmp_path, wrong):
        assert text.startswith("[MISMATCH:COUNT] all_reduce, seq 1") == wrong


def _look_forever(here: Here) -> bool:
    """The thread that looks after calls ends with the last group."""
    _init(here)
    _sum()
    dist.destroy_process_group()
    return watch._watch is None


def test_the_thread_that_looks_ends_with_the_last_group(tmp_path: Path) -> None:
    assert values(_look_forever, 2, tmp_path) == [True, True]
