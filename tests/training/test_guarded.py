"""torch's training stack on guarded Gloo: what it computes is what it computes on Gloo, bit for bit; a wrong or lost
rank is an error of ours out of the backward pass.
"""

# Without annotations from __future__: DDP compares those of comm hooks with the classes.

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_compiled
import test_ddp_options
import test_dispatch
import test_optimizers
import test_sharding
import torch
import torch.distributed as dist
from on_gloo import Killed, OnGloo, run_on_gloo, same
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import phalanx

_Program = Callable[[int, Any], Any]
_Hook = Callable[[DistributedDataParallel], None]


def _deep() -> nn.Sequential:
    torch.manual_seed(4)
    inner = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 32), *inner, nn.Linear(32, 3))


class _Branches(nn.Module):
    """The number of rows picks the branch: ranks use different ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.branches[len(x) % 3](x))
        return result


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(2 + (rank + step) % 3, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def _step(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    model(_batch(rank, step)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.05)


def _values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


_SMALL: dict[str, Any] = {"bucket_cap_mb": 0.005}


class _Ddp:
    """DDP with options and a comm hook; a function of a rank that processes can be told of."""

    def __init__(self, build: Callable[[], nn.Module] = _deep, hook: _Hook | None = None, **options: Any) -> None:
        self.build, self.hook, self.options = build, hook, options

    def __call__(self, rank: int, world: OnGloo) -> list[Tensor]:
        model = DistributedDataParallel(self.build(), **_SMALL, **self.options)
        if self.hook is not None:
            self.hook(model)
        for step in range(4):
            _step(model, rank, step)
        return _values(model)


def _fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _in_cpp(model: DistributedDataParallel) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def _then(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    averaged: torch.futures.Future[Tensor] = future.then(lambda f: f.wait()[0]).then(lambda f: f.value().div_(2))
    return averaged


def _of_futures(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, _then)


def _no_sync(rank: int, world: OnGloo) -> list[Tensor]:
    model = DistributedDataParallel(_deep(), **_SMALL)
    with model.no_sync():
        model(_batch(rank, 0)).sum().backward()
    model(_batch(rank, 1)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _join(rank: int, world: OnGloo) -> list[Tensor]:
    model = DistributedDataParallel(_deep(), **_SMALL)
    with Join([model]):
        for step in range(2 + rank):
            _step(model, rank, step)
    return _values(model)


def _split(rank: int, world: OnGloo) -> tuple[float, float, str, str]:
    """A mesh, whose groups are guarded as well, and names."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    group = mesh["a"].get_group()
    both = dist.new_group([0, 1])
    one, other = torch.full((2,), rank + 1.0), torch.full((2,), rank + 1.0)
    dist.all_reduce(one, group=group)
    if rank < 2:
        dist.all_reduce(other, group=both)
    return one[0].item(), other[0].item(), dist.get_backend(), dist.get_backend(group)


class _AllPrograms:
    """Every collective in torch's spellings, as modes see it."""

    def __call__(self, rank: int, world: OnGloo) -> list[tuple[list[str], list[Tensor]]]:
        group = dist.group.WORLD
        assert group is not None
        return [test_dispatch._watched(test_dispatch.PROGRAMS[name], group) for name in test_dispatch.ON_GLOO]


_PROGRAMS: dict[str, tuple[_Program, int]] = {
    "ddp": (_Ddp(), 3),
    "ddp with views": (_Ddp(gradient_as_bucket_view=True), 2),
    "ddp with unused parameters": (_Ddp(_Branches, find_unused_parameters=True), 2),
    "ddp with a static graph": (_Ddp(static_graph=True), 2),
    "ddp with a hook": (_Ddp(hook=_fp16), 2),
    "ddp with a hook in C++": (_Ddp(hook=_in_cpp), 2),
    "ddp with a hook of futures": (_Ddp(hook=_of_futures), 2),
    "ddp with PowerSGD": (test_ddp_options._power_sgd, 2),
    "ddp without sync": (_no_sync, 2),
    "ddp and Join": (_join, 2),
    "ddp with a buffer hook": (test_ddp_options._with_buffer_hook, 2),
    "ddp with another group": (test_ddp_options._update_group, 2),
    "zero optimizer": (test_optimizers._with_zero, 2),
    "mesh": (_split, 4),
    "mesh of torch": (test_sharding._meshes, 4),
    "fsdp": (test_sharding._fsdp, 2),
    "fsdp on a mesh": (test_sharding._fsdp_on_mesh, 4),
    "fsdp in bfloat16": (test_sharding._fsdp_in_bfloat16, 2),
    "dtensor": (test_sharding._redistribute, 4),
    "dtensor matmuls": (test_sharding._matmuls, 4),
    "tensor parallel": (test_sharding._tensor_parallel, 2),
    "pipeline": (test_sharding._Pipeline("1F1B"), 2),
    "functional collectives": (test_compiled._functional, 2),
    "gradient of a functional collective": (test_compiled._gradient, 2),
    "compiled step": (test_compiled._Compiled("aot_eager"), 2),
    "compiled ddp": (test_compiled._compiled_ddp, 2),
    "dispatch modes": (_AllPrograms(), 2),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_results_are_those_of_plain_gloo(name: str, tmp_path: Path) -> None:
    program, ranks = _PROGRAMS[name]
    plain = run_on_gloo(program, ranks, tmp_path, guarded=False)
    guarded = run_on_gloo(program, ranks, tmp_path, guarded=True)
    for rank, (one, other) in enumerate(zip(plain, guarded, strict=True)):
        assert same(one, other), f"rank {rank}: {one} on Gloo, {other} on guarded Gloo"


class _Differs:
    """Rank 1 has another model than the others, which DDP does not notice when it is made."""

    def __init__(self, hook: _Hook | None = None, **options: Any) -> None:
        self.hook, self.options = hook, options

    def __call__(self, rank: int, world: OnGloo) -> tuple[str, str]:
        torch.manual_seed(1)
        width = 10 if rank == 1 else 8
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)), init_sync=False, **self.options
        )
        if self.hook is not None:
            self.hook(model)
        loss = model(torch.ones(2, 6)).sum()
        with pytest.raises(phalanx.Mismatch) as caught:
            loss.backward()
        with pytest.raises(phalanx.Mismatch):
            dist.all_reduce(torch.ones(1))
        return caught.value.code, str(caught.value)


_BACKWARDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp with many buckets": {"bucket_cap_mb": 0.0001},
    "ddp with views": {"gradient_as_bucket_view": True},
    "ddp with a static graph": {"static_graph": True},
    "ddp with a hook": {"hook": _fp16},
    "ddp with a hook in C++": {"hook": _in_cpp},
    "ddp with a hook of futures": {"hook": _of_futures},
}


@pytest.mark.parametrize("name", _BACKWARDS)
def test_a_mismatch_in_a_backward_pass(name: str, tmp_path: Path) -> None:
    for code, text in run_on_gloo(_Differs(**_BACKWARDS[name]), 2, tmp_path, guarded=True):
        assert code == "MISMATCH:COUNT"
        assert "test_guarded.py" in text
        assert "loss.backward()" not in text


def _order_of_parameters(rank: int, world: OnGloo) -> str:
    """Rank 1 has the same parameters in another order: they differ once DDP has cut its buckets."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
    layers = [second, first] if rank == 1 else [first, second]
    model = DistributedDataParallel(nn.Sequential(*layers), init_sync=False, bucket_cap_mb=0.0001)
    model(torch.ones(2, 6)).sum().backward()
    loss = model(torch.ones(2, 6)).sum()
    with pytest.raises(phalanx.Mismatch) as caught:
        loss.backward()
    return caught.value.code


def test_another_order_of_parameters(tmp_path: Path) -> None:
    assert run_on_gloo(_order_of_parameters, 2, tmp_path, guarded=True) == ["MISMATCH:COUNT"] * 2


class _Dies:
    """Rank 1 is killed in its second backward pass, before it has made a call there."""

    def __init__(self, **options: Any) -> None:
        self.hook = options.pop("hook", None)
        self.options = options

    def __call__(self, rank: int, world: OnGloo) -> str:
        model = DistributedDataParallel(_deep(), **self.options)
        if self.hook is not None:
            self.hook(model)
        _step(model, rank, 0)
        output = model(_batch(rank, 1))
        if rank == 1:
            output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss = output.sum()
        with pytest.raises(phalanx.PeerLost) as caught:
            loss.backward()
        return str(caught.value)


@pytest.mark.parametrize("name", _BACKWARDS)
def test_a_rank_that_dies_in_a_backward_pass(name: str, tmp_path: Path) -> None:
    text, killed = run_on_gloo(_Dies(**_BACKWARDS[name]), 2, tmp_path, guarded=True)
    assert isinstance(killed, Killed)
    assert "rank 1 died (killed by SIGKILL)" in text


def _fsdp_differs(rank: int, world: OnGloo) -> str:
    torch.manual_seed(1)
    width = 10 if rank == 1 else 8
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4))
    torch.distributed.fsdp.fully_shard(model)
    with pytest.raises(phalanx.Mismatch) as caught:
        model(torch.ones(2, 6)).sum().backward()
    return caught.value.code


def test_fsdp_of_different_models(tmp_path: Path) -> None:
    assert run_on_gloo(_fsdp_differs, 2, tmp_path, guarded=True) == ["MISMATCH:COUNT"] * 2
