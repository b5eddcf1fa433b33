"""Reading and writing the blocks of a call: what `meaning` needs besides arithmetic.

Tensors of any shape and stride are read and written in their logical order. All of it runs in inference mode, which may
write to tensors that require grad and to inference tensors alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.types import REDUCIBLE, Blocks

__all__ = ["give", "look", "take"]

_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def look(blocks: Blocks) -> list[Tensor]:
    """The tensors of the only block, flat: for those who write nothing before they have read all."""
    return [_flat(_copyable(tensor)) for tensor in blocks.tensors]


def _flat(tensor: Tensor) -> Tensor:
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.ndim == 1 else tensor.reshape(-1)


def take(blocks: Blocks) -> list[list[Tensor]]:
    """Flat copies of the tensors of each block."""
    copies = [_copyable(tensor).clone(memory_format=torch.contiguous_format).view(-1) for tensor in blocks.tensors]
    if blocks.listed or (blocks.num == 1 and blocks.sizes is None):
        return Blocks(copies, blocks.num, listed=True).views()
    parts = [torch.split(copy, blocks.sizes or [copy.numel() // blocks.num] * blocks.num) for copy in copies]
    return [list(block) for block in zip(*parts, strict=True)]


def give(blocks: Blocks, values: list[list[Tensor]]) -> None:
    """Writes flat values, of the form that `take` gives, to the tensors of each block."""
    if blocks.listed or (blocks.num == 1 and blocks.sizes is None):
        wholes = [value for block in values for value in block]
    else:
        wholes = [torch.cat(parts) for parts in zip(*values, strict=True)]
    for tensor, whole in zip(blocks.tensors, wholes, strict=True):
        _copyable(tensor).copy_(whole if tensor.ndim == 1 else whole.view(tensor.shape))


def _copyable(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that torch can copy: it has no copies for some, and for quantized ones a copy would
    take the scale along."""
    if tensor.dtype in REDUCIBLE:
        return tensor
    plain = torch.empty(0, dtype=_OF_SIZE[tensor.element_size()])
    return plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
