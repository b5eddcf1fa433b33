"""What ranks are told when a message does not fit, or does not come."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import Gate, Here, gave_up_on, outline, place, values

import phalanx
from default_group import default_group


def _told(here: Here, numel: int, dtype: torch.dtype) -> str:
    """Rank 0 expects two float32. Both sides are told at once, or with their next call or message."""
    here.init()
    try:
        if here.rank == 0:
            dist.recv(torch.empty(2), 1, tag=5)
        else:
            dist.send(torch.zeros(numel, dtype=dtype), 0, tag=5)
            dist.recv(torch.empty(1), 0)
    except phalanx.Mismatch as error:
        first = error
    with pytest.raises(phalanx.Mismatch, match="the group is broken") as broken:
        dist.barrier()
    assert broken.value.code == first.code
    return str(first)


@pytest.mark.parametrize(
    ("numel", "dtype", "code", "sent"),
    [
        (3, torch.float32, "COUNT", "3 elements of float32"),
        (1, torch.float32, "COUNT", "1 element of float32"),
        (2, torch.int32, "DTYPE", "2 elements of int32"),
        # Of the same number of bytes, and too long for an envelope.
        (1, torch.float64, "DTYPE", "1 element of float64"),
        (2_000_000, torch.float32, "COUNT", "2000000 elements of float32"),
    ],
)
def test_a_message_that_does_not_fit(numel: int, dtype: torch.dtype, code: str, sent: str, tmp_path: Path) -> None:
    part = 0 if code == "COUNT" else 1
    marks = [text.split(" of ")[part] for text in (sent, "2 elements of float32")]
    for rank, text in enumerate(values(_told, 2, tmp_path, numel, dtype)):
        assert text.startswith(f"[MISMATCH:{code}] recv, seq 1, group 'default_pg', rank {rank}:") or rank == 1
        assert text.startswith(f"[MISMATCH:{code}]")
        assert text.splitlines()[1:5] == [
            f"  rank 1: send({sent}, to rank 0, tag 5)  <-- {marks[0]}",
            f"    at {place(_told, 'dist.send(')}",
            f"  rank 0: recv(2 elements of float32, from rank 1, tag 5)  <-- {marks[1]}",
            f"    at {place(_told, 'dist.recv(torch.empty(2)')}",
        ]
        assert "\n  Next: receive into a tensor of the dtype and number of elements that are sent" in text


def _nothing_came(here: Here) -> list[str]:
    """Rank 0 waits for a tag that nobody sends, and has another receive under way with time enough."""
    here.init()
    gate = Gate(here)
    if here.rank == 1:
        dist.send(torch.ones(1), 0, tag=78)
        gate.wait("told")
        return []
    patient = dist.irecv(torch.empty(1), 1, tag=3)
    assert patient is not None
    hasty = default_group().recv([torch.empty(1)], 1, 77, timeout=timedelta(seconds=0.3))
    told = []
    for work in (hasty, patient):
        with pytest.raises(phalanx.CallTimeout) as caught:
            work.wait()
        told.append(str(caught.value))
    gate.open("told")
    return told


def test_a_message_that_does_not_come(tmp_path: Path) -> None:
    hasty, patient = values(_nothing_came, 2, tmp_path)[0]
    came = "no message with tag 77 came from rank 1, but others did, with tag 78\n  Next: give both sides the same tag"
    assert f"rank 0: gave up after a timeout of 0.3 s: {came}" in outline(hasty)
    gave_up = gave_up_on("recv, seq 2", place(_nothing_came, ".recv([torch.empty(1)], 1, 77"))
    assert f"the group is broken: rank 0 {gave_up}{came}" in outline(patient)


def _nobody_receives(here: Here) -> str:
    here.init()
    gate = Gate(here)
    if here.rank == 1:
        gate.wait("told")
        return ""
    work = default_group().send([torch.ones(1_000_000)], 1, 4, timeout=timedelta(seconds=0.3))
    with pytest.raises(phalanx.CallTimeout) as caught:
        work.wait()
    gate.open("told")
    return str(caught.value)


def test_a_message_that_nobody_receives(tmp_path: Path) -> None:
    text = values(_nobody_receives, 2, tmp_path)[0]
    assert "send, seq 1, group 'default_pg', rank 0: gave up after a timeout of 0.3 s: " in text
    assert "rank 1 did not receive it (tag 4)\n  Next: look at what rank 1 did instead" in outline(text)


def _in_a_sub_group(here: Here) -> str:
    here.init()
    group = dist.new_group([0, 2])
    gate = Gate(here)
    if here.rank > 0:
        gate.wait("told")
        return ""
    assert isinstance(group, phalanx.ProcessGroup)
    group.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(phalanx.CallTimeout) as caught:
        dist.all_reduce(torch.ones(1), group=group)
    gate.open("told")
    return str(caught.value)


def test_ranks_of_a_sub_group_are_told_apart_from_global_ones(tmp_path: Path) -> None:
    text = outline(values(_in_a_sub_group, 3, tmp_path)[0])
    assert "rank 1 (global rank 2) did not come\n  Next: look at what rank 1 (global rank 2) did instead" in text


def _late_behind_another(here: Here, in_thread: bool) -> list[str]:
    """Rank 0's second call gives up while its first one waits; its third one looks like rank 1's second one."""
    here.init()
    gate = Gate(here)
    group = default_group()
    told = []

    def told_by(work: dist.Work) -> str:
        with pytest.raises(phalanx.CallTimeout) as caught:
            work.wait()
        return str(caught.value)

    if here.rank == 1:
        gate.wait("told")
        for value in (1.0, 20.0):
            with pytest.raises(phalanx.CallTimeout) as caught:
                dist.all_reduce(torch.full((3,), value))
            told.append(str(caught.value))
        return told
    first = group.allreduce([torch.ones(3)])
    opts = dist.AllreduceOptions()
    opts.timeout = timedelta(seconds=0.3)
    second = group.allreduce([torch.full((3,), 2.0)], opts)
    third = group.allreduce([torch.full((3,), 100.0)])
    if in_thread:
        other: list[str] = []
        thread = threading.Thread(target=lambda: other.append(told_by(first)))
        thread.start()
        told.append(told_by(second))
        thread.join()
        told += other
    else:
        told += [told_by(second), told_by(first)]
    told.append(told_by(third))
    gate.open("told")
    return told


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_call_that_is_late_behind_another_is_not_left_out(in_thread: bool, tmp_path: Path) -> None:
    first, second = values(_late_behind_another, 2, tmp_path, in_thread)
    gave_up = gave_up_on("all_reduce, seq 2", place(_late_behind_another, "2.0)], opts)")) + "rank 1 did not come"
    assert "seq 2, group 'default_pg', rank 0: gave up after a timeout of 0.3 s: rank 1 did not come" in first[0]
    assert f"seq 1, group 'default_pg', rank 0: the group is broken: rank 0 {gave_up}" in first[1]
    assert f"seq 3, group 'default_pg', rank 0: the group is broken: rank 0 {gave_up}" in first[2]
    assert all(f"rank 0 {gave_up}" in text for text in second)


def _numbers(here: Here) -> float:
    """Whole numbers of any class, and a timeout that is none."""
    here.init()
    group, one, seven = default_group(), cast(Any, numpy.int64(1)), cast(Any, numpy.int32(7))
    tensor = torch.full((1,), 3.0)
    work = group.recv([tensor], one - here.rank, seven)
    unused = dist.irecv(torch.empty(1), 1 - here.rank, tag=8)
    assert unused is not None
    with pytest.raises(TypeError, match=r"expected a timeout as a datetime\.timedelta, got 5"):
        unused.wait(5)  # type: ignore[arg-type]
    group.send([torch.full((1,), here.rank + 1.0)], one - here.rank, seven).wait()
    work.wait()
    return tensor.item()


def test_peers_and_tags_of_other_classes(tmp_path: Path) -> None:
    assert values(_numbers, 2, tmp_path) == [2.0, 1.0]
