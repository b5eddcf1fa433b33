"""Tensors as memory: addresses and sizes for the native core, copies of tensors that do not lie in plain memory, and
whether what a call writes lies where it still has to read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch

from phalanx import _native
from phalanx.types import REDUCIBLE, Blocks, Call

__all__ = [
    "IN_PLACE_OPS",
    "Copies",
    "Spans",
    "StandIns",
    "clone",
    "copy_back",
    "hold",
    "is_plain",
    "like",
    "overlap",
    "plain",
    "plain_tensor",
    "spans_of",
]

IN_PLACE_OPS = frozenset(op.name for op in _native.OPS if op.in_place)

# Addresses, sizes in bytes, number of blocks, and whether the pieces are listed block by block or cut evenly.
Spans = tuple[list[int], list[int], int, bool]
NO_SPANS: Spans = ([], [], 0, False)
Copies = list[tuple[torch.Tensor, torch.Tensor]]
# Copies that calls in flight have of tensors, by the `id` of the tensor.
StandIns = dict[int, torch.Tensor]


def hold(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """What keeps the memory of tensors, even where `set_` or `.data = ...` gives a tensor object other memory."""
    return [tensor.untyped_storage() for tensor in tensors]


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


def spans_of(blocks: Blocks | None) -> Spans:
    if blocks is None:
        return NO_SPANS
    tensors = blocks.tensors
    if blocks.sizes is not None:
        address, width = tensors[0].data_ptr(), tensors[0].element_size()
        addresses, sizes = [], []
        for numel in blocks.sizes:
            addresses.append(address)
            sizes.append(numel * width)
            address += numel * width
        return addresses, sizes, blocks.num, True
    return [t.data_ptr() for t in tensors], [t.nbytes for t in tensors], blocks.num, blocks.listed


def overlap(call: Call, spans_in: Spans, spans_out: Spans, rank: int) -> bool:
    """Whether writing outputs could destroy inputs that are still to be read.

    In place, where each byte is read before it is written, is none of that: the same memory on both sides, or a rank's
    own block of the longer side.
    """
    pieces_in = [(a, a + n) for a, n in zip(spans_in[0], spans_in[1], strict=True) if n]
    pieces_out = [(a, a + n) for a, n in zip(spans_out[0], spans_out[1], strict=True) if n]
    if call.op in IN_PLACE_OPS:
        # Piece by piece; a piece that shares memory with another one would be read after that one was written.
        return len(pieces_out) > 1 and _touch(pieces_out, [])
    if not _touch(pieces_in, pieces_out):
        return False
    blocks_in, blocks_out = _by_block(spans_in), _by_block(spans_out)
    for b_in, block_in in enumerate(blocks_in):
        for b_out, block_out in enumerate(blocks_out):
            own = (len(blocks_in) == 1 or b_in == rank) and (len(blocks_out) == 1 or b_out == rank)
            if own and block_in == block_out and 1 in (len(blocks_in), len(blocks_out)):
                continue
            if any(a < d and c < b for a, b in block_in for c, d in block_out):
                return True
    return False


def _touch(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    """Whether any two of the pieces share memory."""
    ordered = sorted([*some, *others])
    return any(end > start for (_, end), (start, _) in pairwise(ordered))


def _by_block(spans: Spans) -> list[list[tuple[int, int]]]:
    addresses, sizes, num, listed = spans
    if listed:
        each = len(addresses) // num
        pieces = [(a, a + n) for a, n in zip(addresses, sizes, strict=True)]
        return [pieces[b * each : (b + 1) * each] for b in range(num)]
    return [
        [(a + b * (n // num), a + (b + 1) * (n // num)) for a, n in zip(addresses, sizes, strict=True)]
        for b in range(num)
    ]
