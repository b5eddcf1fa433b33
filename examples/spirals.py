"""What the examples learn: to tell which of three intertwined spirals a point is on."""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_CLASSES = 3
BATCH = 64


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


def train(model: nn.Module, steps: int, part: int, num_parts: int) -> None:
    """Trains on one part of the data; all ranks take part in every step."""
    points, labels = (data[part::num_parts] for data in spirals(6000, seed=1))
    test_points, test_labels = spirals(1500, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(part)
    for step in range(1, steps + 1):
        batch = torch.randint(len(points), (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(model(points[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 5) == 0:
            with torch.no_grad():
                right = (model(test_points).argmax(dim=1) == test_labels).float().mean()
            say(f"step {step:4d}   loss {loss.item():.4f}   test accuracy {right.item():6.1%}")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_steps(description: str | None) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    steps: int = parser.parse_args().steps
    return steps
