"""What torch does not let a group on the CPU, or one that is written in Python, do; docs/training.md lists it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from limits import WORKS, Limit
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import phalanx.testing as pt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def _step(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def _optimizer_in_backward() -> None:
    model = nn.Linear(2, 2)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    _step(DistributedDataParallel(model))


def _mixed_precision() -> None:
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    _step(DistributedDataParallel(nn.Linear(2, 2), mixed_precision=precision))


_WITHOUT_DRIVER = "AcceleratorError: CUDA error", "RuntimeError: Backend doesn't support create a new Stream."
LIMITS = {
    "monitored_barrier": Limit(
        lambda: dist.monitored_barrier(),
        {(2, 13): "ValueError: monitored_barrier is only implemented for GLOO backend.", (2, 14): WORKS},
    ),
    "split_group": Limit(
        lambda: dist.split_group(split_ranks=[[0, 1]]),
        {
            (2, 13): "RuntimeError: No device associated with the default pg, not safe to split any process groups",
            (2, 15): WORKS,
        },
    ),
    "SyncBatchNorm": Limit(
        lambda: nn.SyncBatchNorm(2)(torch.ones(3, 2)),
        {(2, 13): "ValueError: SyncBatchNorm expected input tensor to be on GPU"},
    ),
    "optimizer in backward": Limit(
        _optimizer_in_backward,
        {(2, 13): "RuntimeError: Cannot access accelerator device when none is available."},
        on_cuda_build=_WITHOUT_DRIVER,
    ),
    "mixed precision": Limit(
        _mixed_precision,
        {(2, 13): "RuntimeError: cpu backend doesn't support events."},
        on_cuda_build=_WITHOUT_DRIVER,
    ),
    "FSDP1": Limit(
        lambda: _step(FullyShardedDataParallel(nn.Linear(2, 2))),
        {(2, 13): "RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected."},
    ),
}


class _Try:
    """A function of a rank that processes can be told of."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rank: int, world: pt.World) -> str:
        return LIMITS[self.name].outcome()


@pytest.mark.parametrize("name", LIMITS)
def test_limit_is_what_torch_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most of them are about a missing GPU: hide those of the machine from the ranks.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    expected = LIMITS[name].expected()
    for told in pt.run(_Try(name), 2, processes=True):
        assert told.startswith(expected)


@pytest.mark.parametrize("name", LIMITS)
def test_docs_list_the_limit_for_every_version(name: str) -> None:
    (row,) = (line for line in DOCS.read_text().splitlines() if line.startswith("|") and name in line.split("|")[1])
    for text in LIMITS[name].texts():
        assert (f"`{text}" if text != WORKS else "torch 2.13") in row
