"""What the examples learn: to tell which of three intertwined spirals a point is on."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

NUM_CLASSES = 3


def spirals(num_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points and the spiral that each is on: a line can't part them, a small net can."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(NUM_CLASSES, (num_points,), generator=generator)
    radius = torch.rand(num_points, generator=generator).sqrt()
    angle = 2 * math.pi * (labels / NUM_CLASSES + 1.25 * radius)
    noise = 0.03 * torch.randn(num_points, 2, generator=generator)
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1) + noise, labels


def network(hidden: int = 256) -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES)
    )
