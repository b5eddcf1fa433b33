"""`phalanx.functional` on both transports: values and gradients as torch's own, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functional_cases import CASES, compare_all, plain_group
from ranks import Here, values
from torch import Tensor
from torch.distributed import ReduceOp

import phalanx
import phalanx.functional as pf
import phalanx.testing as pt

pytestmark = [
    # torch deprecates the functions that ours are compared with.
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]

Run = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "processes"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(function: Callable[..., Any], ranks: int = 3, **more: Any) -> list[Any]:
        return pt.run(function, ranks, processes=request.param == "processes", **more)

    return run


def _compare_with_phalanx(rank: int, world: pt.World) -> list[str]:
    dtypes = [torch.float64, torch.bfloat16, torch.complex64]
    return compare_all(dtypes, plain_group(rank, world), world.group)


def test_as_torch_with_phalanx(run: Run) -> None:
    assert run(_compare_with_phalanx) == [list(CASES)] * 3


def test_as_torch_under_any_schedule() -> None:
    assert pt.run(_compare_with_phalanx, 2, seed=3) == [list(CASES)] * 2


def _compare_with_gloo(here: Here) -> list[str]:
    dist.init_process_group("gloo", store=here.store(), rank=here.rank, world_size=here.size)
    ours = phalanx.ProcessGroup(here.store("ours"), here.rank, here.size, name="ours")
    names = compare_all([], ours, dist.group.WORLD)
    ours.shutdown()
    dist.destroy_process_group()
    return names


def test_as_torch_with_gloo(tmp_path: Path) -> None:
    assert values(_compare_with_gloo, 3, tmp_path) == [list(CASES)] * 3


def _reduce_and_gather_elsewhere(rank: int, world: pt.World) -> None:
    group = plain_group(rank, world)
    tensor = torch.tensor([rank + 1.0])
    copy = pf.reduce(tensor, 0, group)
    zeros = pf.gather(tensor, 0, group)
    assert copy.tolist() == ([6.0] if rank == 0 else [rank + 1.0])
    assert copy.data_ptr() != tensor.data_ptr()
    assert [one.item() for one in zeros] == ([1, 2, 3] if rank == 0 else [0, 0, 0])


def test_results_of_ranks_that_are_not_the_root(run: Run) -> None:
    run(_reduce_and_gather_elsewhere, init=False)


def _premul(factor: float) -> Any:
    return dist._make_nccl_premul_sum(factor)


def _scaled_gradients(rank: int, world: pt.World) -> None:
    """AVG and PREMUL_SUM, the latter with another factor on each rank."""
    group, size = plain_group(rank, world), world.size

    def gradient(function: Callable[[Tensor], Tensor]) -> list[float]:
        tensor = torch.ones(size, requires_grad=True)
        result = function(tensor)
        result.backward(torch.full_like(result, 3.0 * (rank + 1)))
        assert tensor.grad is not None
        return tensor.grad.tolist()

    def check(op: Any, scale: float) -> None:
        of_all, of_each = 3 * sum(range(1, size + 1)), [3 * (p + 1) * scale for p in range(size)]
        assert gradient(lambda x: pf.all_reduce(x, group, op=op)) == [of_all * scale] * size
        assert gradient(lambda x: pf.reduce(x, 1, group, op=op)) == [6 * scale] * size
        assert gradient(lambda x: pf.reduce_scatter_single(x, group, op=op)) == of_each
        assert gradient(lambda x: pf.reduce_scatter(list(x.unbind()), group, op=op)) == of_each

    factor = rank + 2.0
    check(ReduceOp.AVG, 1 / size)
    check(_premul(factor), factor)


def test_gradients_of_avg_and_premul_sum(run: Run) -> None:
    run(_scaled_gradients, init=False)


def _without_gradient(rank: int, world: pt.World) -> list[str]:
    group = plain_group(rank, world)
    functions: dict[str, Callable[[Tensor, Any], Tensor]] = {
        "all_reduce": lambda x, op: pf.all_reduce(x, group, op=op),
        "reduce": lambda x, op: pf.reduce(x, 0, group, op=op),
        "reduce_scatter": lambda x, op: pf.reduce_scatter(list(x.chunk(2)), group, op=op),
        "reduce_scatter_single": lambda x, op: pf.reduce_scatter_single(x, group, op=op),
    }
    texts = []
    for name, function in functions.items():
        for op, value in ((ReduceOp.MAX, 2.0), (ReduceOp.MIN, 1.0), (ReduceOp.PRODUCT, 2.0)):
            result = function(torch.full((2,), rank + 1.0, requires_grad=True), op)
            assert result.requires_grad
            if name != "reduce" or rank == 0:
                assert result.tolist() == [value] * result.numel()
            with pytest.raises(phalanx.InvalidCall) as caught:
                result.sum().backward()
            assert (caught.value.code, caught.value.rank) == ("INVALID:GRADIENT", rank)
            texts.append(caught.value.message)
    # The group goes on.
    assert pf.all_reduce(torch.ones(1), group).item() == 2
    return texts


def test_a_reduce_op_without_gradient_raises_in_the_backward_pass_of_every_rank(run: Run) -> None:
    ops = ("MAX", "MIN", "PRODUCT")
    expected = [f"expected a reduce op that has a gradient, got {op} in a backward pass" for op in ops] * 4
    assert run(_without_gradient, 2, init=False) == [expected] * 2


def test_the_error_names_group_op_and_next_step() -> None:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="alone")
    with pytest.raises(phalanx.InvalidCall) as caught:
        pf.all_reduce(torch.ones(1, requires_grad=True), group, op=ReduceOp.MAX).backward()
    assert str(caught.value) == (
        "[INVALID:GRADIENT] all_reduce, group 'alone', rank 0: expected a reduce op that has a gradient, got MAX in a "
        "backward pass\n  Next: use SUM, AVG or PREMUL_SUM, or pass all_reduce a tensor that needs no gradient, for "
        "example tensor.detach()"
    )
    group.shutdown()


def _integers(rank: int, world: pt.World) -> None:
    group = plain_group(rank, world)
    tensor = torch.tensor([rank + 1, rank + 4])
    assert pf.all_reduce(tensor, group, op=ReduceOp.BOR).tolist() == [3, 5]
    assert not pf.all_reduce(tensor, group).requires_grad
    assert pf.all_gather_single(tensor > 3, group).tolist() == [False, True, False, True]
    sparse = pf.all_reduce(tensor.to_sparse(), group)
    assert sparse.to_dense().tolist() == [3, 9]
    assert tensor.tolist() == [rank + 1, rank + 4]


def test_integers_booleans_and_sparse_tensors(run: Run) -> None:
    run(_integers, 2, init=False)


def _lists_of_different_shapes(rank: int, world: pt.World) -> None:
    group = plain_group(rank, world)
    tensors = [torch.full((p + 1, 2), rank + 1.0, requires_grad=True) for p in range(world.size)]
    result = pf.reduce_scatter(tensors, group)
    assert result.shape == (rank + 1, 2)
    assert result.eq(6).all()
    (result * (rank + 1)).sum().backward()
    for p, tensor in enumerate(tensors):
        assert tensor.grad is not None
        assert tensor.grad.tolist() == [[p + 1.0] * 2] * (p + 1)
    # A rank that is not the root needs only the shape of its result.
    numbers = [torch.full((4,), float(p), requires_grad=True) for p in range(world.size)]
    templates = [torch.zeros(2, 2, requires_grad=True)]
    mine = pf.scatter(numbers if rank == 0 else templates, 0, group)
    assert mine.shape == ((4,) if rank == 0 else (2, 2))
    assert mine.eq(rank).all()
    (mine * (rank + 1)).sum().backward()
    for p, tensor in enumerate(numbers if rank == 0 else templates):
        assert tensor.grad is not None
        assert tensor.grad.eq(p + 1 if rank == 0 else 0).all()


def test_lists_of_different_shapes(run: Run) -> None:
    run(_lists_of_different_shapes, init=False)


def _all_forms(group: phalanx.ProcessGroup | None) -> dict[str, Callable[[Tensor], Any]]:
    """Each function, of a tensor with two rows, in a group of two ranks."""
    return {
        "all_reduce": lambda x: pf.all_reduce(x, group),
        "reduce": lambda x: pf.reduce(x, 0, group),
        "broadcast": lambda x: pf.broadcast(x, 0, group),
        "gather": lambda x: pf.gather(x, 0, group),
        "scatter": lambda x: pf.scatter([x, x], 0, group),
        "all_gather": lambda x: pf.all_gather(x, group),
        "all_gather_single": lambda x: pf.all_gather_single(x, group),
        "reduce_scatter": lambda x: pf.reduce_scatter([x, x], group),
        "reduce_scatter_single": lambda x: pf.reduce_scatter_single(x, group),
        "all_to_all": lambda x: pf.all_to_all([x, x], group),
        "all_to_all_single": lambda x: pf.all_to_all_single(x, group),
    }


def _without_graph(rank: int, world: pt.World) -> None:
    for function in _all_forms(plain_group(rank, world)).values():
        with torch.no_grad():
            results = function(torch.ones(2, 2, requires_grad=True))
        assert not any(one.requires_grad for one in ([results] if isinstance(results, Tensor) else results))
        with torch.inference_mode():
            results = function(torch.ones(2, 2))
        assert all(one.is_inference() for one in ([results] if isinstance(results, Tensor) else results))


def test_no_grad_and_inference_mode(run: Run) -> None:
    run(_without_graph, 2, init=False)


@pytest.mark.parametrize("name", _all_forms(None))
def test_one_rank_gets_memory_of_its_own(name: str) -> None:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="alone")
    tensor = torch.ones(2, 2)
    functions: dict[str, Callable[[], Any]] = {
        "scatter": lambda: pf.scatter([tensor], 0, group),
        "all_to_all": lambda: pf.all_to_all([tensor], group),
        "reduce_scatter": lambda: pf.reduce_scatter([tensor], group),
    }
    result = functions.get(name, lambda: _all_forms(group)[name](tensor))()
    result = result if isinstance(result, Tensor) else result[0]
    assert result.tolist() == tensor.tolist()
    result.zero_()
    assert tensor.tolist() == [[1, 1]] * 2
    group.shutdown()


def _choose_group(rank: int, world: pt.World) -> None:
    alone = phalanx.ProcessGroup(world.store, 0, 1, name=f"alone {rank}")
    pair: Any = dist.new_group([0, 1])
    tensor = torch.ones(1, requires_grad=True)

    def num_ranks(group: Any = None) -> float:
        return pf.all_reduce(torch.ones(1), group).item()

    assert num_ranks() == 3
    with phalanx.process_group(alone):
        assert num_ranks() == 1
        assert num_ranks(dist.group.WORLD) == 3
        result = pf.all_reduce(tensor)
    if rank < 2:
        with phalanx.process_group(pair):
            assert num_ranks() == 2
            for function in _all_forms(None).values():
                function(torch.ones(2))
            # The backward pass uses the group of the forward pass.
            result.backward(torch.full((1,), 5.0))
        assert tensor.grad is not None
        assert tensor.grad.item() == 5


def test_which_group_is_used(run: Run) -> None:
    run(_choose_group)


@pytest.mark.parametrize("name", _all_forms(None))
def test_without_any_group(name: str) -> None:
    with pytest.raises(phalanx.GroupError, match="got none: no scope is open here and there is no default group") as e:
        _all_forms(None)[name](torch.ones(2))
    assert (e.value.code, e.value.op) == ("GROUP:NONE", name.removesuffix("_single"))


def _with_gloo(here: Here) -> None:
    dist.init_process_group("gloo", store=here.store(), rank=here.rank, world_size=here.size)
    with pytest.raises(phalanx.GroupError, match="got the default group, a group of the backend 'gloo'"):
        pf.all_reduce(torch.ones(1))
    with pytest.raises(phalanx.InvalidCall, match="got a group of the backend 'gloo'"):
        pf.all_reduce(torch.ones(1), dist.group.WORLD)  # type: ignore[arg-type]
    dist.destroy_process_group()


def test_a_group_of_another_backend(tmp_path: Path) -> None:
    values(_with_gloo, 1, tmp_path)


def _refusals(rank: int, world: pt.World) -> list[str]:
    group: Any = plain_group(rank, world)
    x: Any = torch.ones(2, 2)
    tries: list[Callable[[], Any]] = [
        # No tensor, a list where one tensor is due, and the other way round.
        *(lambda f=f: f("x") for f in _all_forms(group).values()),
        *(lambda f=f: f([x]) for f in _all_forms(group).values()),
        lambda: pf.scatter(x, 0, group),
        lambda: pf.reduce_scatter(x, group),
        lambda: pf.all_to_all(x, group),
        lambda: pf.scatter([], 0, group),
        # Lists of the wrong length.
        lambda: pf.scatter([x] * 3, 0, group) if rank == 0 else pf.scatter([], 0, group),
        lambda: pf.reduce_scatter([x], group),
        lambda: pf.all_to_all([x] * 3, group),
        # Layouts, roots, sizes, reduce ops, splits and timeouts.
        *(lambda f=f: f(x.to_sparse_csr()) for f in _all_forms(group).values()),
        *(lambda f=f: f(x.to("meta")) for f in _all_forms(group).values()),
        lambda: pf.broadcast(x, 2, group),
        lambda: pf.broadcast(x, None, group),  # type: ignore[arg-type]
        lambda: pf.reduce(x, "0", group),  # type: ignore[arg-type]
        lambda: pf.gather(x, -1, group),
        lambda: pf.scatter([x, x], 7, group),
        lambda: pf.reduce_scatter_single(torch.ones(3), group),
        lambda: pf.reduce_scatter_single(torch.tensor(1.0), group),
        lambda: pf.all_reduce(x, group, op="SUM"),
        lambda: pf.all_reduce(x, group, op=ReduceOp.BAND),
        lambda: pf.all_reduce(x, group, op=dist.AllreduceOptions()),
        lambda: pf.reduce(x, 0, group, op=dist.ReduceOptions()),
        lambda: pf.reduce_scatter([x, x], group, op=dist.ReduceScatterOptions()),
        lambda: pf.reduce_scatter_single(x, group, op=dist.ReduceScatterOptions()),
        lambda: pf.all_to_all_single(torch.ones(3), group),
        lambda: pf.all_to_all_single(x, group, [1]),
        lambda: pf.all_to_all_single(x, group, [3, -1]),
        lambda: pf.all_to_all_single(x, group, "x"),  # type: ignore[arg-type]
        lambda: pf.all_to_all([x, x.double()], group),
        lambda: pf.all_gather(x, group, timeout=5),  # type: ignore[arg-type]
    ]
    codes = []
    for one in tries:
        with pytest.raises(phalanx.InvalidCall) as caught:
            one()
        codes.append(caught.value.code.removeprefix("INVALID:"))
        assert caught.value.group == "plain"
    with pytest.raises(phalanx.InvalidCall, match="expected a Phalanx process group, got an object of class str"):
        pf.all_reduce(x, "group")  # type: ignore[arg-type]
    assert pf.all_reduce(torch.ones(1), group).item() == 2
    return codes


def test_wrong_arguments(run: Run) -> None:
    num = len(_all_forms(None))
    lists = ["LIST"] * 7
    rest = ["ROOT"] * 5 + ["SIZE"] * 2 + ["REDUCE_OP"] * 6 + ["SIZE", "LIST", "SIZE", "LIST", "DTYPE", "TIMEOUT"]
    expected = ["TENSOR"] * (2 * num) + lists + ["LAYOUT"] * num + ["DEVICE"] * num + rest
    assert run(_refusals, 2, init=False) == [expected] * 2


def _transform(rank: int, world: pt.World) -> list[str]:
    group = plain_group(rank, world)
    texts = []
    for transform in (torch.func.vmap, torch.func.grad, torch.func.jacrev):
        for function in _all_forms(group).values():
            with pytest.raises(phalanx.InvalidCall, match="expected a call outside of") as caught:
                transform(function)(torch.ones(2, 2))
            texts.append(caught.value.code)
    tensor = torch.ones(2, requires_grad=True)
    with pytest.raises(phalanx.InvalidCall, match="expected tensors that have memory"):
        torch.autograd.grad(pf.all_reduce(tensor, group), tensor, torch.eye(2), is_grads_batched=True)
    assert pf.all_reduce(torch.ones(1), group).item() == 2
    return texts


def test_transforms_of_torch_func_are_refused(run: Run) -> None:
    assert run(_transform, 2, init=False) == [["INVALID:TENSOR"] * 3 * len(_all_forms(None))] * 2


def _time_out(rank: int, world: pt.World) -> None:
    """Rank 1 makes the forward pass only, and waits until rank 0 has given up."""
    group = plain_group(rank, world)
    tensor = torch.ones(2, requires_grad=True)
    result = pf.all_reduce(tensor, group, timeout=timedelta(seconds=0.2 if rank == 0 else 60))
    if rank == 0:
        with pytest.raises(phalanx.CallTimeout) as caught:
            result.sum().backward()
        assert (caught.value.op, caught.value.seq) == ("all_reduce", 2)
        world.store.set("given up", "")
    else:
        world.store.wait(["given up"])


def test_the_timeout_also_holds_in_the_backward_pass(run: Run) -> None:
    run(_time_out, 2, init=False)


def _train(rank: int, world: pt.World) -> None:
    group = plain_group(rank, world)
    pf.all_reduce(torch.ones(2, requires_grad=True), group).sum().backward()


def test_a_rank_that_dies_in_the_backward_pass(run: Run) -> None:
    with pytest.raises(phalanx.PeerLost) as caught:
        run(_train, 2, init=False, faults=[pt.kill(1, at_call=2)])
    assert (caught.value.op, caught.value.seq, caught.value.peer) == ("all_reduce", 2, 1)


def _compile(here: Here) -> None:
    group = phalanx.ProcessGroup(here.store(), here.rank, here.size, name="compiled")

    def function(tensor: Tensor) -> Tensor:
        with phalanx.process_group(group):
            return pf.all_gather_single(tensor * 2) + pf.all_reduce(tensor.repeat(2))

    tensor = torch.full((1,), here.rank + 1.0, requires_grad=True)
    result = torch.compile(function, backend="aot_eager")(tensor)
    result.sum().backward()
    assert result.tolist() == [5, 7]
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [8]
    group.shutdown()


def test_within_a_compiled_function(tmp_path: Path) -> None:
    values(_compile, 2, tmp_path)
