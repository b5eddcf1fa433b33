"""Integers of any class, and nonsense, wherever a number is expected: roots, peers, tags, splits, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Here, values

import phalanx
import phalanx.testing
from default_group import default_group


class _Index:
    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value

    # torch compares ranks itself.
    def __eq__(self, other: object) -> bool:
        return self._value == other

    __hash__ = None  # type: ignore[assignment]


# Ways to say a small integer.
INTEGERS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "bool": lambda value: bool(value) if value in (0, 1) else value,
    "numpy int64": numpy.int64,
    "numpy uint8": numpy.uint8,
    "numpy 0-dim array": numpy.array,
    "tensor": torch.tensor,
    "int8 tensor": lambda value: torch.tensor(value, dtype=torch.int8),
    "a class with __index__": _Index,
}


def _lists_of(make: Callable[[int], Any]) -> Callable[[list[int]], Any]:
    return lambda numbers: [make(n) for n in numbers]


# Ways to say a list of them.
LISTS: dict[str, Callable[[list[int]], Any]] = {
    **{f"list of {name}": _lists_of(make) for name, make in INTEGERS.items()},
    "tuple": tuple,
    "numpy array": numpy.array,
    "numpy int16 array": lambda numbers: numpy.array(numbers, dtype=numpy.int16),
    "numpy array of objects": lambda numbers: numpy.array(numbers, dtype=object),
    "1-D tensor": torch.tensor,
    "1-D int32 tensor": lambda numbers: torch.tensor(numbers, dtype=torch.int32),
    "torch.Size": torch.Size,
}
NONSENSE: list[Any] = [
    0.0,
    1.5,
    float("nan"),
    "0",
    b"0",
    0j,
    [0],
    (0,),
    {},
    {0: 1},
    object(),
    len,
    torch.tensor(0.0),
    torch.tensor([0, 1]),
    torch.tensor(0, device="meta"),
    torch.empty(0, dtype=torch.int64),
    numpy.float32(0),
    numpy.array([0, 1]),
    numpy.array(0.0),
    -7,
    2**70,
]
# A list, or what may stand for one.
NONSENSE_LISTS: list[Any] = [
    0,
    1.5,
    "3",
    {3},
    {3: 3},
    iter([3]),
    [3.0],
    [None],
    ["3"],
    [[3]],
    [torch.tensor(3.0)],
    [torch.tensor([1, 2])],
    [2, 1],
    [-3],
    [2**70],
    torch.tensor(3),
    torch.tensor([3.0]),
    torch.tensor([[3]]),
    torch.tensor([3], device="meta"),
    numpy.array([3.0]),
    numpy.array([[3]]),
    numpy.array(3),
    object(),
]

_Group = phalanx.ProcessGroup


def _message(group: _Group, send: Callable[[torch.Tensor], Any], receive: Callable[[torch.Tensor], Any]) -> None:
    """To oneself."""
    got = torch.zeros(3)
    send(torch.arange(3.0))
    receive(got).wait()
    assert got.tolist() == [0.0, 1.0, 2.0]


def _exchange(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    got = torch.zeros(3)
    call(got, torch.arange(3.0))
    assert got.tolist() == [0.0, 1.0, 2.0]


# Each takes a number for which 0 is right.
ONE: dict[str, Callable[[_Group, Any], Any]] = {
    "broadcast(root=)": lambda g, n: g.broadcast(torch.ones(3), root=n).wait(),
    "broadcast(tensor, root)": lambda g, n: g.broadcast(torch.ones(3), n).wait(),
    "reduce(root=)": lambda g, n: g.reduce(torch.ones(3), root=n).wait(),
    "reduce(tensor, root)": lambda g, n: g.reduce(torch.ones(3), n).wait(),
    "reduce(tensor, root, op)": lambda g, n: g.reduce(torch.ones(3), n, dist.ReduceOp.SUM).wait(),
    "gather(root=)": lambda g, n: g.gather([torch.ones(3)], torch.ones(3), root=n).wait(),
    "gather(lists, tensors, root)": lambda g, n: g.gather([[torch.ones(3)]], [torch.ones(3)], n).wait(),
    "scatter(root=)": lambda g, n: g.scatter(torch.ones(3), [torch.ones(3)], root=n).wait(),
    "scatter(tensors, lists, root)": lambda g, n: g.scatter([torch.ones(3)], [[torch.ones(3)]], n).wait(),
    "send(dst)": lambda g, n: _message(g, lambda t: g.send(t, n), lambda t: g.recv(t, 0)),
    "send(dst=)": lambda g, n: _message(g, lambda t: g.send(t, dst=n), lambda t: g.recv(t, 0)),
    "send(tag)": lambda g, n: _message(g, lambda t: g.send([t], 0, n), lambda t: g.recv([t], 0, 0)),
    "send(tag=)": lambda g, n: _message(g, lambda t: g.send([t], 0, tag=n), lambda t: g.recv([t], 0)),
}
RECEIVES: dict[str, Callable[[_Group, Any, torch.Tensor], Any]] = {
    "recv(src)": lambda g, n, t: g.recv([t], n),
    "recv(src=)": lambda g, n, t: g.recv(t, src=n),
    "recv(tag)": lambda g, n, t: g.recv([t], 0, n),
    "recv(tag=)": lambda g, n, t: g.recv([t], 0, tag=n),
}
# torch itself looks at these before the group does, and may refuse them in its own words.
BY_TORCH: dict[str, Callable[[Any], Any]] = {
    "dist.broadcast(src)": lambda n: dist.broadcast(torch.ones(3), n),
    "dist.broadcast(group_src=)": lambda n: dist.broadcast(torch.ones(3), group_src=n),
    "dist.reduce(dst)": lambda n: dist.reduce(torch.ones(3), n),
    "dist.gather(dst=)": lambda n: dist.gather(torch.ones(3), [torch.ones(3)], dst=n),
    "dist.scatter(src=)": lambda n: dist.scatter(torch.ones(3), [torch.ones(3)], src=n),
}
# Each takes splits for which [3] is right.
MANY: dict[str, Callable[[_Group, Any], Any]] = {
    "output_split_sizes": lambda g, n: _exchange(lambda o, i: g.all_to_all_single(o, i, n, None).wait()),
    "input_split_sizes": lambda g, n: _exchange(lambda o, i: g.all_to_all_single(o, i, [], n).wait()),
    "output_split_sizes=": lambda g, n: _exchange(lambda o, i: g.all_to_all_single(o, i, output_split_sizes=n).wait()),
    "input_split_sizes=": lambda g, n: _exchange(lambda o, i: g.alltoall_base(o, i, input_split_sizes=n).wait()),
    "dist.all_to_all_single, output": lambda g, n: _exchange(lambda o, i: dist.all_to_all_single(o, i, n)),
    "dist.all_to_all_single, input": lambda g, n: _exchange(
        lambda o, i: dist.all_to_all_single(o, i, input_split_sizes=n)
    ),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[_Group]:
    dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
    yield default_group()
    dist.destroy_process_group()


def _receive(group: _Group, spelling: str, number: Any) -> None:
    _message(group, lambda t: group.send(t, 0), lambda t: RECEIVES[spelling](group, number, t))


@settings(max_examples=150, deadline=None)
@given(spelling=st.sampled_from([*ONE, *RECEIVES, *BY_TORCH]), way=st.sampled_from(sorted(INTEGERS)))
def test_integers_of_any_class(alone: _Group, spelling: str, way: str) -> None:
    number = INTEGERS[way](0)
    if spelling in ONE:
        ONE[spelling](alone, number)
    elif spelling in RECEIVES:
        _receive(alone, spelling, number)
    else:
        BY_TORCH[spelling](number)


@settings(max_examples=100, deadline=None)
@given(spelling=st.sampled_from(sorted(MANY)), way=st.sampled_from(sorted(LISTS)))
def test_lists_of_integers_of_any_class(alone: _Group, spelling: str, way: str) -> None:
    MANY[spelling](alone, LISTS[way]([3]))


@settings(max_examples=300, deadline=None)
@given(spelling=st.sampled_from([*ONE, *RECEIVES]), nonsense=st.sampled_from(range(len(NONSENSE))))
def test_nonsense_for_a_number(alone: _Group, spelling: str, nonsense: int) -> None:
    number = NONSENSE[nonsense]
    with pytest.raises(phalanx.InvalidCall) as caught:
        ONE[spelling](alone, number) if spelling in ONE else RECEIVES[spelling](alone, number, torch.zeros(3))
    assert caught.value.code in ("INVALID:ROOT", "INVALID:PEER", "INVALID:TAG")
    assert "Next: " in str(caught.value)
    assert "\n" not in str(caught.value).partition("\n  Next: ")[0]


@pytest.mark.parametrize("nonsense", [1.5, "0", [0], {}, object, -7, 2**70], ids=str)
@pytest.mark.parametrize("spelling", BY_TORCH)
def test_nonsense_for_torch(alone: _Group, spelling: str, nonsense: Any) -> None:
    with pytest.raises((phalanx.InvalidCall, TypeError, ValueError, RuntimeError)):
        BY_TORCH[spelling](nonsense)


@settings(max_examples=200, deadline=None)
@given(spelling=st.sampled_from(sorted(MANY)), nonsense=st.sampled_from(range(len(NONSENSE_LISTS))))
def test_nonsense_for_a_list(alone: _Group, spelling: str, nonsense: int) -> None:
    with pytest.raises(phalanx.InvalidCall) as caught:
        MANY[spelling](alone, NONSENSE_LISTS[nonsense])
    assert caught.value.code in ("INVALID:LIST", "INVALID:SIZE")


@pytest.mark.parametrize("way", INTEGERS)
def test_rank_and_size_of_any_class(way: str) -> None:
    make = INTEGERS[way]
    group = phalanx.ProcessGroup(dist.HashStore(), make(0), make(1), name=f"by {way}")
    assert (group.rank(), group.size()) == (0, 1)
    group.shutdown()


@pytest.mark.parametrize("rank", [0.0, None, "0", [0], torch.tensor(0.0), -1, 5])
def test_nonsense_for_a_rank(rank: Any) -> None:
    with pytest.raises(phalanx.GroupError):
        phalanx.ProcessGroup(dist.HashStore(), rank, 1)
    with pytest.raises(phalanx.GroupError):
        phalanx.ProcessGroup(dist.HashStore(), 0, 0 if rank == 5 else rank)


@pytest.mark.parametrize("op", ["sum", 3, 0.5, object()])
def test_nonsense_for_a_reduce_op(alone: _Group, op: Any) -> None:
    tensor = torch.ones(3)
    calls: list[Callable[[], object]] = [
        lambda: alone.allreduce(tensor, op=op),
        lambda: alone.allreduce([tensor], op),
        lambda: alone.allreduce_coalesced([tensor], op),
        lambda: alone.reduce(tensor, 0, op),
        lambda: alone.reduce_scatter(tensor, [torch.ones(3)], op=op),
        lambda: alone.reduce_scatter_single(tensor, torch.ones(3), op=op),
        lambda: alone.reduce_scatter_single_coalesced([tensor], [torch.ones(3)], op),
    ]
    for call in calls:
        with pytest.raises(phalanx.InvalidCall) as caught:
            call()
        assert caught.value.code == "INVALID:REDUCE_OP"


def _counted(rank: int) -> list[list[float]]:
    """As mixtures of experts do it: counts that are a tensor become splits."""
    found = []
    for make_list in LISTS.values():
        sent = torch.arange(3.0) + 10 * rank
        got = torch.full((2 * (rank + 1),), -1.0)
        dist.all_to_all_single(got, sent, make_list([rank + 1, rank + 1]), make_list([1, 2]))
        found.append(got.tolist())
    for make in INTEGERS.values():
        tensor = torch.full((2,), float(rank))
        group = dist.group.WORLD
        assert group is not None
        group.broadcast(tensor, root=make(1)).wait()
        dist.broadcast(tensor, make(1))
        if rank == 0:
            dist.send(tensor + 1, make(1), tag=make(3))
        else:
            dist.recv(tensor, make(0), tag=make(3))
        found.append(tensor.tolist())
    return found


_EXPECTED = [
    [[0.0, 10.0]] * len(LISTS) + [[1.0, 1.0]] * len(INTEGERS),
    [[1.0, 2.0, 11.0, 12.0]] * len(LISTS) + [[2.0, 2.0]] * len(INTEGERS),
]


def _count_here(here: Here) -> list[list[float]]:
    here.init()
    return _counted(here.rank)


def test_integers_of_any_class_between_processes(tmp_path: Path) -> None:
    assert values(_count_here, 2, tmp_path) == _EXPECTED


def test_integers_of_any_class_between_threads() -> None:
    assert phalanx.testing.run(lambda rank, world: _counted(rank), 2) == _EXPECTED
