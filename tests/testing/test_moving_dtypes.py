"""Ranks that disagree about dtypes which only move are told both dtypes by name, on both transports."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.testing import World, run

PAIRS = [
    (torch.float8_e8m0fnu, torch.uint8),
    (torch.quint8, torch.uint8),
    (torch.bits8, torch.float4_e2m1fn_x2),
    (torch.int4, torch.uint3),  # type: ignore[attr-defined]
    # Of different widths.
    (torch.bits16, torch.qint8),
]


def _empty(dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        # Torch is about to give up quantized dtypes.
        warnings.simplefilter("ignore", UserWarning)
        return torch.empty(4, dtype=dtype)


def _disagree(rank: int, world: World, dtypes: tuple[torch.dtype, torch.dtype], is_message: bool) -> str:
    tensor = _empty(dtypes[rank])
    try:
        if not is_message:
            dist.broadcast(tensor, 0)
        elif rank == 0:
            dist.send(tensor, 1, tag=3)
        else:
            dist.recv(tensor, 0, tag=3)
        # A rank that waited for nobody learns of it here.
        dist.barrier()
    except phalanx.Mismatch as error:
        return str(error)
    return "nothing was told"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize(
    "dtypes", PAIRS, ids=lambda pair: "-".join(str(dtype).removeprefix("torch.") for dtype in pair)
)
def test_both_dtypes_are_named(dtypes: tuple[torch.dtype, torch.dtype], processes: bool) -> None:
    one, other = map(_name, dtypes)
    for text in run(partial(_disagree, dtypes=dtypes, is_message=False), 2, processes=processes):
        assert text.startswith("[MISMATCH:DTYPE]")
        assert f"  rank 0: broadcast(root 0, 4 elements of {one})  <-- {one}\n" in text
        assert f"  rank 1: broadcast(root 0, 4 elements of {other})  <-- {other}\n" in text
    for text in run(partial(_disagree, dtypes=dtypes, is_message=True), 2, processes=processes):
        assert text.startswith("[MISMATCH:DTYPE]")
        assert f"  rank 0: send(4 elements of {one}, to rank 1, tag 3)  <-- {one}\n" in text
        assert f"  rank 1: recv(4 elements of {other}, from rank 0, tag 3)  <-- {other}\n" in text
