"""DistributedDataParallel's options, against one process that has the gradients of all ranks."""

# Without annotations from __future__: DDP compares those of comm hooks with the classes.

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run_ranks import RunRanks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

import phalanx.testing as pt

_RANKS = 2
_STEPS = 3
_RATE = 0.05


def _mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 3, dtype=dtype))


def _batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 6, dtype=dtype, generator=torch.Generator().manual_seed(100 * rank + step))


def _loss(output: Tensor) -> Tensor:
    return (output - 1).abs().square().mean()


def _descend(parameters: Any) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_RATE)
                parameter.grad = None


def _train(model: nn.Module, rank: int, steps: range = range(_STEPS), dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        _loss(model(_batch(rank, step, dtype))).backward()
        _descend(model.parameters())


def _train_alone(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build()
    for step in range(_STEPS):
        (sum(_loss(model(_batch(rank, step, dtype))) for rank in range(_RANKS)) / _RANKS).backward()  # type: ignore[union-attr]
        _descend(model.parameters())
    return model


def _values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _assert_trained(results: list[list[Tensor]], expected: nn.Module) -> None:
    for values in results:
        torch.testing.assert_close(values, _values(expected))
        assert all(torch.equal(value, first) for value, first in zip(values, results[0], strict=True))


def _complex(rank: int, world: pt.World) -> list[Tensor]:
    model = DistributedDataParallel(_mlp(torch.complex64))
    _train(model, rank, dtype=torch.complex64)
    return _values(model)


def test_complex_parameters(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_complex, _RANKS), _train_alone(lambda: _mlp(torch.complex64), torch.complex64))


def _ignored(rank: int, world: pt.World) -> list[Tensor]:
    model = _mlp()
    first, last = model[0].bias, model[2].bias
    assert isinstance(first, Tensor)
    assert isinstance(last, Tensor)
    if rank == 1:
        nn.init.zeros_(last)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    wrapped = DistributedDataParallel(model)
    _loss(wrapped(_batch(rank, 0))).backward()
    return [parameter.grad for parameter in (first, last) if parameter.grad is not None]


def test_ignored_parameters_are_not_reduced(run_ranks: RunRanks) -> None:
    (reduced, own), (reduced_there, own_there) = run_ranks(_ignored, _RANKS)
    assert torch.equal(reduced, reduced_there)
    assert not torch.equal(own, own_there)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _with_buffer_hook(rank: int, world: pt.World) -> Tensor:
    model = DistributedDataParallel(_Counting())

    def add_up(state: Any, buffers: dict[str, Tensor]) -> Any:
        return [dist.all_reduce(buffers["seen"], async_op=True).get_future()]

    model._register_buffer_comm_hook(None, add_up, _BufferCommHookLocation.POST_FORWARD)
    model.module.seen.fill_(rank + 1.0)
    _loss(model(_batch(rank, 0))).backward()
    return model.module.seen.clone()  # type: ignore[no-any-return]


def test_buffer_hook(run_ranks: RunRanks) -> None:
    assert [seen.tolist() for seen in run_ranks(_with_buffer_hook, _RANKS)] == [[3.0, 3.0]] * 2


def _logging(rank: int, world: pt.World) -> dict[str, Any]:
    model = DistributedDataParallel(_mlp(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    _train(model, rank)
    return dict(model._get_ddp_logging_data())


def test_logging_data(run_ranks: RunRanks) -> None:
    for rank, data in enumerate(run_ranks(_logging, _RANKS)):
        assert data["world_size"] == _RANKS
        assert data["rank"] == rank
        assert data["backend_name"] == "phalanx"
        assert data["module_name"] == "Sequential"
        assert data["gradient_as_bucket_view"] == 1
        assert data["total_parameter_size_bytes"] == sum(4 * parameter.numel() for parameter in _mlp().parameters())


def _update_group(rank: int, world: pt.World) -> list[Tensor]:
    model = DistributedDataParallel(_mlp())
    _train(model, rank, range(1))
    model._update_process_group(dist.new_group())
    _train(model, rank, range(1, _STEPS))
    return _values(model)


def test_update_of_the_process_group(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_update_group, _RANKS), _train_alone(_mlp))


def _resume(rank: int, world: pt.World) -> list[Tensor]:
    path = Path(world.tmp_path) / "model.pt"
    model = DistributedDataParallel(_mlp())
    _train(model, rank, range(1))
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    again = DistributedDataParallel(_mlp())
    again.load_state_dict(torch.load(path))
    _train(again, rank, range(1, _STEPS))
    return _values(again)


def test_a_checkpoint_goes_on(run_ranks: RunRanks) -> None:
    _assert_trained(run_ranks(_resume, _RANKS), _train_alone(_mlp))


def _power_sgd(rank: int, world: pt.World) -> tuple[list[Tensor], float]:
    model = DistributedDataParallel(_mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = []
    for step in range(8):
        loss = _loss(model(_batch(rank, step)))
        loss.backward()
        losses.append(loss.item())
        _descend(model.parameters())
    return _values(model), losses[-1] - losses[0]


def test_power_sgd_hook(run_ranks: RunRanks) -> None:
    (values, change), (values_there, _) = run_ranks(_power_sgd, _RANKS)
    assert all(torch.equal(*pair) for pair in zip(values, values_there, strict=True))
    assert change < 0


def _autocast(rank: int, world: pt.World) -> list[Tensor]:
    model = DistributedDataParallel(_mlp())
    for step in range(_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model(_batch(rank, step)).float())
        loss.backward()
        _descend(model.parameters())
    return _values(model)


def _autocast_alone() -> nn.Module:
    with torch.autocast("cpu", torch.bfloat16):
        return _train_alone(_mlp)


def test_autocast(run_ranks: RunRanks) -> None:
    results = run_ranks(_autocast, _RANKS)
    torch.testing.assert_close(results[0], _values(_autocast_alone()), atol=1e-2, rtol=1e-1)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"forward_sync_buffers": False},
        {"init_sync": False},
        {"bucket_cap_mb": 0.001},
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    _assert_trained(run_ranks(_Optional(options), _RANKS), _train_alone(_mlp))


class _Optional:
    """A function of a rank that processes can be told of."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, rank: int, world: pt.World) -> list[Tensor]:
        model = _mlp()
        _train(DistributedDataParallel(model, **self.options), rank)
        return _values(model)
