"""Shared memory between the processes of one host: turns calls into requests to the native core.

`rendezvous` makes the segment, `failures` turns what went wrong into exceptions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import NoReturn

import torch

from phalanx import _native
from phalanx.transports import failures
from phalanx.types import DTYPE_CODES, NO_ROOT, Blocks, Call, GroupInfo

_OP_NUMBERS = {name: number for number, name in enumerate(_native.OPS)}
_ALL_REDUCE = _OP_NUMBERS["all_reduce"]
_SINGLE_OPS = frozenset({"all_reduce", "broadcast", "reduce"})
# 0 for the dtypes that only move, and for calls without tensors.
_dtype_code: Callable[[torch.dtype | None, int], int] = DTYPE_CODES.get  # type: ignore[assignment]
_COMPLEX = frozenset(code for dtype, code in DTYPE_CODES.items() if dtype.is_complex)
_IN_PLACE_OPS = frozenset({"all_reduce", "reduce"})

# Addresses, sizes in bytes, number of blocks, and whether the pieces are listed block by block or cut evenly.
_Spans = tuple[list[int], list[int], int, bool]
_NO_SPANS: _Spans = ([], [], 0, False)


class ShmTransport:
    """One rank's end of a segment.

    The native group is thread-safe and serialises calls; nothing here is kept between calls but the identity.
    """

    __slots__ = ("_group", "_info", "_left_at", "_run_single")

    def __init__(self, group: _native.Group, info: GroupInfo) -> None:
        self._group: _native.Group | None = group
        self._info = info
        self._run_single = group.run_single
        self._left_at = 0

    @property
    def seq(self) -> int:
        group = self._group
        return self._left_at if group is None else group.seq

    def abort(self, reason: str) -> None:
        group = self._group
        if group is not None and not group.forked:
            group.abort(reason)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._left_at = group.seq
            self._run_single = _closed
            group.leave()

    def all_reduce_plain(self, tensor: torch.Tensor, dtype_code: int, reduce_op: int, timeout: float) -> None:
        address, size = tensor.data_ptr(), tensor.nbytes
        status = self._run_single(
            _ALL_REDUCE, reduce_op, NO_ROOT, dtype_code, tensor.numel(), 0, 1.0, timeout, address, size, True, True
        )
        if status != _native.FINISHED:
            self._raise("all_reduce", status, timeout)

    def run(self, call: Call, timeout: float) -> None:
        inputs, outputs = call.inputs, call.outputs
        blocks = inputs or outputs
        if call.op in _SINGLE_OPS and blocks is not None and len(blocks.tensors) == 1:
            tensor = blocks.tensors[0]
            dtype = _dtype_code(call.dtype, 0)
            if tensor.is_contiguous() and not tensor.is_neg() and (dtype not in _COMPLEX or not tensor.is_conj()):
                status = self._run_single(
                    _OP_NUMBERS[call.op],
                    call.reduce_op,
                    call.root,
                    dtype,
                    call.count,
                    call.layout if dtype else _layout(call),
                    call.factor,
                    timeout,
                    tensor.data_ptr(),
                    tensor.nbytes,
                    inputs is not None,
                    outputs is not None,
                )
                if status != _native.FINISHED:
                    self._raise(call.op, status, timeout)
                return
        self._run_general(call, timeout)

    def _run_general(self, call: Call, timeout: float) -> None:
        inputs, input_copies = _plain(call.inputs)
        outputs, output_copies = _plain(call.outputs)
        if input_copies and call.op in _IN_PLACE_OPS and outputs is not None:
            outputs, output_copies = inputs, input_copies
        spans_in, spans_out = _spans(inputs), _spans(outputs)
        if _overlap(call, spans_in, spans_out, self._info.rank):
            assert inputs is not None
            inputs = _like(inputs, [_clone(tensor) for tensor in inputs.tensors])
            spans_in = _spans(inputs)
        group = self._group
        if group is None:
            self._raise(call.op, _native.LEFT, timeout)
        status = group.run(
            _OP_NUMBERS[call.op],
            call.reduce_op,
            call.root,
            _dtype_code(call.dtype, 0),
            call.count,
            _layout(call),
            call.factor,
            timeout,
            *spans_in,
            *spans_out,
        )
        if status != _native.FINISHED:
            self._raise(call.op, status, timeout)
        if output_copies:
            # Writing in inference mode neither asks for grad nor refuses inference tensors.
            with torch.inference_mode():
                for tensor, copy in output_copies:
                    tensor.copy_(copy)

    def _raise(self, op: str, status: int, timeout: float) -> NoReturn:
        raise failures.explain(self._group, self._info, op, status, timeout)


def _closed(*_: object) -> int:
    return _native.LEFT


def _layout(call: Call) -> int:
    """How the elements are divided, and, for the dtypes that have no code of their own, which dtype they are."""
    if call.dtype is None or call.dtype in DTYPE_CODES:
        return call.layout
    return zlib.crc32(f"{call.dtype} {call.layout}".encode())


def _like(blocks: Blocks, tensors: list[torch.Tensor]) -> Blocks:
    return Blocks(tensors, blocks.num, sizes=blocks.sizes, listed=blocks.listed)


def _plain(blocks: Blocks | None) -> tuple[Blocks | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The blocks with every tensor in plain row-major memory, and the pairs (tensor, its copy) that this took."""
    if blocks is None:
        return None, []
    copies = []
    tensors = []
    for tensor in blocks.tensors:
        plain = tensor
        if tensor.is_neg() or tensor.is_conj():
            plain = tensor.resolve_conj().resolve_neg()
        plain = plain.contiguous()
        if plain is not tensor:
            copies.append((tensor, plain))
        tensors.append(plain)
    return (_like(blocks, tensors), copies) if copies else (blocks, copies)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in DTYPE_CODES or tensor.is_quantized:
        return tensor.clone()
    # torch has no copy kernel for the dtypes below a byte.
    return tensor.reshape(-1).view(torch.uint8).clone().view(tensor.dtype)


def _spans(blocks: Blocks | None) -> _Spans:
    if blocks is None:
        return _NO_SPANS
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


def _overlap(call: Call, spans_in: _Spans, spans_out: _Spans, rank: int) -> bool:
    """Whether writing outputs could destroy inputs that are still to be read.

    In place, where each byte is read before it is written, is none of that: the same memory on both sides, or a rank's
    own block of the longer side.
    """
    pieces_in = [(a, a + n) for a, n in zip(spans_in[0], spans_in[1], strict=True) if n]
    pieces_out = [(a, a + n) for a, n in zip(spans_out[0], spans_out[1], strict=True) if n]
    if call.op in _IN_PLACE_OPS:
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


def _by_block(spans: _Spans) -> list[list[tuple[int, int]]]:
    addresses, sizes, num, listed = spans
    if listed:
        each = len(addresses) // num
        pieces = [(a, a + n) for a, n in zip(addresses, sizes, strict=True)]
        return [pieces[b * each : (b + 1) * each] for b in range(num)]
    return [
        [(a + b * (n // num), a + (b + 1) * (n // num)) for a, n in zip(addresses, sizes, strict=True)]
        for b in range(num)
    ]
