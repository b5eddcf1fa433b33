"""DistributedDataParallel: ranks train on uneven data and end with the same weights, bit for bit, which are also those
of one process that averages the ranks' gradients in rank order. A backward whose peer does not come raises.
"""

# Without annotations from __future__: DDP compares those of comm hooks with the classes.

import functools
import operator
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, run, values
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import phalanx

_SOON = timedelta(seconds=20)


def _mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _deep() -> nn.Module:
    torch.manual_seed(4)
    inner = [nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(10)]
    return nn.Sequential(nn.Linear(6, 96), *inner, nn.Linear(96, 3))


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.dtypes = (torch.float32, torch.bfloat16, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in self.dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = layer(x.to(dtype))
        return x[:, :3]


class _Twice(nn.Module):
    """One layer used twice, each time under a checkpoint that starts a backward within the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.shared, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True).tanh()
        result: Tensor = self.last(x)
        return result


class _Branches(nn.Module):
    """The number of rows picks the branch: one is used by some ranks only, one by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.branches[len(x) % 3](x))
        return result


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.table, self.last = nn.Embedding(50, 5, sparse=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.table((x * 10).long().remainder(50)).sum(1))
        return result


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """Ranks have batches of different sizes, and different ones at every step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(2 + (3 * rank + 2 * step) % 5, 6, generator=generator)
    loss: Tensor = (model(x) - torch.stack([x.sum(1), x.prod(1), x[:, 0]], 1)).square().mean()
    return loss


def _backward(model: nn.Module, rank: int, step: int) -> None:
    _loss(model, rank, step).backward()


def _backward_twice(model: nn.Module, rank: int, step: int) -> None:
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        _loss(model, rank, 2 * step).backward()
    _loss(model, rank, 2 * step + 1).backward()


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.05)


def _sum(tensors: list[Tensor]) -> Tensor:
    """In rank order; 16-bit floats are rounded once."""
    wide = [tensor.float() if tensor.itemsize == 2 else tensor for tensor in tensors]
    return functools.reduce(operator.add, wide).to(tensors[0].dtype)


Mean = Callable[[list[Tensor]], Tensor]


def _mean_of_scaled(grads: list[Tensor]) -> Tensor:
    return _sum([grad * (1 / len(grads)) for grad in grads])


def _mean_of_divided(grads: list[Tensor]) -> Tensor:
    return _sum([grad / len(grads) for grad in grads])


def _mean_of_sum(grads: list[Tensor]) -> Tensor:
    return _sum(grads) / len(grads)


def _mean_of_double(grads: list[Tensor]) -> Tensor:
    return (_sum([grad.double() for grad in grads]) / len(grads)).float()


def _mean_of_half(grads: list[Tensor]) -> Tensor:
    return _sum([grad.half() / len(grads) for grad in grads]).float()


def _mean_of_sparse(grads: list[Tensor]) -> Tensor:
    """Sparse again, because an update with a dense tensor rounds in another way."""
    if not grads[0].is_sparse:
        return _mean_of_scaled(grads)
    return _sum([(grad / len(grads)).coalesce().to_dense() for grad in grads]).to_sparse(1)


Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def _hook_then(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """A chain of callbacks, of which one waits for its future and one takes its value."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    averaged: Future[Tensor] = future.then(lambda f: f.wait()[0]).then(lambda f: f.value().div_(dist.get_world_size()))
    return averaged


def _hook_double(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The future passes a tensor that is neither the bucket's nor the call's."""
    future = dist.all_reduce(bucket.buffer().double(), async_op=True).get_future()
    averaged: Future[Tensor] = future.then(lambda f: (f.value()[0] / dist.get_world_size()).float())
    return averaged


def _hook_gather(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Another op: every rank gathers all gradients and averages them itself."""
    rows = torch.empty(dist.get_world_size(), bucket.buffer().numel())
    future = dist.all_gather_single(rows.view(-1), bucket.buffer(), async_op=True).get_future()
    averaged: Future[Tensor] = future.then(lambda f: _mean_of_sum(list(f.value()[0].view_as(rows))))
    return averaged


def _hook_two_calls(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """One future from two calls: the halves of the bucket travel on their own."""
    buffer = bucket.buffer()
    halves = buffer.tensor_split(2)
    futures = [dist.all_reduce(half, async_op=True).get_future() for half in halves]
    return torch.futures.collect_all(futures).then(lambda _: buffer.div_(dist.get_world_size()))


@dataclass(frozen=True)
class _Case:
    build: Callable[[], nn.Module] = _mlp
    size: int = 2
    backward: Callable[[nn.Module, int, int], None] = _backward
    hook: Hook | dist.BuiltinCommHookType | None = None
    mean: Mean = _mean_of_scaled
    set_to_none: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def wrap(self, **more: Any) -> DistributedDataParallel:
        model = DistributedDataParallel(self.build(), **self.options, **more)
        if isinstance(self.hook, dist.BuiltinCommHookType):
            model._register_builtin_comm_hook(self.hook)
        elif self.hook is not None:
            model.register_comm_hook(None, self.hook)
        return model

    def step(self, model: DistributedDataParallel, rank: int, step: int) -> None:
        model.zero_grad(set_to_none=self.set_to_none)
        self.backward(model, rank, step)
        _descend(model)


_UNUSED = {"find_unused_parameters": True}
_VIEWS = {"gradient_as_bucket_view": True}
_STATIC = {"static_graph": True}
_SMALL = {"bucket_cap_mb": 0.01}
CASES = {
    "plain": _Case(size=3),
    "buckets": _Case(_deep, size=3, options=_SMALL),
    "dtypes": _Case(_Mixed, size=3),
    "views": _Case(_deep, options=_VIEWS | _SMALL),
    "views that stay": _Case(_deep, options=_VIEWS | _SMALL, set_to_none=False),
    "no_sync": _Case(size=3, backward=_backward_twice),
    "no_sync with views": _Case(backward=_backward_twice, options=_VIEWS),
    "static graph": _Case(_Twice, options=_STATIC),
    "static graph with views": _Case(_Twice, options=_STATIC | _VIEWS),
    "unused": _Case(_Branches, size=3, options=_UNUSED),
    "unused with views": _Case(_Branches, options=_UNUSED | _VIEWS | _SMALL),
    "sparse": _Case(_Sparse, mean=_mean_of_sparse),
    "hook all_reduce": _Case(size=3, hook=default_hooks.allreduce_hook, mean=_mean_of_divided),
    "hook fp16": _Case(_deep, size=3, hook=default_hooks.fp16_compress_hook, mean=_mean_of_half, options=_SMALL),
    "hook in C++": _Case(size=3, hook=dist.BuiltinCommHookType.ALLREDUCE, mean=_mean_of_divided),
    "hook then": _Case(_deep, size=3, hook=_hook_then, mean=_mean_of_sum, options=_SMALL),
    "hook double": _Case(_deep, hook=_hook_double, mean=_mean_of_double, options=_SMALL | _VIEWS),
    "hook gather": _Case(_deep, size=3, hook=_hook_gather, mean=_mean_of_sum, options=_SMALL),
    "hook two calls": _Case(_deep, size=3, hook=_hook_two_calls, mean=_mean_of_sum, options=_SMALL),
}
_STEPS = 5


def _reference(case: _Case, size: int, data: int = 0) -> nn.Module:
    """One process that computes the gradients of all ranks."""
    model = case.build()
    for step in range(_STEPS):
        of_ranks = []
        for rank in range(size):
            model.zero_grad()
            case.backward(model, data + rank, step)
            of_ranks.append([parameter.grad for parameter in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
            _set_mean(parameter, grads, case.mean)
        _descend(model)
    return model


def _set_mean(parameter: nn.Parameter, grads: list[Tensor | None], mean: Mean) -> None:
    """A rank that has no gradient gives zeros; a parameter that nobody has used keeps having none."""
    given = [torch.zeros_like(parameter) if grad is None else grad for grad in grads]
    parameter.grad = mean(given) if any(grad is not None for grad in grads) else None


def _weights(model: nn.Module) -> bytes:
    return b"".join(tensor.detach().view(torch.uint8).numpy().tobytes() for tensor in model.parameters())


def _compare(model: nn.Module, reference: nn.Module) -> bytes:
    """The weights, once they are those of the reference, bit for bit."""
    for (name, weights), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(weights, expected), f"{name} differs by up to {(weights - expected).abs().max()}"
    return _weights(model)


def _assert_same(weights: list[bytes], case: _Case) -> None:
    assert all(of_rank == weights[0] for of_rank in weights)
    assert weights[0] != _weights(case.build()), "nothing was learnt"


def _train(here: Here, name: str) -> bytes:
    here.init()
    case = CASES[name]
    model = case.wrap()
    for step in range(_STEPS):
        case.step(model, here.rank, step)
    buckets = len(model.reducer._get_zeros_like_grad_buckets())
    assert (buckets >= 11) == (case.build is _deep), f"{buckets} buckets"
    if "views" in name:
        storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
        assert len(storages) <= buckets
    if "unused" in name:
        assert model.module.branches[3].weight.grad is None
    dist.destroy_process_group()
    return _compare(model.module, _reference(case, here.size))


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    _assert_same(values(_train, CASES[name].size, tmp_path, name), CASES[name])


def _train_uneven(here: Here, initial: bool, views: bool) -> bytes:
    """Rank r has r more batches than rank 0; ranks that are done shadow the others' calls."""
    here.init()
    case = _Case(options=_SMALL | _VIEWS if views else _SMALL)
    model = case.wrap()
    with Join([model], divide_by_initial_world_size=initial):
        for step in range(_STEPS + here.rank):
            case.step(model, here.rank, step)
    dist.destroy_process_group()
    alone = case.build()
    for step in range(_STEPS + here.size - 1):
        active = [rank for rank in range(here.size) if step < _STEPS + rank]
        divisor = here.size if initial else len(active)
        grads = []
        for rank in active:
            alone.zero_grad()
            _backward(alone, rank, step)
            gradients = [parameter.grad for parameter in alone.parameters()]
            grads.append([gradient * (1 / divisor) for gradient in gradients if gradient is not None])
        for parameter, *of_ranks in zip(alone.parameters(), *grads, strict=True):
            parameter.grad = _sum(of_ranks)
        _descend(alone)
    return _compare(model.module, alone)


@pytest.mark.parametrize(("size", "initial", "views"), [(2, True, False), (3, False, False), (3, True, True)])
def test_join_with_uneven_inputs(size: int, initial: bool, views: bool, tmp_path: Path) -> None:
    _assert_same(values(_train_uneven, size, tmp_path, initial, views), _Case())


def _stop_all(here: Here) -> int:
    here.init()
    case = _Case()
    model = case.wrap()
    done = []

    def train() -> None:
        with Join([model], throw_on_early_termination=True):
            for step in range(3 + here.rank):
                case.step(model, here.rank, step)
                done.append(step)

    with pytest.raises(RuntimeError, match=r"exhausted (all )?inputs"):
        train()
    dist.barrier()
    return len(done)


def test_join_that_stops_all_ranks_at_once(tmp_path: Path) -> None:
    assert values(_stop_all, 2, tmp_path) == [3, 3]


def _train_batch_norm(here: Here) -> tuple[bytes, bytes]:
    here.init()
    torch.manual_seed(9)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
    for step in range(_STEPS):
        _Case().step(model, here.rank, step)
    own = torch.cat([buffer.double().flatten() for buffer in model.buffers()])
    model.eval()
    # The forward pass begins with a broadcast of rank 0's buffers.
    _loss(model, 0, 0)
    buffers = torch.cat([buffer.double().flatten() for buffer in model.buffers()])
    assert torch.equal(own, buffers) == (here.rank == 0)
    return _weights(model), buffers.numpy().tobytes()


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    first, second = values(_train_batch_norm, 2, tmp_path)
    assert first == second


def _train_power_sgd(here: Here) -> bytes:
    """Its callbacks start calls and wait for the futures of these, on the thread that completes futures."""
    here.init()
    model = DistributedDataParallel(_deep())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(_STEPS):
        _Case().step(model, here.rank, step)
    assert state.p_memory_dict, "nothing was compressed"
    return _weights(model.module)


def test_a_hook_whose_callbacks_wait_for_calls(tmp_path: Path) -> None:
    _assert_same(values(_train_power_sgd, 2, tmp_path), CASES["buckets"])


def _train_in_threads(here: Here) -> list[bytes]:
    """Every thread has a model and a group of its own."""
    here.init()
    case = CASES["buckets"]
    groups = [dist.new_group(range(here.size)) for _ in range(3)]
    models = [case.wrap(process_group=group) for group in groups]

    def train(index: int) -> None:
        torch.set_num_threads(1)  # a setting of the thread, and the reference must not differ
        for step in range(_STEPS):
            case.step(models[index], 100 * index + here.rank, step)

    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(train, range(len(models))))
    return [_compare(model.module, _reference(case, here.size, 100 * index)) for index, model in enumerate(models)]


def test_models_that_train_in_threads_of_one_rank(tmp_path: Path) -> None:
    first, second = values(_train_in_threads, 2, tmp_path)
    assert first == second
    assert len(set(first)) == 3


def _miss_backward(here: Here, name: str, good_steps: int, how: str) -> str:
    """Rank 1 does not get to its backward; rank 0 must learn of it in its own."""
    here.init()
    case = CASES[name]
    model = case.wrap()
    for step in range(good_steps):
        case.step(model, here.rank, step)
    gate = here.store("gate")
    dist.barrier()
    if here.rank == 1:
        if how == "exits":
            os._exit(3)
        if how == "raises":
            raise LookupError("no more data")
        if how == "leaves":
            dist.destroy_process_group()
        else:
            gate.wait(["seen"], _SOON)
        return ""
    if how == "stays":
        group = dist.group.WORLD
        assert group is not None
        group.set_timeout(timedelta(seconds=0.3))
    expected = phalanx.CallTimeout if how == "stays" else phalanx.PeerLost
    with pytest.raises(expected) as caught:
        case.backward(model, here.rank, good_steps)
    with pytest.raises(expected, match="the group is broken"):
        dist.barrier()
    gate.set("seen", "")
    dist.destroy_process_group()
    return str(caught.value)


_FAILURES = [("buckets", 0), ("static graph", 0)]
_FAILURES += [(name, 2) for name in ("plain", "buckets", "views that stay", "static graph", "unused", "sparse")]
_FAILURES += [(f"hook {name}", 2) for name in ("fp16", "in C++", "then", "gather", "two calls")]


@pytest.mark.parametrize(("name", "good_steps"), _FAILURES)
def test_backward_raises_when_a_peer_does_not_come(name: str, good_steps: int, tmp_path: Path) -> None:
    texts = values(_miss_backward, 2, tmp_path, name, good_steps, "stays")
    assert "rank 1 did not come" in texts[0]


@pytest.mark.parametrize("how", ["leaves", "raises", "exits"])
@pytest.mark.parametrize("name", ["buckets", "unused", "hook then"])
def test_backward_raises_when_a_peer_is_lost(name: str, how: str, tmp_path: Path) -> None:
    first, second = run(_miss_backward, 2, tmp_path, name, 2, how)
    assert (first.error, first.exitcode) == (None, 0), first.trace
    assert "rank 1" in first.value
    assert second.error == ("LookupError" if how == "raises" else None)
    assert second.exitcode == (3 if how == "exits" else 0)


def _interrupted(here: Here, name: str) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    here.init()
    case = CASES[name]
    model = case.wrap()
    case.step(model, here.rank, 0)
    gate = here.store("gate")
    if here.rank == 1:
        gate.wait(["seen"], _SOON)
        return ""

    def backward() -> None:
        here.tell()
        case.backward(model, here.rank, 1)

    with pytest.raises(KeyboardInterrupt):
        backward()
    gate.set("seen", "")
    dist.destroy_process_group()
    return "interrupted"


@pytest.mark.parametrize("name", ["buckets", "hook then"])
def test_ctrl_c_ends_a_backward(name: str, tmp_path: Path) -> None:
    world = World(_interrupted, 2, tmp_path, name)
    world.told(0)
    world.wait_asleep(0)
    world.signal(0, signal.SIGINT)
    ends = world.ends()
    assert [end.error for end in ends] == [None, None], ends[0].trace + ends[1].trace
    assert ends[0].value == "interrupted"
