"""A rank that is a thread refuses a call: ranks that wait for it are told, at the same moment in every run."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt

_SCHEDULES = ["round robin", "random", "free"]
_GOES_ON = "The call completes if it is repeated there with valid arguments before the timeout."
_ROOT_HINT = "give the root as a rank within this group (dist.get_group_rank turns a global rank into one)"


def _place(function: Callable[..., Any], mark: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (number,) = [number for number, line in enumerate(lines, first) if line.rstrip().endswith(f"# {mark}")]
    return f"{os.path.relpath(__file__)}:{number}, in {function.__name__}"


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return sorted(record.getMessage() for record in caplog.records if record.name == "phalanx")


def _refuse_root(world: pt.World) -> None:
    with contextlib.suppress(phalanx.InvalidCall):
        world.group.broadcast(torch.ones(2), root=7)  # refused


def _waits(rank: int) -> str:
    """What a rank is told that waits in the first broadcast."""
    place = _place(_refuse_root, "refused")
    return "\n".join(
        [
            f"broadcast, seq 1, group 'default_pg', rank {rank}: rank 1 refused the call that this rank waits for",
            f"  rank 1 refused broadcast, seq 1, at {place}: [INVALID:ROOT] expected a root between 0 and 2, got 7",
            f"  Next: fix the arguments on rank 1: {_ROOT_HINT}. {_GOES_ON}",
        ]
    )


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_ranks_that_wait_are_told_once_and_go_on(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    class Told(logging.Handler):
        """Lets rank 1 go on when the others have been told."""

        num = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.num += 1
            if self.num == 2:
                stores[0].set("told", "")

    stores: list[Any] = []

    def refuse(rank: int, world: pt.World) -> list[float]:
        stores.append(world.store)
        if rank == 1:
            _refuse_root(world)
            world.store.wait(["told"])
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 1)
        dist.barrier()
        return tensor.tolist()

    handler = Told()
    logging.getLogger("phalanx").addHandler(handler)
    try:
        assert pt.run(refuse, 3, schedule=schedule) == [[1.0, 1.0]] * 3
    finally:
        logging.getLogger("phalanx").removeHandler(handler)
    assert _warnings(caplog) == [_waits(0), _waits(2)]


@pytest.mark.parametrize("schedule", ["round robin", "random"])
def test_a_rank_that_tries_again_alarms_nobody(schedule: str, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(rank: int, world: pt.World) -> None:
        for _ in range(3):
            if rank == 1:
                _refuse_root(world)
            work = dist.broadcast(torch.ones(2), 1, async_op=True)
            if rank == 2:
                # The others wait for longer than it takes to be told.
                world.store.set_timeout(timedelta(seconds=5))
                with pytest.raises(dist.DistStoreError):
                    world.store.wait(["never"])
            assert work is not None
            work.wait()
            dist.barrier()

    pt.run(refuse, 3, schedule=schedule)
    assert _warnings(caplog) == []


@pytest.mark.parametrize("schedule", ["round robin", "random"])
def test_a_timeout_tells_it(schedule: str) -> None:
    def refuse(rank: int, world: pt.World) -> str:
        dist.barrier()
        if rank == 1:
            with contextlib.suppress(phalanx.InvalidCall):
                dist.all_gather(list(torch.empty(2, 1)), torch.ones(1))  # list
            world.store.wait(["0", "2"])
            return ""
        with pytest.raises(phalanx.CallTimeout) as caught:
            world.group.allgather(list(torch.empty(3, 1)), torch.ones(1), timeout=timedelta(seconds=2)).wait()
        world.store.set(str(rank), "")
        return str(caught.value)

    texts = pt.run(refuse, 3, schedule=schedule)
    for rank in (0, 2):
        lines = texts[rank].splitlines()
        assert lines[0].endswith("rank 1 did not come")
        assert lines[1] == (
            f"  rank 1 refused all_gather, seq 2, at {_place(refuse, 'list')}: [INVALID:LIST] expected 3 tensors in "
            "outputs, one a rank, got 2"
        )
        assert lines[-1] == (
            "  Next: fix the arguments on rank 1: give outputs one entry for each of the 3 ranks of the group"
        )


def test_a_wait_that_is_given_up_tells_it() -> None:
    def refuse(rank: int, world: pt.World) -> str:
        if rank == 1:
            _refuse_root(world)
            world.store.wait(["told"])
        tensor = torch.ones(2)
        work = dist.broadcast(tensor, 1, async_op=True)
        assert work is not None
        text = ""
        if rank == 0:
            with pytest.raises(phalanx.CallTimeout) as caught:
                work.wait(timedelta(seconds=1))
            text = str(caught.value)
            world.store.set("told", "")
        work.wait()
        return text

    lines = pt.run(refuse, 3)[0].splitlines()
    assert lines[1:] == [_waits(0).splitlines()[1], f"  Next: fix the arguments on rank 1: {_ROOT_HINT}"]


def test_a_deadlock_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(rank: int, world: pt.World) -> None:
        if rank == 0:
            dist.recv(torch.empty(2), 1, tag=3)
        else:
            with contextlib.suppress(phalanx.InvalidCall):
                dist.send(torch.ones(2).to_sparse(), 0, tag=3)  # sparse
        dist.barrier()

    told = (
        f"  rank 1 refused send to rank 0, tag 3, at {_place(refuse, 'sparse')}: [INVALID:LAYOUT] expected tensor to "
        "be dense, got torch.sparse_coo"
    )
    with pytest.raises(phalanx.Deadlock) as caught:
        pt.run(refuse, 2)
    assert caught.value.code == "DEADLOCK:ORDER"
    assert told in str(caught.value).splitlines()
    (warning,) = _warnings(caplog)
    assert warning.splitlines()[:2] == [
        "recv, seq 1, group 'default_pg', rank 0: rank 1 refused the call that this rank waits for",
        told,
    ]


def test_messages_that_nobody_waits_for_alarm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Another tag, another peer, another direction, and a message that was sent after all."""

    def refuse(rank: int, world: pt.World) -> None:
        bad = torch.ones(2).to_sparse()
        if rank == 1:
            for send, peer, tag in [(True, 0, 4), (True, 2, 3), (False, 0, 3), (True, 0, 3)]:
                with contextlib.suppress(phalanx.InvalidCall):
                    dist.send(bad, peer, tag=tag) if send else dist.recv(bad, peer, tag=tag)
                if (send, peer, tag) == (True, 0, 3):
                    dist.isend(torch.ones(2), 0, tag=3)
                world.store.wait([f"{peer}{tag}{send}"])
        if rank == 0:
            for name in ("04True", "23True", "03False"):
                with pytest.raises(phalanx.CallTimeout):
                    world.group.recv([torch.empty(2)], 1, 8).wait(timedelta(seconds=2))
                world.store.set(name, "")
            dist.recv(torch.empty(2), 1, tag=3)
            world.store.set("03True", "")

    pt.run(refuse, 3)
    assert _warnings(caplog) == []


_FLOATS = torch.ones(2)
# Any: some of the arguments have a wrong type.
_SPELLINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "allreduce": ("all_reduce", lambda group: group.allreduce([_FLOATS], dist.ReduceOp.BAND)),
    "allreduce, a reduce op": ("all_reduce", lambda group: group.allreduce([_FLOATS], "sum")),
    "allreduce, a list": ("all_reduce", lambda group: group.allreduce([_FLOATS, _FLOATS])),
    "allreduce, a timeout": ("all_reduce", lambda group: group.allreduce(_FLOATS, timeout=5)),
    "allreduce, sparse": ("all_reduce", lambda group: group.allreduce([_FLOATS.to_sparse()], dist.ReduceOp.MAX)),
    "allreduce_coalesced": ("all_reduce", lambda group: group.allreduce_coalesced([])),
    "reduce": ("reduce", lambda group: group.reduce(_FLOATS, root="x")),
    "broadcast": ("broadcast", lambda group: group.broadcast(_FLOATS, root=5)),
    "allgather": ("all_gather", lambda group: group.allgather([[_FLOATS]], [_FLOATS])),
    "all_gather_single": ("all_gather", lambda group: group.all_gather_single(torch.ones(3), _FLOATS)),
    "_allgather_base": ("all_gather", lambda group: group._allgather_base(torch.ones(3), _FLOATS)),
    "allgather_coalesced": ("all_gather", lambda group: group.allgather_coalesced([[_FLOATS]], [_FLOATS])),
    "all_gather_single_coalesced": (
        "all_gather",
        lambda group: group.all_gather_single_coalesced([torch.ones(3)], [_FLOATS]),
    ),
    "gather": ("gather", lambda group: group.gather([], _FLOATS, root=9)),
    "scatter": ("scatter", lambda group: group.scatter(_FLOATS, [], root=9)),
    "reduce_scatter": ("reduce_scatter", lambda group: group.reduce_scatter(_FLOATS, [_FLOATS])),
    "reduce_scatter_single": (
        "reduce_scatter",
        lambda group: group.reduce_scatter_single(_FLOATS, torch.ones(3)),
    ),
    "reduce_scatter_single_coalesced": (
        "reduce_scatter",
        lambda group: group.reduce_scatter_single_coalesced([_FLOATS], [torch.ones(3)]),
    ),
    "all_to_all_single": ("all_to_all", lambda group: group.all_to_all_single(_FLOATS, _FLOATS, ["x"], [])),
    "alltoall": ("all_to_all", lambda group: group.alltoall([_FLOATS], [_FLOATS])),
    "barrier": ("barrier", lambda group: group.barrier(timeout=5)),
    "monitored_barrier": ("monitored_barrier", lambda group: group.monitored_barrier(5)),
    "send": ("send", lambda group: group.send([_FLOATS.to_sparse()], 0)),
    "recv": ("recv", lambda group: group.recv([_FLOATS, _FLOATS], 0)),
    "recv_anysource": ("recv", lambda group: group.recv_anysource([_FLOATS], tag=-1)),
}


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_every_spelling_leaves_a_note(spelling: str) -> None:
    op, call = _SPELLINGS[spelling]

    def refuse(rank: int, world: pt.World) -> str:
        if rank == 1:
            group = dist.group.WORLD
            assert isinstance(group, phalanx.ProcessGroup)
            with pytest.raises(phalanx.InvalidCall):
                call(group)
            return ""
        with pytest.raises(phalanx.PeerLost) as caught:
            dist.recv(torch.empty(5000), 1, tag=77)
        return str(caught.value)

    told = pt.run(refuse, 2)[0].splitlines()
    assert any(line.startswith(f"  rank 1 refused {op}") for line in told), told
