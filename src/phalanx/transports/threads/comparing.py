"""Whether the calls of all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx import _native
from phalanx.transports.threads.in_flight import CallInFlight
from phalanx.types import Blocks, Call

__all__ = ["Comparing", "find_splits", "hash_of_result"]


class Comparing:
    """The calls of all ranks that have come to the next call."""

    def __init__(self, size: int, check: int) -> None:
        self._size = size
        self._check = check
        self._calls: dict[int, _native.MadeCall] = {}
        self.completed: list[_native.MadeCall | None] = [None] * size
        self._results = [0] * size
        self.difference: tuple[int, int] | None = None
        self.note: _native.ShapeNote | None = None
        self._shapes_noted = False

    def post(self, call: CallInFlight) -> None:
        made = _native.MadeCall(call.description, seq=call.seq, result=self._results[call.rank], where=call.where)
        self._calls[call.rank] = made
        first = next(iter(self._calls))
        if self.difference is None and not self._agree(self._calls[first], made):
            self.difference = first, call.rank
        elif self.difference is None and not _have_same_shape(self._calls[first], made) and not self._shapes_noted:
            self._shapes_noted = True
            one, other = (_side(rank, self._calls[rank]) for rank in sorted((first, call.rank)))
            self.note = _native.ShapeNote(op=call.op, seq=call.seq, one=one, other=other)

    def _agree(self, one: _native.MadeCall, other: _native.MadeCall) -> bool:
        if not one.description.agrees_with(other.description):
            return False
        return self._check != _native.CHECK_FULL or (_have_same_shape(one, other) and one.result == other.result)

    def calls(self) -> dict[int, _native.MadeCall]:
        return self._calls

    def complete(self, calls: Sequence[Call]) -> None:
        for rank, call in enumerate(calls):
            self.completed[rank] = self._calls[rank]
            if self._check == _native.CHECK_FULL:
                self._results[rank] = hash_of_result(call)
        self._calls = {}


def _side(rank: int, made: _native.MadeCall) -> _native.ShapeSide:
    return _native.ShapeSide(rank=rank, shape=made.description.shape, where=made.where)


def _have_same_shape(one: _native.MadeCall, other: _native.MadeCall) -> bool:
    shape = one.description.shape
    return shape.may_differ or shape == other.description.shape


def _traits_of(call: Call) -> _native.OpTraits:
    return _native.TRAITS[call.op]


def hash_of_result(call: Call) -> int:
    """Of what must be equal on all ranks when the call has ended."""
    if not _traits_of(call).shared_result:
        return 0
    with torch.inference_mode():
        inputs, outputs = _plain(call.inputs), _plain(call.outputs)
        return _native.hash_of_result(call.op, _memory_of(inputs), _memory_of(outputs))


def _plain(blocks: Blocks | None) -> list[torch.Tensor]:
    """Its tensors, or copies, that lie in memory as the elements do."""
    tensors = [] if blocks is None else blocks.tensors
    return [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]


def _memory_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def find_splits(calls: Sequence[Call]) -> _native.Splits | None:
    """The first two ranks of which one sends what the other does not expect."""
    if not _traits_of(calls[0]).exchanges_sizes:
        return None
    return _native.Splits.find(
        [_block_sizes(call.inputs) for call in calls], [_block_sizes(call.outputs) for call in calls]
    )


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
