"""Tensors that do not lie in plain row-major memory, and the copies of them that the core reads and writes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.types import REDUCIBLE, Blocks

__all__ = [
    "Pairs",
    "StandIns",
    "clone",
    "copy_back",
    "is_plain",
    "like",
    "to_plain",
    "to_plain_unread",
    "with_plain_tensors",
]

# Tensors, each with the copy of it that the core writes.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
# Copies that calls in flight have of tensors, by the `id` of the tensor.
StandIns = dict[int, torch.Tensor]


def like(blocks: Blocks, tensors: list[torch.Tensor]) -> Blocks:
    return Blocks(tensors, blocks.num, sizes=blocks.sizes, listed=blocks.listed)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it lies in plain row-major memory."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def to_plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is plain, else a plain copy with the same elements."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def to_plain_unread(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is plain, else plain memory of the same form, which a call overwrites completely."""
    if is_plain(tensor):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def with_plain_tensors(
    blocks: Blocks | None, stand_ins: StandIns, make: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Blocks | None, Pairs]:
    """The blocks with plain tensors, and the pairs of those that were replaced.

    A tensor is replaced by its stand-in, or by what `make` makes of it. The tensors of the pairs are aliases, which
    keep their memory.
    """
    if blocks is None:
        return None, []
    pairs = []
    tensors = []
    for tensor in blocks.tensors:
        copy = stand_ins.get(id(tensor))
        if copy is None:
            copy = make(tensor)
        if copy is not tensor:
            pairs.append((tensor.detach(), copy))
        tensors.append(copy)
    return (like(blocks, tensors), pairs) if pairs else (blocks, pairs)


def copy_back(pairs: Pairs) -> None:
    """Writes the copies to the tensors that they were made of."""
    # Writing in inference mode neither asks for grad nor refuses inference tensors.
    with torch.inference_mode():
        for tensor, copy in pairs:
            tensor.copy_(copy)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in REDUCIBLE or tensor.is_quantized:
        return tensor.clone()
    # torch has no copy kernel for the dtypes below a byte.
    return tensor.reshape(-1).view(torch.uint8).clone().view(tensor.dtype)
