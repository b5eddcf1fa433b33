"""Copies of tensors that do not lie in plain memory."""

from __future__ import annotations

import torch

from phalanx.types import REDUCIBLE, Blocks

__all__ = [
    "Copies",
    "StandIns",
    "clone",
    "copy_back",
    "is_plain",
    "like",
    "plain",
    "plain_tensor",
]

Copies = list[tuple[torch.Tensor, torch.Tensor]]
# Copies that calls in flight have of tensors, by the `id` of the tensor.
StandIns = dict[int, torch.Tensor]


def like(blocks: Blocks, tensors: list[torch.Tensor]) -> Blocks:
    return Blocks(tensors, blocks.num, sizes=blocks.sizes, listed=blocks.listed)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in plain row-major memory."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in plain row-major memory: itself, where it lies there already."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def plain(blocks: Blocks | None, stand_ins: StandIns) -> tuple[Blocks | None, Copies]:
    """The blocks with every tensor in plain row-major memory, and the pairs (tensor, its copy) that this took.

    `stand_ins` are copies that exist already. The tensors of the pairs are aliases, which keep their memory.
    """
    if blocks is None:
        return None, []
    copies = []
    tensors = []
    for tensor in blocks.tensors:
        copy = stand_ins.get(id(tensor))
        if copy is None:
            copy = plain_tensor(tensor)
        if copy is not tensor:
            copies.append((tensor.detach(), copy))
        tensors.append(copy)
    return (like(blocks, tensors), copies) if copies else (blocks, copies)


def copy_back(copies: Copies) -> None:
    """Writes the copies to the tensors that they were made of."""
    # Writing in inference mode neither asks for grad nor refuses inference tensors.
    with torch.inference_mode():
        for tensor, copy in copies:
            tensor.copy_(copy)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in REDUCIBLE or tensor.is_quantized:
        return tensor.clone()
    # torch has no copy kernel for the dtypes below a byte.
    return tensor.reshape(-1).view(torch.uint8).clone().view(tensor.dtype)
