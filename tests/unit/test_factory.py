"""Another kind of transport joins by the factory; groups do not know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ReduceOp

import phalanx
from phalanx.collectives import all_reduce
from phalanx.errors import CallTimeout
from phalanx.group.group import Group
from phalanx.statistics import OpStatistics
from phalanx.transports import factory, levels
from phalanx.transports.base import BaseTransport, Exchange, Pending, Transport
from phalanx.transports.factory import Request
from phalanx.transports.observers import Observer, observing
from phalanx.transports.refusals import Refusal
from phalanx.transports.wrapping import TransportAround
from phalanx.types import Call, GroupInfo, carry_out


class _Loopback(BaseTransport):
    """A group of one process, without shared memory: every call means what it means for one rank."""

    kind = "loopback"
    spans_processes = True
    level = levels.ON
    has_left = False
    state = "open"

    def __init__(self, info: GroupInfo) -> None:
        self.info = info
        self.calls: list[str] = []

    @property
    def seq(self) -> int:
        return len(self.calls)

    def run(self, call: Call, timeout: float) -> None:
        self.calls.append(call.op)
        carry_out([call])

    def start(self, call: Call, timeout: float) -> Pending | None:
        self.run(call, timeout)
        return None

    def start_message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float) -> Pending | None:
        raise CallTimeout("no peer", group=self.info.name)

    def split(
        self, info: GroupInfo | None, members: Sequence[int], propose: Exchange, exchange: Exchange
    ) -> Transport | None:
        propose("")
        exchange("")
        return None if info is None else _Loopback(info)

    def refuse(self, refusal: Refusal) -> None: ...
    def catch_up(self, tensors: Sequence[torch.Tensor]) -> None: ...
    def abort(self, reason: str) -> None: ...
    def say_last_words(self, text: str) -> None: ...
    def complete(self, patience: float) -> None: ...

    def close(self, exiting: bool = False) -> None:
        self.has_left = True

    def statistics(self) -> dict[str, OpStatistics]:
        return {}


@pytest.fixture
def made() -> Iterator[list[_Loopback]]:
    """The transports that were made for groups whose names begin with "loop"."""
    found: list[_Loopback] = []

    def make(request: Request) -> Transport | None:
        if not request.info.name.startswith("loop"):
            return None
        found.append(_Loopback(request.info))
        return found[-1]

    with factory.registered(make):
        yield found


def test_a_group_runs_on_a_transport_that_was_registered(made: list[_Loopback]) -> None:
    with phalanx.new_group(store=HashStore(), rank=0, world_size=1, name="loop") as group:
        assert "loopback" in repr(group)
        tensor = torch.ones(3)
        group.all_reduce(tensor).wait()
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
        part = group.split_group([0])
        assert part is not None
        part.barrier().wait()
        part.shutdown()
    assert made[0].calls == ["all_reduce", "all_reduce", "split_group", "split_group"]
    assert made[0].has_left


def test_other_groups_are_not_concerned(made: list[_Loopback]) -> None:
    with phalanx.new_group(store=HashStore(), rank=0, world_size=1, name="other") as group:
        assert "shm" in repr(group)
    assert not made


def test_the_last_registered_kind_is_asked_first(made: list[_Loopback]) -> None:
    def make(request: Request) -> Transport | None:
        return _Loopback(request.info)

    with factory.registered(make):
        Group.join(HashStore(), GroupInfo("loop", 0, 1), 1.0).close()
    assert not made
    Group.join(HashStore(), GroupInfo("loop", 0, 1), 1.0).close()
    assert len(made) == 1


class _Seen(Observer):
    wants_calls = True

    def __init__(self) -> None:
        self.events: list[str] = []

    def joined(self, transport: Any, info: GroupInfo, folder: str) -> None:
        self.events.append(f"joined {info.name}")

    def call_began(self, info: GroupInfo, op: str) -> None:
        self.events.append(f"{op} of {info.name} began")

    def call_ended(self, info: GroupInfo, op: str) -> None:
        self.events.append(f"{op} of {info.name} ended")


def test_an_observer_is_told_of_calls_whatever_the_transport_is(made: list[_Loopback]) -> None:
    for name in ("loop", "shared"):
        seen = _Seen()
        with observing(seen), phalanx.new_group(store=HashStore(), rank=0, world_size=1, name=name) as group:
            group.all_reduce(torch.ones(2)).wait()
            assert group._group.quick is None
        assert seen.events == [f"joined {name}", f"all_reduce of {name} began", f"all_reduce of {name} ended"]


def test_groups_made_without_such_an_observer_carry_out_calls_natively() -> None:
    with phalanx.new_group(store=HashStore(), rank=0, world_size=1) as group:
        assert group._group.quick is not None
        seen = _Seen()
        with observing(seen):
            group.all_reduce(torch.ones(2)).wait()
        assert not seen.events


def test_a_wrapper_may_raise_before_a_call() -> None:
    class Refusing(TransportAround):
        def run(self, call: Call, timeout: float) -> None:
            raise OSError("a fault")

    with factory.wrapped_with(lambda transport, info: Refusing(transport).as_transport()):
        group = Group.join(HashStore(), GroupInfo("wrapped", 0, 1), 1.0)
    with pytest.raises(OSError, match="a fault"):
        group.run(all_reduce.build(group.info, torch.ones(1), ReduceOp.SUM.value, 1.0))
    group.close()
