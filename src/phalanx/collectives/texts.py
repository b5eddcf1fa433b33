"""The exchange of texts: every rank gets every rank's text, in rank order. The steps of split_group and
merge_remote_group are made of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx import _native
from phalanx.collectives import all_gather
from phalanx.types import DTYPE_CODES, Blocks, Call, GroupInfo

__all__ = ["exchange"]

# Bytes per rank of the first call: the text's length, and the text as far as there is room.
_ROW = 1024
_HEAD = 8


def exchange(info: GroupInfo, op: str, run: Callable[[Call], None], text: str) -> list[str]:
    """`run` carries out a call, which has the name `op`. A second one follows where a text is long."""
    own = text.encode()
    rows = _gather(info, op, run, len(own).to_bytes(_HEAD, "little") + own[: _ROW - _HEAD], _ROW)
    lengths = [int.from_bytes(row[:_HEAD], "little") for row in rows]
    longest = max(lengths)
    texts = [row[_HEAD:] for row in rows] if longest <= _ROW - _HEAD else _gather(info, op, run, own, longest)
    return [text[:length].decode() for text, length in zip(texts, lengths, strict=True)]


def _gather(info: GroupInfo, op: str, run: Callable[[Call], None], own: bytes, size: int) -> list[bytes]:
    # Memory of Python's: torch's own functions would make it on the default device, or none of it in a fake mode.
    memory = bytearray(info.size * size)
    # Plain tensors, also where the program is in inference mode.
    with torch.inference_mode(False):
        sent = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8)
        received = torch.frombuffer(memory, dtype=torch.uint8)
    described = _native.Description(op, dtype=DTYPE_CODES[torch.uint8], count=received.numel())
    run(Call(described, all_gather.meaning, Blocks([sent]), Blocks([received], info.size)))
    return [bytes(memory[rank * size : (rank + 1) * size]) for rank in range(info.size)]
