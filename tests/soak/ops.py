"""The table of ops that programs draw from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from calls import DTYPES, Call, Place, What
from collective_ops import (
    all_gather,
    all_gather_object,
    all_gather_single,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    coalesced,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    scatter,
)
from message_ops import any_source, batch, exchange, send

_COLLECTIVES = (
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_single,
    all_to_all,
    all_to_all_single,
    barrier,
    coalesced,
    all_gather_object,
)
_POINT_TO_POINT = (send, any_source, exchange, batch)
# Gloo, on which the harness itself can be tried, has every reduce op for integers only, and can't coalesce.
_GLOO_DTYPES = (torch.int64,)
_GLOO_LACKS = ("coalesced",)
OPS: dict[str, Callable[[What, Place], Call]] = {op.__name__: op for op in (*_COLLECTIVES, *_POINT_TO_POINT)}
POINT_TO_POINT = tuple(op.__name__ for op in _POINT_TO_POINT)


def collectives_of(backend: str) -> tuple[str, ...]:
    lacks = _GLOO_LACKS if backend == "gloo" else ()
    return tuple(op.__name__ for op in _COLLECTIVES if op.__name__ not in lacks)


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    return _GLOO_DTYPES if backend == "gloo" else DTYPES


def build(what: What, place: Place) -> Call:
    """The call of this rank; for a rank that takes no part in it, one that does nothing."""
    if place.me not in what.members(place.size):
        return Call(what, lambda: (), list)
    return OPS[what.op](what, place)
