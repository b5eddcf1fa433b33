"""A group as an object: what its repr says, what `with` does, and what every method says once it can't be used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_methods import METHODS, Arguments, Method, group_of
from ranks import Gate, Here, run, values

import phalanx
import phalanx.testing as pt


def _calling(method: Method, async_op: bool) -> Callable[[phalanx.ProcessGroup], Any]:
    return lambda group: method.call(group, Arguments(group.rank()), {"async_op": async_op})


_CALLS: dict[str, Callable[[phalanx.ProcessGroup], Any]] = {
    "monitored_barrier": lambda g: g.monitored_barrier(),
    **{
        f"{name}, async_op={async_op}": _calling(method, async_op)
        for name, method in METHODS.items()
        for async_op in (True, False)
    },
}


def _codes(group: phalanx.ProcessGroup, num: int = 2) -> dict[str, list[str]]:
    """What every method raises, time after time."""
    codes: dict[str, list[str]] = {}
    for name, call in _CALLS.items():
        for _ in range(num):
            try:
                call(group)
            except phalanx.PhalanxError as error:
                codes.setdefault(name, []).append(f"{type(error).__name__} {error.code}")
            else:
                codes.setdefault(name, []).append("nothing")
    return codes


def _all(code: str, num: int = 2) -> dict[str, list[str]]:
    return {name: [f"GroupError {code}"] * num for name in _CALLS}


# Ways to a state, and how the reprs of the two ranks end then.


def _broken_by_mismatch(group: phalanx.ProcessGroup) -> None:
    with pytest.raises(phalanx.Mismatch):
        group.all_reduce(torch.ones(1 + group.rank()), async_op=False)


def _broken_by_timeout(group: phalanx.ProcessGroup) -> None:
    if group.rank() == 0:
        with pytest.raises(phalanx.CallTimeout):
            group.barrier(timeout=timedelta(milliseconds=20), async_op=False)


def _broken_by_message(group: phalanx.ProcessGroup) -> None:
    work = group.send(torch.ones(3), 0) if group.rank() else group.recv(torch.ones(4), 1)
    with contextlib.suppress(phalanx.Mismatch):
        work.wait()


def _aborted(group: phalanx.ProcessGroup) -> None:
    if group.rank() == 1:
        group.abort()


def _broken_by_leaving(group: phalanx.ProcessGroup) -> None:
    if group.rank() == 1:
        group.shutdown()
    else:
        with pytest.raises(phalanx.PeerLost):
            group.barrier(async_op=False)


_STATES: dict[str, tuple[Callable[[phalanx.ProcessGroup], None], list[str]]] = {
    "open": (lambda group: group.monitored_barrier(), ["seq 1, open"] * 2),
    "left": (lambda group: group.shutdown(), ["seq 0, left"] * 2),
    "mismatch": (_broken_by_mismatch, ["seq 1, broken: ranks disagree about all_reduce, seq 1"] * 2),
    "timeout": (
        _broken_by_timeout,
        ["seq 1, broken: timeout of barrier, seq 1", "seq 0, broken: timeout of barrier, seq 1"],
    ),
    "message": (_broken_by_message, ["seq 0, broken: a message does not fit its receive"] * 2),
    "aborted": (_aborted, ["seq 0, broken: aborted by rank 1"] * 2),
    "left by a peer": (_broken_by_leaving, ["seq 1, broken: rank 1 left", "seq 0, left"]),
}


def _shown_here(here: Here) -> dict[str, str]:
    shown, gate = {}, Gate(here)

    def meet(name: str) -> None:
        gate.open(f"{name} {here.rank}")
        gate.wait(*(f"{name} {rank}" for rank in range(here.size)))

    for index, (name, (bring_about, _)) in enumerate(_STATES.items()):
        group = phalanx.ProcessGroup(here.store(f"store{index}"), here.rank, here.size, name=f"group {index}")
        bring_about(group)
        meet(f"{name} done")
        shown[name] = repr(group)
        meet(f"{name} shown")
        group.shutdown()
    return shown


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return values(_shown_here, 2, tmp_path_factory.mktemp("shown"))


@pytest.mark.parametrize("name", _STATES)
def test_the_repr_shows_the_state(name: str, shown: list[dict[str, str]]) -> None:
    bring_about, states = _STATES[name]

    def show(rank: int, world: pt.World) -> str:
        group = group_of(rank, world)
        bring_about(group)
        world.store.set(f"over {rank}", "")
        world.store.wait(["over 0", "over 1"])
        return repr(group)

    index = list(_STATES).index(name)
    for rank, state in enumerate(states):
        assert shown[rank][name] == f"<phalanx.ProcessGroup 'group {index}' rank {rank} of 2, shm, {state}>"
    assert pt.run(show, 2, init=False) == [
        f"<phalanx.ProcessGroup 'group' rank {rank} of 2, threads, {state}>" for rank, state in enumerate(states)
    ]


def test_the_repr_of_a_group_whose_rank_died(tmp_path: Path) -> None:
    assert (
        values(_show_killed, 2, tmp_path)[0]
        == "<phalanx.ProcessGroup 'g' rank 0 of 2, shm, seq 1, broken: rank 1 died>"
    )


def _show_killed(here: Here) -> str:
    if here.rank == 1:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return ""
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size, name="g")
    if here.rank == 1:
        os._exit(3)
    with pytest.raises(phalanx.PeerLost):
        group.barrier(async_op=False)
    return repr(group)


def test_the_repr_of_a_group_that_was_not_made() -> None:
    group = phalanx.ProcessGroup.__new__(phalanx.ProcessGroup)
    assert repr(group) == "<phalanx.ProcessGroup that was not made>"


def test_the_repr_has_one_line() -> None:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="two\nlines")
    assert repr(group) == r"<phalanx.ProcessGroup 'two\nlines' rank 0 of 1, shm, seq 0, open>"


# After the end.


def _left_here(here: Here) -> tuple[dict[str, list[str]], str]:
    with phalanx.ProcessGroup(here.store(), here.rank, here.size) as group:
        group.barrier(async_op=False)
    return _codes(group), repr(group).rpartition(", ")[2]


def test_no_method_works_after_shutdown(tmp_path: Path) -> None:
    assert values(_left_here, 2, tmp_path) == [(_all("GROUP:CLOSED"), "left>")] * 2


def test_the_error_after_shutdown_names_it() -> None:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="alone")
    group.shutdown()
    with pytest.raises(phalanx.GroupError) as caught:
        group.barrier()
    assert caught.value.hint == "make a new group, or move this call before shutdown() or destroy_process_group()"


def test_no_method_works_after_shutdown_in_threads() -> None:
    def use(rank: int, world: pt.World) -> dict[str, list[str]]:
        with group_of(rank, world) as group:
            group.barrier(async_op=False)
        return _codes(group)

    assert pt.run(use, 2, init=False) == [_all("GROUP:CLOSED")] * 2


def _in_child(group: phalanx.ProcessGroup) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = repr((_codes(group, 1) == _all("GROUP:FORKED", 1), repr(group).rpartition(", ")[2]))
            group.shutdown()
        except BaseException as error:
            text = repr(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def _forked_here(here: Here) -> tuple[str, float]:
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size)
    told = _in_child(group)
    tensor = torch.ones(1)
    group.all_reduce(tensor, async_op=False)
    return told, tensor.item()


_FORKED = "(True, 'in a forked child>')"


def test_no_method_works_in_a_forked_child(tmp_path: Path) -> None:
    assert values(_forked_here, 2, tmp_path) == [(_FORKED, 2.0)] * 2


@pytest.mark.filterwarnings("ignore:This process")
def test_no_method_works_in_a_forked_child_of_threads() -> None:
    def fork(rank: int, world: pt.World) -> tuple[str, float]:
        group = group_of(rank, world)
        told = _in_child(group)
        tensor = torch.ones(1)
        group.all_reduce(tensor, async_op=False)
        return told, tensor.item()

    assert pt.run(fork, 2, init=False) == [(_FORKED, 2.0)] * 2


# `with`.


def _raise_inside(group: phalanx.ProcessGroup) -> str:
    """Rank 1 leaves with an exception, for which rank 0 does not have to wait."""
    try:
        with group as inside:
            assert inside is group
            if group.rank() == 1:
                raise LookupError("no more shards")
            group.barrier(async_op=False)
    except (LookupError, phalanx.PeerLost) as error:
        return str(error)
    return ""


def _raise_inside_here(here: Here) -> tuple[str, str]:
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size)
    return _raise_inside(group), repr(group).rpartition(", ")[2]


def test_peers_are_told_of_the_exception_that_passes(tmp_path: Path) -> None:
    def in_threads(rank: int, world: pt.World) -> tuple[str, str]:
        group = group_of(rank, world)
        return _raise_inside(group), repr(group).rpartition(", ")[2]

    for ends in (values(_raise_inside_here, 2, tmp_path), pt.run(in_threads, 2, init=False)):
        assert [state for _, state in ends] == ["left>"] * 2
        assert "the first exception of rank 1: LookupError: no more shards" in ends[0][0]
        assert ends[1][0] == "no more shards"


def _return_inside(here: Here) -> float:
    """The calls in flight are completed before the group is left."""
    tensor = torch.full((3,), here.rank + 1.0)
    with phalanx.ProcessGroup(here.store(), here.rank, here.size) as group:
        group.all_reduce(tensor)
    return tensor[0].item()


def test_with_completes_calls_in_flight(tmp_path: Path) -> None:
    ends = run(_return_inside, 2, tmp_path)
    assert [end.value for end in ends] == [3.0, 3.0]
