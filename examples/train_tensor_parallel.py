"""Trains a small classifier whose layers are computed by several ranks together (tensor parallel), on Phalanx.

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py

The ranks form a mesh of two rows: the ranks of a row hold the columns of one layer and the rows of the next, the rows
see different data. The only line that has to do with Phalanx is `dist.init_process_group("phalanx")`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spirals import network, spirals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    if dist.get_world_size() % 2:
        raise SystemExit(f"Expected an even number of ranks, got {dist.get_world_size()}: --nproc-per-node 4")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    say(f"{dist.get_world_size()} ranks: {mesh['tensor'].size()} compute a layer, {mesh['data'].size()} parts of data")
    train(model, mesh, options.steps)
    dist.destroy_process_group()


def train(model: nn.Module, mesh: DeviceMesh, steps: int) -> None:
    # Ranks that compute a layer together see the same data.
    part, parts = mesh["data"].get_local_rank(), mesh["data"].size()
    points, labels = spirals(6000, seed=1)
    points, labels = points[part::parts], labels[part::parts]
    test_points, test_labels = spirals(1500, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(part)
    for step in range(1, steps + 1):
        batch = torch.randint(len(points), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(points[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % max(1, steps // 5) == 0:
            with torch.no_grad():
                right = (model(test_points).argmax(dim=1) == test_labels).float().mean()
            say(f"step {step:4d}   loss {loss.item():.4f}   test accuracy {right.item():6.1%}")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
