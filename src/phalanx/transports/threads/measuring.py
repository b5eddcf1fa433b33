"""What the native rules compare of the tensors of calls: the sizes of blocks, and a hash of results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx import _native
from phalanx.types import Blocks, Call

__all__ = ["find_splits", "hash_of_result"]


def find_splits(calls: Sequence[Call]) -> _native.Splits | None:
    """The first two ranks of which one sends what the other does not expect."""
    if not _native.TRAITS[calls[0].op].exchanges_sizes:
        return None
    sent = [_block_sizes(call.inputs) for call in calls]
    expected = [_block_sizes(call.outputs) for call in calls]
    return _native.Splits.find(sent, expected)


def hash_of_result(call: Call) -> int:
    """Of what must be equal on all ranks when the call has ended; 0 for other ops."""
    if not _native.TRAITS[call.op].shared_result:
        return 0
    with torch.inference_mode():
        inputs, outputs = _plain_tensors(call.inputs), _plain_tensors(call.outputs)
        return _native.hash_of_result(call.op, _memory_of(inputs), _memory_of(outputs))


def _plain_tensors(blocks: Blocks | None) -> list[torch.Tensor]:
    """The tensors, or copies that lie in memory as their elements do."""
    tensors = [] if blocks is None else blocks.tensors
    return [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Addresses and bytes."""
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def _block_sizes(blocks: Blocks | None) -> list[int]:
    """Bytes of each block."""
    assert blocks is not None
    width = blocks.tensors[0].element_size()
    if blocks.sizes is not None:
        return [size * width for size in blocks.sizes]
    if blocks.listed:
        each = len(blocks.tensors) // blocks.num
        tensors = [blocks.tensors[i * each : (i + 1) * each] for i in range(blocks.num)]
        return [sum(tensor.numel() for tensor in block) * width for block in tensors]
    return [sum(tensor.numel() for tensor in blocks.tensors) // blocks.num * width] * blocks.num
