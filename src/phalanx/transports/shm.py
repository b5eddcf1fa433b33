"""Shared memory between the processes of one host: turns calls into requests to the native core, and its failures into
exceptions. `rendezvous` makes the segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from phalanx import _native
from phalanx.errors import Aborted, CallTimeout, GroupError, Mismatch, PeerLost
from phalanx.transports.signatures import Signature, compare
from phalanx.types import DTYPE_CODES, Blocks, Call, GroupInfo

_OP_NUMBERS = {name: number for number, name in enumerate(_native.OPS)}
_SINGLE_OPS = frozenset({"all_reduce", "broadcast", "reduce"})
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
        return self._left_at if self._group is None else self._group.seq

    def abort(self, reason: str) -> None:
        if self._group is not None and not self._group.forked:
            self._group.abort(reason)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._left_at = group.seq
            self._run_single = _closed
            group.leave()

    def run(self, call: Call, timeout: float) -> None:
        blocks = call.inputs if call.inputs is not None else call.outputs
        if call.op in _SINGLE_OPS and blocks is not None and len(blocks.tensors) == 1:
            tensor = blocks.tensors[0]
            if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
                status = self._run_single(
                    _OP_NUMBERS[call.op],
                    call.reduce_op,
                    call.root,
                    DTYPE_CODES.get(tensor.dtype, 0),
                    call.count,
                    call.factor,
                    timeout,
                    tensor.data_ptr(),
                    tensor.nbytes,
                    call.inputs is not None,
                    call.outputs is not None,
                )
                if status != _native.FINISHED:
                    self._raise(call, status, timeout)
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
            inputs = _like(inputs, [tensor.clone() for tensor in inputs.tensors])
            spans_in = _spans(inputs)
        group = self._group
        if group is None:
            raise _left(self._info, call.op)
        status = group.run(
            _OP_NUMBERS[call.op],
            call.reduce_op,
            call.root,
            0 if call.dtype is None else DTYPE_CODES.get(call.dtype, 0),
            call.count,
            call.layout,
            call.factor,
            timeout,
            *spans_in,
            *spans_out,
        )
        if status != _native.FINISHED:
            self._raise(call, status, timeout)
        if output_copies:
            # Writing in inference mode neither asks for grad nor refuses inference tensors.
            with torch.inference_mode():
                for tensor, copy in output_copies:
                    tensor.copy_(copy)

    def _raise(self, call: Call, status: int, timeout: float) -> NoReturn:
        group, info = self._group, self._info
        if group is None:
            raise _left(info, call.op)
        if status == _native.FORKED:
            raise GroupError(
                "this process is a fork of the one that made the group, which does not go along",
                code="GROUP:FORKED",
                group=info.name,
                rank=info.rank,
                op=call.op,
                hint="make the group in the child, or start ranks with spawn",
            )
        raise _explain(group, info, call.op, status == _native.WAS_BROKEN, timeout)


def _closed(*_: object) -> int:
    return _native.FAILED


def _left(info: GroupInfo, op: str) -> GroupError:
    return GroupError(
        "the group was destroyed on this rank",
        code="GROUP:CLOSED",
        group=info.name,
        rank=info.rank,
        op=op,
        hint="make a new group, or move this call before destroy_process_group()",
    )


def _explain(
    group: _native.Group, info: GroupInfo, op: str, was_broken: bool, timeout: float
) -> Mismatch | CallTimeout | PeerLost | Aborted:
    """The exception for the group's failure, which this rank or a peer has found."""
    failure = group.failure()
    kind, finder, seq = failure["kind"], failure["rank"], failure["seq"]
    here = {"group": info.name, "rank": info.rank, "op": op, "seq": group.seq + 1 if was_broken else group.seq}
    broken = "the group is broken since " if was_broken else ""
    if kind == _native.FAILURE_MISMATCH:
        return _mismatch(group, info, failure, broken)
    if kind == _native.FAILURE_TIMEOUT:
        missing = _ranks(failure["missing"], failure["num_missing"])
        if finder == info.rank and not was_broken:
            message = f"gave up after a timeout of {timeout:g} s: {missing} did not come"
        else:
            message = f"{broken}rank {finder} gave up on seq {seq} after its timeout ran out: {missing} did not come"
        return CallTimeout(
            message, **here, hint=f"look at what {missing} did instead; if it was only slow, raise the group's timeout"
        )
    if kind == _native.FAILURE_LEFT:
        return PeerLost(
            f"{broken}rank {failure['peer']} destroyed the group while rank {finder} still waited for it in seq {seq}",
            **here,
            hint=f"let rank {failure['peer']} make as many calls as the others before it destroys the group",
        )
    who = "a rank" if finder < 0 else "this rank" if finder == info.rank else f"rank {finder}"
    return Aborted(
        f"{broken}{who} aborted it: {failure['text'] or 'abort() was called'}",
        **here,
        hint="make a new group; the first error on the rank that aborted tells why",
    )


def _mismatch(group: _native.Group, info: GroupInfo, failure: dict[str, Any], broken: str) -> Mismatch:
    finder, peer, seq = failure["rank"], failure["peer"], failure["seq"]
    mine, theirs = (Signature.from_native(group.describe(rank, seq)) for rank in (finder, peer))
    field, detail = compare(mine, theirs, seq, failure["text"])
    return Mismatch(
        f"{broken}ranks {finder} and {peer} disagree{detail}\n"
        f"  rank {finder}: {mine.describe(seq)}\n"
        f"  rank {peer}: {theirs.describe(seq)}",
        code=f"MISMATCH:{field}",
        group=info.name,
        rank=info.rank,
        op=mine.op,
        seq=seq,
        hint="make both ranks issue the same calls in the same order; the group can't be used any more",
    )


def _ranks(ranks: Sequence[int], total: int) -> str:
    listed = ", ".join(map(str, ranks))
    if total > len(ranks):
        listed += f" and {total - len(ranks)} more"
    return f"rank {listed}" if total == 1 else f"ranks {listed}"


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
    if not pieces_in or not pieces_out:
        return False
    if min(pieces_in)[0] >= max(b for _, b in pieces_out) or min(pieces_out)[0] >= max(b for _, b in pieces_in):
        return False
    if call.op in _IN_PLACE_OPS:
        return False
    blocks_in, blocks_out = _by_block(spans_in), _by_block(spans_out)
    for b_in, block_in in enumerate(blocks_in):
        for b_out, block_out in enumerate(blocks_out):
            own = (len(blocks_in) == 1 or b_in == rank) and (len(blocks_out) == 1 or b_out == rank)
            if own and block_in == block_out and len(blocks_in) != len(blocks_out):
                continue
            if any(a < d and c < b for a, b in block_in for c, d in block_out):
                return True
    return False


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
