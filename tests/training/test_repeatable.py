"""The same training gives the same weights on every rank and in every repeat, bit for bit; Gloo's losses are near."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx.testing as pt

_STEPS = 12


class _Train:
    """A function of a rank that processes can be told of."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(self, rank: int, world: pt.World) -> tuple[bytes, list[float]]:
        torch.manual_seed(11)
        layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
        group = dist.new_group(backend=self.backend)
        model = DistributedDataParallel(
            nn.Sequential(*layers, nn.Linear(64, 1)), process_group=group, bucket_cap_mb=0.02
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(_STEPS):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * rank + step))
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=group)
            losses.append(mean.item() / world.size)
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        return weights, losses


@pytest.mark.parametrize("ranks", [2, 4])
def test_same_weights_on_every_rank_and_in_every_repeat(ranks: int) -> None:
    results = [result for _ in range(3) for result in pt.run(_Train("phalanx"), ranks, processes=True)]
    results += pt.run(_Train("phalanx"), ranks, seed=1)
    weights, losses = results[0]
    assert all(result == (weights, losses) for result in results)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_are_those_of_gloo(ranks: int) -> None:
    (_, ours), *_ = pt.run(_Train("phalanx"), ranks, processes=True)
    (_, theirs), *_ = pt.run(_Train("gloo"), ranks, processes=True)
    assert ours == pytest.approx(theirs, rel=1e-4)
