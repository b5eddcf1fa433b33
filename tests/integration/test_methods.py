"""Every op as a method of a group: results, timeouts and wrong arguments, between processes and between threads."""

from __future__ import annotations

import inspect
import typing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from group_methods import LONG, METHODS, Arguments, group_of
from ranks import Gate, Here, values

import phalanx
import phalanx.testing as pt

_SECONDS = timedelta(seconds=20)
# Processes have to wait until it runs out.
_SHORT = timedelta(milliseconds=20)

Results = dict[tuple[str, bool], list[float]]


def _call_all(group: phalanx.ProcessGroup) -> Results:
    """What the works of all methods give, by name and `async_op`."""
    found: Results = {}
    for async_op in (True, False):
        for name, method in METHODS.items():
            work = method.call(group, Arguments(group.rank()), {"timeout": _SECONDS, "async_op": async_op})
            assert isinstance(work, dist.Work), name
            assert async_op or work.is_completed(), name
            found[name, async_op] = [value for tensor in work.result() for value in tensor.tolist()]
    return found


def _call_all_here(here: Here) -> Results:
    return _call_all(phalanx.ProcessGroup(here.store(), here.rank, here.size))


@pytest.fixture(scope="module", params=["shm", "threads"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    if request.param == "threads":
        return pt.run(lambda rank, world: _call_all(group_of(rank, world)), 2, init=False)
    return values(_call_all_here, 2, tmp_path_factory.mktemp("methods"))


@pytest.mark.parametrize("async_op", [True, False], ids=["async", "waited for"])
@pytest.mark.parametrize("name", METHODS)
def test_a_method(name: str, async_op: bool, found: list[Results]) -> None:
    expected = [[value for value in one for _ in range(2)] for one in METHODS[name].result]
    assert [by_name[name, async_op] for by_name in found] == expected


@pytest.mark.parametrize("name", [*METHODS, "monitored_barrier"])
def test_a_method_has_types_and_says_what_it_does(name: str) -> None:
    method = getattr(phalanx.ProcessGroup, name)
    assert method.__doc__
    signature = inspect.signature(method)
    assert all(
        parameter.annotation is not inspect.Parameter.empty for parameter in list(signature.parameters.values())[1:]
    )
    assert signature.return_annotation in ("Work", "None")
    assert "timeout" in signature.parameters
    if name != "monitored_barrier":
        assert signature.parameters["async_op"].default is True


def test_every_function_of_torch_has_its_method() -> None:
    ours = {name for name in [*METHODS, "monitored_barrier"] if hasattr(dist, name)}
    assert ours == {*METHODS, "monitored_barrier"}
    for name in ours:
        # The first arguments of both, up to the group, have the same names and order.
        theirs = list(inspect.signature(getattr(dist, name)).parameters)
        theirs = theirs[: theirs.index("group")]
        mine = list(inspect.signature(getattr(phalanx.ProcessGroup, name)).parameters)[1:]
        assert mine[: len(theirs)] == theirs, name


def _run_out(group: phalanx.ProcessGroup, name: str, async_op: bool) -> str:
    """Rank 0 makes a call to which rank 1 does not come."""

    def call() -> None:
        if name == "monitored_barrier":
            group.monitored_barrier(timeout=_SHORT)
        else:
            METHODS[name].call(group, Arguments(0, LONG), {"timeout": _SHORT, "async_op": async_op}).wait()

    with pytest.raises(phalanx.CallTimeout) as caught:
        call()
    return str(caught.value)


def _run_out_here(here: Here) -> dict[str, str]:
    told = {}
    gate = Gate(here)
    for index, name in enumerate([*METHODS, "monitored_barrier"]):
        group = phalanx.ProcessGroup(here.store(f"store{index}"), here.rank, here.size)
        if here.rank == 0:
            told[name] = _run_out(group, name, async_op=index % 2 == 0)
            gate.open(name)
        gate.wait(name)
        group.shutdown()
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    told: dict[str, str] = values(_run_out_here, 2, tmp_path_factory.mktemp("timeouts"))[0]
    return told


@pytest.mark.parametrize("name", [*METHODS, "monitored_barrier"])
def test_a_timeout_of_a_method_runs_out(name: str, told: dict[str, str]) -> None:
    def call(rank: int, world: pt.World) -> list[str]:
        told = []
        for async_op in (True, False):
            group = group_of(rank, world, str(async_op))
            if rank == 0:
                told.append(_run_out(group, name, async_op))
                world.store.set(f"over {async_op}", "")
            world.store.wait([f"over {async_op}"])
        return told

    for text in [*pt.run(call, 2, init=False)[0], told[name]]:
        assert "gave up after a timeout of 0.02 s" in text


@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_argument_of_a_method_is_told_to_peers(name: str) -> None:
    method = METHODS[name]

    def refuse(rank: int, world: pt.World) -> str:
        group = group_of(rank, world)
        if rank == 1:
            with pytest.raises(phalanx.InvalidCall) as refused:
                method.wrong(group)
            assert refused.value.code == method.code
            return ""
        with pytest.raises(phalanx.PeerLost) as caught:
            group.recv(torch.empty(LONG), 1, tag=77, async_op=False)
        return str(caught.value)

    # Nobody waits for a message of a rank that there is not.
    is_told = "  rank 1 refused " in pt.run(refuse, 2, init=False)[0]
    assert is_told is (method.code != "INVALID:PEER")


@pytest.fixture(scope="module")
def alone() -> phalanx.ProcessGroup:
    return phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="alone")


@pytest.mark.parametrize(
    ("name", "keyword"), [("reduce", "dst"), ("broadcast", "src"), ("gather", "dst"), ("scatter", "src")]
)
def test_a_root_that_is_given_twice(alone: phalanx.ProcessGroup, name: str, keyword: str) -> None:
    tensor, listed = torch.ones(2), [torch.ones(2)]
    args = [tensor, listed] if name in ("gather", "scatter") else [tensor]
    getattr(alone, name)(*args, **{keyword: 0, "root": 0}).wait()
    with pytest.raises(phalanx.InvalidCall, match="expected one root, got root=1 and rank 0") as caught:
        getattr(alone, name)(*args, **{keyword: 0, "root": 1})
    assert (caught.value.code, caught.value.op) == ("INVALID:ROOT", name)


@pytest.mark.parametrize(
    ("name", "num_tensors"), [("broadcast", 1), ("all_gather_single", 2), ("all_to_all_single", 2), ("barrier", 0)]
)
def test_a_group_or_a_store_is_no_timeout(alone: phalanx.ProcessGroup, name: str, num_tensors: int) -> None:
    """Both have an attribute of that name, and torch's functions take a group there."""
    tensors = [torch.ones(2) for _ in range(num_tensors)]
    for wrong in (alone, dist.HashStore()):
        with pytest.raises(phalanx.InvalidCall, match=r"expected a timeout as a .*, got <") as caught:
            getattr(alone, name)(*tensors, timeout=wrong)
        assert caught.value.code == "INVALID:TIMEOUT"


@pytest.mark.parametrize("name", ["reduce", "broadcast", "gather", "scatter"])
def test_options_of_another_op_beside_a_root(alone: phalanx.ProcessGroup, name: str) -> None:
    tensors = [torch.ones(2), [torch.ones(2)]] if name in ("gather", "scatter") else [torch.ones(2)]
    options = dist.AllreduceOptions()
    with pytest.raises(phalanx.InvalidCall, match="options that have a root, got an object of class AllreduceO"):
        getattr(alone, name)(*tensors, root=0, opts=options)
    with pytest.raises(phalanx.InvalidCall, match="expected the root as an integer, got <"):
        getattr(alone, name)(*tensors, opts=options)


def test_a_reduce_op_is_no_root(alone: phalanx.ProcessGroup) -> None:
    """torch's reduce ops are integers to Python, and SUM is 0."""
    op: typing.Any = dist.ReduceOp.SUM
    with pytest.raises(phalanx.InvalidCall, match=r"expected the root as an integer, got <.*SUM"):
        alone.reduce(torch.ones(2), op)


_OF_ONE_TENSOR: dict[str, typing.Callable[[phalanx.ProcessGroup, torch.Tensor], typing.Any]] = {
    "all_reduce": lambda g, t: g.all_reduce(t),
    "all_gather": lambda g, t: g.all_gather([t] * g.size(), t.clone()),
    "broadcast": lambda g, t: g.broadcast(tensor=t.t(), src=0),
    "all_to_all": lambda g, t: g.all_to_all_single(t, t.clone(), async_op=False),
    "reduce_scatter": lambda g, t: g.reduce_scatter(output=t, input_list=[t.clone()] * g.size()),
    "send": lambda g, t: g.send(t, 0),
    "recv": lambda g, t: g.recv(t.t(), 0),
}


def _call_within_vmap(group: phalanx.ProcessGroup) -> list[str]:
    told = []
    for name, call in _OF_ONE_TENSOR.items():
        with pytest.raises(phalanx.InvalidCall, match="expected tensors that have memory") as caught:
            torch.func.vmap(lambda tensor, call=call: call(group, tensor) and None)(torch.ones(3, 2, 4))
        assert (caught.value.op, caught.value.group) == (name, "group")
        told.append(caught.value.code)
    tensor = torch.ones(1)
    group.all_reduce(tensor, async_op=False)
    assert tensor.item() == 2
    return told


def _call_within_vmap_here(here: Here) -> list[str]:
    return _call_within_vmap(phalanx.ProcessGroup(here.store(), here.rank, here.size, name="group"))


def test_tensors_without_memory_are_refused(tmp_path: Path) -> None:
    expected = [["INVALID:TENSOR"] * len(_OF_ONE_TENSOR)] * 2
    assert values(_call_within_vmap_here, 2, tmp_path) == expected
    assert pt.run(lambda rank, world: _call_within_vmap(group_of(rank, world)), 2, init=False) == expected


def test_a_receive_from_any_rank_tells_the_sender() -> None:
    def exchange(rank: int, world: pt.World) -> list[tuple[int, float]]:
        group = group_of(rank, world)
        tensor = torch.tensor([float(rank)])
        if rank:
            group.send(tensor, 0, async_op=False)
            return []
        works = [group.recv(tensor, async_op=False) for _ in range(2)]
        return sorted((work.source_rank(), work.source_rank()) for work in works)

    assert pt.run(exchange, 3, init=False)[0] == [(1, 1), (2, 2)]


def test_a_call_that_is_waited_for_has_a_work_of_its_own(alone: phalanx.ProcessGroup) -> None:
    one, other = torch.ones(1), torch.ones(1)
    works = [alone.all_reduce(one, async_op=False), alone.all_reduce(other, async_op=False)]
    assert [work.result()[0].data_ptr() for work in works] == [one.data_ptr(), other.data_ptr()]


def test_all_works_are_of_the_class_that_methods_promise() -> None:
    hints = typing.get_type_hints(phalanx.ProcessGroup.all_reduce)
    assert issubclass(hints["return"], dist.Work)
