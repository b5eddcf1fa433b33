"""Trains a small classifier whose weights are divided among the ranks (FSDP2), on Phalanx.

    torchrun --nproc-per-node 4 examples/train_fsdp.py

Each rank holds a part of every layer and sees a part of the data. In the end the ranks write a checkpoint together and
read it again. The only line that has to do with Phalanx is `dist.init_process_group("phalanx")`.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spirals import network, parse_steps, say, train


def main() -> None:
    steps = parse_steps(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("phalanx")
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    say(f"{dist.get_world_size()} ranks, each with {own_weights(model):,} of {all_weights(model):,} weights")
    train(model, steps, part=dist.get_rank(), num_parts=dist.get_world_size())
    save_and_load(model)
    dist.destroy_process_group()


def save_and_load(model: nn.Module) -> None:
    """Writes a checkpoint, forgets the weights and reads them again. The first rank makes the folder and removes it."""
    with tempfile.TemporaryDirectory() if dist.get_rank() == 0 else nullcontext() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders, src=0)
        trained = [own_part(parameter).clone() for parameter in model.parameters()]
        save(model.state_dict(), checkpoint_id=folders[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load(model.state_dict(), checkpoint_id=folders[0])
        dist.barrier()
    read = [own_part(parameter) for parameter in model.parameters()]
    if not all(torch.equal(*pair) for pair in zip(trained, read, strict=True)):
        raise SystemExit(f"Rank {dist.get_rank()} read other weights than it wrote.")
    say("All ranks have read the checkpoint as they wrote it.")


def own_part(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def own_weights(model: nn.Module) -> int:
    return sum(own_part(parameter).numel() for parameter in model.parameters())


def all_weights(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    main()
