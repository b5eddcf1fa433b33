"""Timeouts: which make sense, and that every entry point says so in the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Here, values

import phalanx
import phalanx.testing as pt
from default_group import default_group
from phalanx.testing.options import Options

YEARS = timedelta(days=365)
# What torch makes of the extremes of timedelta on the way through its options and stores.
WRAPPED_MAX = dist.AllreduceOptions()
WRAPPED_MAX.timeout = timedelta.max

FINE: list[Any] = [timedelta(seconds=20), timedelta.max, timedelta.max - YEARS, 40 * YEARS, WRAPPED_MAX.timeout]
ZERO = timedelta(0)
BELOW: list[Any] = [timedelta(microseconds=-1), timedelta(seconds=-1), -40 * YEARS, timedelta.min]
# torch's word for none in an options object, and in no other place.
NONE_IN_OPTIONS = timedelta(milliseconds=-1)
STRANGE: list[Any] = [5, 5.0, 0, -1, True, math.inf, math.nan, "5", [timedelta(1)], object()]

Entry = Callable[[Any, Any], Any]


def _ones(*sizes: int) -> Any:
    made = [torch.ones(size) for size in sizes or (1,)]
    return made if sizes else made[0]


def _sent(group: Any) -> Any:
    group.send([torch.ones(1)], 0, 0)
    return [torch.zeros(1)]


# The calls of a group of one rank that take a timeout of their own.
CALLS: dict[str, Entry] = {
    "allreduce": lambda g, t: g.allreduce(_ones(), timeout=t),
    "allreduce, strided": lambda g, t: g.allreduce(torch.ones(4)[::2], timeout=t),
    "allreduce, sparse": lambda g, t: g.allreduce(torch.eye(2).to_sparse(), timeout=t),
    "reduce": lambda g, t: g.reduce(_ones(), 0, timeout=t),
    "broadcast": lambda g, t: g.broadcast(_ones(), 0, timeout=t),
    "allgather": lambda g, t: g.allgather(_ones(1), _ones(), timeout=t),
    "allgather, in place of options": lambda g, t: g.allgather([_ones(1)], _ones(1), t),
    "all_gather_single": lambda g, t: g.all_gather_single(_ones(), _ones(), timeout=t),
    "gather": lambda g, t: g.gather(_ones(1), _ones(), 0, timeout=t),
    "scatter": lambda g, t: g.scatter(_ones(), _ones(1), 0, timeout=t),
    "reduce_scatter": lambda g, t: g.reduce_scatter(_ones(), _ones(1), timeout=t),
    "reduce_scatter_single": lambda g, t: g.reduce_scatter_single(_ones(), _ones(), timeout=t),
    "alltoall": lambda g, t: g.alltoall(_ones(1), _ones(1), timeout=t),
    "all_to_all_single": lambda g, t: g.all_to_all_single(_ones(), _ones(), timeout=t),
    "barrier": lambda g, t: g.barrier(timeout=t),
    "barrier, in place of options": lambda g, t: g.barrier(t),
    "monitored_barrier": lambda g, t: g.monitored_barrier(t),
    "recv": lambda g, t: g.recv(_sent(g), 0, 0, timeout=t),
}


def _with(kind: Any, timeout: timedelta) -> Any:
    opts = kind()
    opts.timeout = timeout
    return opts


OPTIONS: dict[str, Entry] = {
    "allreduce": lambda g, t: g.allreduce([_ones()], _with(dist.AllreduceOptions, t)),
    "allreduce_coalesced": lambda g, t: g.allreduce_coalesced(_ones(1, 2), _with(dist.AllreduceCoalescedOptions, t)),
    "broadcast": lambda g, t: g.broadcast([_ones()], _with(dist.BroadcastOptions, t)),
    "reduce": lambda g, t: g.reduce([_ones()], _with(dist.ReduceOptions, t)),
    "scatter": lambda g, t: g.scatter(_ones(1), [_ones(1)], _with(dist.ScatterOptions, t)),
    "barrier": lambda g, t: g.barrier(_with(dist.BarrierOptions, t)),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[phalanx.ProcessGroup]:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="alone")
    yield group
    group.shutdown()


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _is_refused(entry: Entry, group: Any, timeout: Any) -> str:
    with pytest.raises(phalanx.InvalidCall) as caught:
        entry(group, timeout)
    assert caught.value.code == "INVALID:TIMEOUT"
    assert caught.value.hint
    return caught.value.message


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_a_timeout_of_their_own(alone: phalanx.ProcessGroup, name: str) -> None:
    entry = CALLS[name]
    seq = alone._get_sequence_number_for_group()
    for timeout in [ZERO, NONE_IN_OPTIONS, *BELOW]:
        assert _is_refused(entry, alone, timeout).startswith("expected a timeout above zero, got ")
    for timeout in STRANGE:
        assert _is_refused(entry, alone, timeout) == f"expected a timeout as a datetime.timedelta, got {timeout!r}"
    # Nothing was begun.
    assert alone._get_sequence_number_for_group() == seq
    for timeout in FINE:
        _wait(entry(alone, timeout))
    _wait(entry(alone, None))


@pytest.mark.parametrize("name", OPTIONS)
def test_timeouts_in_options(alone: phalanx.ProcessGroup, name: str) -> None:
    entry = OPTIONS[name]
    for timeout in [ZERO, *BELOW]:
        assert _is_refused(entry, alone, timeout).startswith("expected a timeout above zero, got ")
    for timeout in (timedelta(seconds=20), timedelta.max, 40 * YEARS):
        _wait(entry(alone, timeout))
    _wait(entry(alone, NONE_IN_OPTIONS))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(CALLS)), timeout=st.timedeltas() | st.floats() | st.integers() | st.text())
def test_any_timeout_of_any_call(name: str, timeout: Any) -> None:
    group = _kept.setdefault("group", phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="any"))
    if isinstance(timeout, timedelta) and timeout > ZERO:
        _wait(CALLS[name](group, timeout))
    else:
        _is_refused(CALLS[name], group, timeout)


_kept: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("timeout", "hint"),
    [
        (5, "pass datetime.timedelta(seconds=5)"),
        (0.5, "pass datetime.timedelta(seconds=0.5)"),
        (math.inf, "pass datetime.timedelta.max, which means no limit"),
        (10**30, "pass datetime.timedelta.max, which means no limit"),
        *((each, "pass a positive datetime.timedelta; timedelta.max means no limit") for each in (True, -1, 1e-9, "x")),
        (math.nan, "pass a positive datetime.timedelta; timedelta.max means no limit"),
    ],
)
def test_hints_are_right_themselves(alone: phalanx.ProcessGroup, timeout: Any, hint: str) -> None:
    with pytest.raises(phalanx.InvalidCall) as caught:
        alone.barrier(timeout=timeout)
    assert caught.value.hint == hint


def test_waits(alone: phalanx.ProcessGroup) -> None:
    under_way = alone.recv([torch.zeros(1)], 0, 5)
    done = alone.allreduce(torch.ones(1))
    coalesced = _coalesced(alone)
    works = [under_way, done, coalesced]
    for work in works:
        for timeout in BELOW:
            assert "expected a timeout above zero" in _is_refused(lambda w, t: w.wait(t), work, timeout)
        for timeout in STRANGE:
            assert "expected a timeout as a" in _is_refused(lambda w, t: w.wait(t), work, timeout)
    with pytest.raises(phalanx.CallTimeout):
        under_way.wait(timedelta(milliseconds=1))
    alone.send([torch.ones(1)], 0, 5)
    for work in works:
        # Zero is torch's word for none.
        for timeout in (*FINE, ZERO, None):
            assert work.wait(timeout)


def _coalesced(group: Any) -> Any:
    group._start_coalescing(torch.device("cpu"))
    group.recv([torch.zeros(1)], 0, 6)
    works = group._end_coalescing(torch.device("cpu"))
    group.send([torch.ones(1)], 0, 6)
    return works


@pytest.mark.parametrize("timeout", [ZERO, *BELOW, *STRANGE])
def test_groups_refuse(alone: phalanx.ProcessGroup, timeout: Any) -> None:
    for entry in (
        lambda: phalanx.ProcessGroup(dist.HashStore(), 0, 1, timeout=timeout),
        lambda: alone.set_timeout(timeout),
        lambda: alone._set_default_timeout(timeout),
    ):
        with pytest.raises(phalanx.GroupError, match="expected a timeout above zero"):
            entry()


def test_a_number_of_seconds_gets_the_timedelta_as_a_hint(alone: phalanx.ProcessGroup) -> None:
    with pytest.raises(phalanx.GroupError, match=re.escape("Next: pass datetime.timedelta(seconds=5.0)")):
        alone.set_timeout(5.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("Next: pass datetime.timedelta(seconds=5)")):
        alone.barrier(timeout=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", FINE)
def test_groups_take(timeout: Any) -> None:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1, timeout=timeout)
    group.set_timeout(timeout)
    group.allreduce(torch.ones(1)).wait()
    group.shutdown()


def _waits_without_limit(here: Here) -> list[float]:
    """A call that waits for its peer, under timeouts that would overflow a clock."""
    here.init()
    group = default_group()
    group.set_timeout(timedelta.max)
    store = dist.distributed_c10d._get_default_store()
    got = []
    for number, timeout in enumerate([None, timedelta.max, 40 * YEARS]):
        tensor = torch.ones(1)
        if here.rank == 1:
            store.wait([f"waits {number}"])
        work = group.allreduce([tensor], timeout=timeout)
        if here.rank == 0:
            with pytest.raises(phalanx.CallTimeout):
                work.wait(timedelta(milliseconds=5))
            store.set(f"waits {number}", "")
        work.wait(timedelta.max)
        got.append(tensor.item())
    return got


def test_calls_without_a_limit_wait_for_their_peers(tmp_path: Path) -> None:
    assert values(_waits_without_limit, 2, tmp_path) == [[2.0] * 3] * 2


def _init_with(here: Here, timeout: timedelta) -> float:
    dist.init_process_group(
        "phalanx", init_method=f"file://{here.folder}/own", rank=here.rank, world_size=2, timeout=timeout
    )
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.new_group(timeout=timeout)
    dist.destroy_process_group()
    return tensor.item()


def test_torch_is_given_a_timeout_that_it_can_t_count(tmp_path: Path) -> None:
    assert values(_init_with, 2, tmp_path, timedelta.max) == [2.0, 2.0]


def test_a_store_whose_timeout_is_none(tmp_path: Path) -> None:
    """torch's word for a store that waits for ever is zero."""
    assert values(_store_timeouts, 2, tmp_path) == [[2.0] * 3] * 2


def _store_timeouts(here: Here) -> list[float]:
    got = []
    for number, timeout in enumerate([ZERO, timedelta.max, 40 * YEARS]):
        store = dist.FileStore(f"{here.folder}/store{number}", 2)
        store.set_timeout(timeout)
        group = phalanx.ProcessGroup(store, here.rank, 2, name=f"group{number}")
        tensor = torch.ones(1)
        group.allreduce(tensor).wait()
        group.shutdown()
        got.append(tensor.item())
    return got


def test_threads() -> None:
    def main(rank: int, world: Any) -> list[float]:
        group = default_group()
        got = []
        for timeout in (None, timedelta.max, timedelta(seconds=5), 40 * YEARS):
            tensor = torch.ones(1)
            work = group.allreduce([tensor], timeout=timeout)
            work.wait(timeout)
            got.append(tensor.item())
        for timeout in (ZERO, *BELOW, *STRANGE):
            _is_refused(CALLS["allreduce"], group, timeout)
        return got

    for timeout in (None, timedelta.max, timedelta(seconds=5)):
        assert pt.run(main, ranks=2, timeout=timeout) == [[2.0] * 4] * 2


def test_threads_without_a_limit_find_a_deadlock() -> None:
    def main(rank: int, world: Any) -> None:
        if rank == 0:
            default_group().allreduce([torch.ones(1)], timeout=timedelta.max).wait(timedelta.max)
        else:
            dist.recv(torch.ones(1), 0)

    with pytest.raises(phalanx.Deadlock):
        pt.run(main, ranks=2, timeout=timedelta.max)


@pytest.mark.parametrize("timeout", [ZERO, *BELOW, *STRANGE])
def test_runs_refuse(timeout: Any) -> None:
    with pytest.raises(ValueError, match="expected a timeout"):
        Options(lambda rank, world: None, 1, timeout=timeout)
