"""Trains a small classifier whose layers are computed by several ranks together (tensor parallel), on Phalanx.

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py

The ranks form a mesh of two rows: the ranks of a row hold the columns of one layer and the rows of the next, the rows
see different data. The only line that has to do with Phalanx is `dist.init_process_group("phalanx")`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spirals import network, parse_steps, say, train


def main() -> None:
    steps = parse_steps(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    if dist.get_world_size() % 2:
        raise SystemExit(f"Expected an even number of ranks, got {dist.get_world_size()}: --nproc-per-node 4")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    say(f"{dist.get_world_size()} ranks: {mesh['tensor'].size()} compute a layer, {mesh['data'].size()} parts of data")
    # Ranks that compute a layer together see the same data.
    train(model, steps, part=mesh["data"].get_local_rank(), num_parts=mesh["data"].size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
