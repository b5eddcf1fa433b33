"""What torch does not let a group on the CPU, or one that is written in Python, do; docs/training.md lists it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def _gather_into() -> None:
    group = dist.group.WORLD
    assert group is not None
    gathered = torch.empty(4)
    torch.ops._c10d_functional.all_gather_into_tensor_out(torch.ones(2), 2, group.group_name, out=gathered)


LIMITS: dict[str, tuple[Callable[[], Any], str]] = {
    "monitored_barrier": (
        lambda: dist.monitored_barrier(),
        "ValueError: monitored_barrier is only implemented for GLOO backend.",
    ),
    "split_group": (
        lambda: dist.split_group(split_ranks=[[0, 1]]),
        "RuntimeError: No device associated with the default pg, not safe to split any process groups",
    ),
    "SyncBatchNorm": (
        lambda: nn.SyncBatchNorm(2)(torch.ones(3, 2)),
        "ValueError: SyncBatchNorm expected input tensor to be on GPU",
    ),
    "optimizer in backward": (
        _optimizer_in_backward,
        "RuntimeError: Cannot access accelerator device when none is available.",
    ),
    "mixed precision": (_mixed_precision, "RuntimeError: cpu backend doesn't support events."),
    "FSDP1": (
        lambda: _step(FullyShardedDataParallel(nn.Linear(2, 2))),
        "RuntimeError: FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
    ),
    "all_gather_into_tensor_out": (_gather_into, "RuntimeError: No backend type associated with device type cpu"),
}


class _Try:
    """A function of a rank that processes can be told of."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, rank: int, world: pt.World) -> str:
        try:
            LIMITS[self.name][0]()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"


@pytest.mark.parametrize("name", LIMITS)
def test_limit_is_what_the_docs_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most of them are about the want of a GPU: the ranks are to see none.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    expected = LIMITS[name][1]
    assert f"`{expected}" in DOCS.read_text()
    for told in pt.run(_Try(name), 2, processes=True):
        assert told.startswith(expected)
