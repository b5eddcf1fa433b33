"""A rank refuses a call because its arguments are wrong: those who wait for it are told while they wait."""

from __future__ import annotations

import contextlib
import logging
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
from ranks import Gate, Here, World, place, run, values

import phalanx
from default_group import default_group

_GOES_ON = "The call completes if it is repeated there with valid arguments before the timeout."
_ROOT_HINT = "give the root as a rank within this group (dist.get_group_rank turns a global rank into one)"
_LARGE = 5000  # elements: a send of so many waits for its receive


class _Said(logging.Handler):
    """What this process logs. `on_said` is called each time."""

    def __init__(self, on_said: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._on_said = on_said
        logging.getLogger("phalanx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._on_said()


def _refuse_root(group: Any) -> None:
    with contextlib.suppress(phalanx.InvalidCall):
        group.broadcast(torch.ones(2), root=7)


def _refused_root(seq: int, size: int) -> str:
    error = f"[INVALID:ROOT] expected a root between 0 and {size - 1}, got 7"
    return f"  rank 1 refused broadcast, seq {seq}, at {place(_refuse_root, 'root=7')}: {error}"


def _try_again(here: Here, way: str) -> tuple[list[str], list[float]]:
    """Rank 1 refuses a call, waits until the others were told, and makes the call."""
    here.init()
    gate = Gate(here)
    said = _Said(lambda: gate.open(str(here.rank)))
    dist.barrier()
    tensor = torch.full((2,), float(here.rank))
    if here.rank == 1:
        _refuse_root(default_group())
        gate.wait("0", "2")
    if way == "synchronous":
        dist.broadcast(tensor, 1)
    elif way == "asynchronous":
        first, second = dist.broadcast(tensor, 1, async_op=True), dist.barrier(async_op=True)
        assert first is not None
        assert second is not None
        second.wait()
    else:
        thread = threading.Thread(target=dist.broadcast, args=(tensor, 1))
        thread.start()
        thread.join()
    dist.barrier()
    return said.texts, tensor.tolist()


@pytest.mark.parametrize("way", ["synchronous", "asynchronous", "in a thread"])
def test_ranks_that_wait_are_told_once_and_go_on(tmp_path: Path, way: str) -> None:
    told = values(_try_again, 3, tmp_path, way)
    assert [tensor for _, tensor in told] == [[1.0, 1.0]] * 3
    call = "barrier, seq 3" if way == "asynchronous" else "broadcast, seq 2"
    for rank in (0, 2):
        (text,) = told[rank][0]
        assert text.splitlines() == [
            f"{call}, group 'default_pg', rank {rank}: rank 1 refused the call that this rank waits for",
            _refused_root(2, 3),
            f"  Next: fix the arguments on rank 1: {_ROOT_HINT}. {_GOES_ON}",
        ]
    assert told[1][0] == []


def _try_again_at_once(here: Here) -> list[str]:
    """The others wait for rank 2, for longer than it takes to be told of a call that was refused.

    Rank 0 begins to wait when rank 1 has tried again. In tests/testing/test_refused_calls.py it waits before, in
    virtual time: on a busy machine nobody knows how long "at once" takes.
    """
    os.environ["PHALANX_SLOW"] = "0.7"
    here.init()
    gate = Gate(here)
    said = _Said(lambda: gate.open(str(here.rank)))
    dist.barrier()
    works = []
    if here.rank == 1:
        _refuse_root(default_group())
        with contextlib.suppress(phalanx.InvalidCall):
            dist.send(torch.ones(2).to_sparse(), 0)
        works = [dist.isend(torch.ones(2), 0), dist.broadcast(torch.ones(2), 1, async_op=True)]
        gate.open("again")
    elif here.rank == 0:
        gate.wait("again")
    else:
        gate.wait("0")
    if here.rank != 1:
        works = [dist.broadcast(torch.ones(2), 1, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier()
    if here.rank == 0:
        dist.recv(torch.ones(2), 1)
    return said.texts


def test_a_rank_that_tries_again_at_once_alarms_nobody(tmp_path: Path) -> None:
    for texts in values(_try_again_at_once, 3, tmp_path):
        assert [text for text in texts if "refused" in text] == []


def _subgroup(here: Here) -> list[str]:
    here.init()
    gate = Gate(here)
    said = _Said(lambda: gate.open("told"))
    group = dist.new_group([3, 1], sort_ranks=False, group_desc="columns")
    other = dist.new_group([0, 2], group_desc="others")
    if here.rank == 1:
        _refuse_root(group)
        gate.wait("told")
    if here.rank in (1, 3):
        dist.broadcast(torch.ones(2), 1, group)
    else:
        # Nobody has refused a call of this group.
        if here.rank == 2:
            gate.wait("told")
        dist.broadcast(torch.ones(2), 0, other)
    return said.texts


def test_a_smaller_group(tmp_path: Path) -> None:
    *others, (text,) = values(_subgroup, 4, tmp_path)
    assert others == [[], [], []]
    assert text.splitlines()[:2] == [
        "broadcast, seq 1, group 'columns', rank 0: rank 1 refused the call that this rank waits for",
        _refused_root(1, 2),
    ]


def _message(here: Here, op: str) -> tuple[list[str], list[float]]:
    """Rank 1 refuses its side of a message, waits until rank 0 was told, and makes it."""
    here.init()
    gate = Gate(here)
    said = _Said(lambda: gate.open("told"))
    dist.barrier()
    tensor = torch.full((_LARGE,), float(here.rank))
    right = {"send": dist.recv, "recv": dist.send}[op] if here.rank == 0 else {"send": dist.send, "recv": dist.recv}[op]
    if here.rank == 1:
        with contextlib.suppress(phalanx.InvalidCall):
            right(torch.empty(2, dtype=torch.float32).to_sparse(), 0, tag=3)  # refuses
        gate.wait("told")
    if here.rank < 2:
        right(tensor, 1 - here.rank, tag=3)
    dist.barrier()
    return said.texts, tensor[:1].tolist()


@pytest.mark.parametrize("op", ["send", "recv"])
def test_messages(tmp_path: Path, op: str) -> None:
    (told, first), (nothing, second), (silence, _) = values(_message, 3, tmp_path, op)
    assert (nothing, silence) == ([], [])
    assert first == second
    (text,) = told
    waits = "recv" if op == "send" else "send"
    to = "to" if op == "send" else "from"
    assert text.splitlines() == [
        f"{waits}, seq 1, group 'default_pg', rank 0: rank 1 refused the call that this rank waits for",
        f"  rank 1 refused {op} {to} rank 0, tag 3, at {place(_message, '# refuses')}: [INVALID:LAYOUT] expected "
        "tensor to be dense, got torch.sparse_coo",
        f"  Next: fix the arguments on rank 1: pass tensor.to_dense(). {_GOES_ON}",
    ]


def _timeout(here: Here) -> str:
    here.init()
    if here.rank == 1:
        _refuse_root(default_group())
        here.hear()
        return ""
    with pytest.raises(phalanx.CallTimeout) as caught:
        default_group().broadcast(torch.ones(2), root=1, timeout=timedelta(seconds=1)).wait()
    here.tell()
    return str(caught.value)


def test_a_timeout_tells_it(tmp_path: Path) -> None:
    world = World(_timeout, 3, tmp_path)
    world.all_told(0, 2)
    world.tell(1)
    ends = world.ends()
    for rank in (0, 2):
        lines = ends[rank].value.splitlines()
        assert lines[0].endswith("rank 1 did not come")
        assert lines[1] == _refused_root(1, 3)
        assert lines[2].startswith("  rank 1 is in its own code, at ")
        assert lines[-1] == f"  Next: fix the arguments on rank 1: {_ROOT_HINT}"


def _leave(here: Here, way: str) -> str:
    """Rank 1 leaves when the others have been told that it has refused the call in which they wait."""
    here.init()
    gate = Gate(here)
    _Said(lambda: gate.open(str(here.rank)))
    if here.rank == 1:
        with pytest.raises(phalanx.InvalidCall) as refused:
            default_group().broadcast(torch.ones(2), root=7)  # refuses
        gate.wait("0", "2")
        if way == "exit":
            os._exit(0)
        if way == "destroy":
            dist.destroy_process_group()
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exception":
            raise LookupError("no shard")
        if way == "same exception":
            raise refused.value
        return ""
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.broadcast(torch.ones(2), 1)
    return str(caught.value)


@pytest.mark.parametrize("way", ["exit", "destroy", "kill", "exception", "same exception"])
def test_a_rank_that_leaves_after_it_was_warned_of(tmp_path: Path, way: str) -> None:
    world = World(_leave, 3, tmp_path, way, way=["call", "child" if "exception" in way else "call", "call"])
    ends = world.ends()
    refused = (
        f"  rank 1 refused broadcast, seq 1, at {place(_leave, '# refuses')}: [INVALID:ROOT] expected a root between "
        "0 and 2, got 7"
    )
    for rank in (0, 2):
        assert ends[rank].error is None, ends[rank].trace
        lines = ends[rank].value.splitlines()
        if way == "same exception":
            # It is told once.
            assert "[INVALID:ROOT]" in lines[1]
            assert lines[1].startswith("  the first exception of rank 1: ")
            assert refused not in lines
        else:
            assert lines.count(refused) == 1


def _another_call(here: Here) -> str:
    """Rank 1 makes another call when the others have been told."""
    here.init()
    gate = Gate(here)
    _Said(lambda: gate.open(str(here.rank)))
    if here.rank == 1:
        _refuse_root(default_group())
        gate.wait("0", "2")
    with pytest.raises(phalanx.Mismatch) as caught:
        dist.all_reduce(torch.ones(2)) if here.rank == 1 else dist.broadcast(torch.ones(2), 1)
    gate.open(f"raised {here.rank}")
    gate.wait("raised 0", "raised 1", "raised 2")
    return str(caught.value)


def test_another_call_after_the_warning_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for text in values(_another_call, 3, tmp_path):
        assert _refused_root(1, 3) in text.splitlines()


def _stale(here: Here) -> tuple[list[str], str]:
    """Rank 1 refuses a call, makes it, and does not come to a later one."""
    os.environ["PHALANX_SLOW"] = "0.7"
    here.init()
    if here.rank == 1:
        _refuse_root(default_group())
    dist.broadcast(torch.ones(2), 1)
    dist.barrier()
    said = _Said()
    default_group().set_timeout(timedelta(seconds=2))
    if here.rank == 1:
        here.hear()
        return said.texts, ""
    with pytest.raises(phalanx.CallTimeout) as caught:
        dist.barrier()
    here.tell()
    return said.texts, str(caught.value)


def test_a_call_that_went_on_is_not_told_of_later(tmp_path: Path) -> None:
    world = World(_stale, 2, tmp_path)
    world.told(0)
    world.tell(1)
    ends = world.ends()
    assert [end.error for end in ends] == [None, None], [end.trace for end in ends]
    texts, error = ends[0].value
    assert len(texts) == 1
    assert "refused" not in f"{texts}{error}"


def _long_text(here: Here) -> str:
    here.init()
    if here.rank == 1:
        with contextlib.suppress(phalanx.InvalidCall):
            nonsense: Any = "\x1f\u2028é\n\U0001f600" * 5000
            default_group().allreduce(torch.ones(2), nonsense)
        os._exit(0)
    with pytest.raises(phalanx.PeerLost) as caught:
        dist.all_reduce(torch.ones(2))
    return str(caught.value)


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    text = run(_long_text, 2, tmp_path)[0].value
    (line,) = [line for line in text.splitlines() if line.startswith("  rank 1 refused all_reduce, seq 1, at ")]
    assert "[INVALID:REDUCE_OP] expected a torch.distributed.ReduceOp, got " in line
    assert len(line) < 1000
