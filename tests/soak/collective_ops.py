"""The collectives as calls with known results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from calls import Call, Pairs, Place, What, WrongDataError, blank, data, reduce_op, reduced
from torch.distributed.distributed_c10d import _coalescing_manager


def _started(work: Any) -> Sequence[Any]:
    return () if work is None else (work,)


def _collective(
    what: What, place: Place, function: Callable[..., Any], pairs: Callable[[], Pairs], *args: Any, **kwargs: Any
) -> Call:
    def start() -> Sequence[Any]:
        return _started(function(*args, group=place.group, async_op=what.async_op, **kwargs))

    return Call(what, start, pairs)


def _all_inputs(what: What, place: Place, block: int = 0) -> list[torch.Tensor]:
    return [data(what, rank, block) for rank in range(place.size)]


def all_reduce(what: What, place: Place) -> Call:
    tensor = data(what, place.me)

    def pairs() -> Pairs:
        return [(tensor, reduced(what, _all_inputs(what, place)))]

    return _collective(what, place, dist.all_reduce, pairs, tensor, op=reduce_op(what))


def reduce(what: What, place: Place) -> Call:
    tensor = data(what, place.me)
    root = what.choice // 8 % place.size

    def pairs() -> Pairs:
        # What the others hold afterwards is not defined.
        return [(tensor, reduced(what, _all_inputs(what, place)))] if place.me == root else []

    return _collective(what, place, dist.reduce, pairs, tensor, dst=place.ranks[root], op=reduce_op(what))


def broadcast(what: What, place: Place) -> Call:
    root = what.choice % place.size
    tensor = data(what, root) if place.me == root else blank(what)
    return _collective(what, place, dist.broadcast, lambda: [(tensor, data(what, root))], tensor, src=place.ranks[root])


def all_gather(what: What, place: Place) -> Call:
    outputs = [blank(what) for _ in place.ranks]

    def pairs() -> Pairs:
        return list(zip(outputs, _all_inputs(what, place), strict=True))

    return _collective(what, place, dist.all_gather, pairs, outputs, data(what, place.me))


def all_gather_single(what: What, place: Place) -> Call:
    output = blank(what, what.count * place.size)

    def pairs() -> Pairs:
        return [(output, torch.cat(_all_inputs(what, place)))]

    return _collective(what, place, dist.all_gather_single, pairs, output, data(what, place.me))


def gather(what: What, place: Place) -> Call:
    root = what.choice % place.size
    outputs = [blank(what) for _ in place.ranks] if place.me == root else None

    def pairs() -> Pairs:
        return [] if outputs is None else list(zip(outputs, _all_inputs(what, place), strict=True))

    return _collective(what, place, dist.gather, pairs, data(what, place.me), outputs, dst=place.ranks[root])


def scatter(what: What, place: Place) -> Call:
    root = what.choice % place.size
    output = blank(what)
    inputs = [data(what, root, block) for block in range(place.size)] if place.me == root else None

    def pairs() -> Pairs:
        return [(output, data(what, root, place.me))]

    return _collective(what, place, dist.scatter, pairs, output, inputs, src=place.ranks[root])


def reduce_scatter(what: What, place: Place) -> Call:
    output = blank(what)
    inputs = [data(what, place.me, block) for block in range(place.size)]

    def pairs() -> Pairs:
        return [(output, reduced(what, _all_inputs(what, place, place.me)))]

    return _collective(what, place, dist.reduce_scatter, pairs, output, inputs, op=reduce_op(what))


def reduce_scatter_single(what: What, place: Place) -> Call:
    output = blank(what)
    whole = torch.cat([data(what, place.me, block) for block in range(place.size)])

    def pairs() -> Pairs:
        return [(output, reduced(what, _all_inputs(what, place, place.me)))]

    return _collective(what, place, dist.reduce_scatter_single, pairs, output, whole, op=reduce_op(what))


def all_to_all(what: What, place: Place) -> Call:
    outputs = [blank(what) for _ in place.ranks]
    inputs = [data(what, place.me, block) for block in range(place.size)]

    def pairs() -> Pairs:
        return list(zip(outputs, _all_inputs(what, place, place.me), strict=True))

    return _collective(what, place, dist.all_to_all, pairs, outputs, inputs)


def all_to_all_single(what: What, place: Place) -> Call:
    """With splits that differ: rank r sends count + r + b elements to rank b."""
    sends = [what.count + place.me + block for block in range(place.size)]
    receives = [what.count + rank + place.me for rank in range(place.size)]
    whole = torch.cat([data(what, place.me, block, sends[block]) for block in range(place.size)])
    output = blank(what, sum(receives))

    def pairs() -> Pairs:
        return [(output, torch.cat([data(what, rank, place.me, receives[rank]) for rank in range(place.size)]))]

    return _collective(what, place, dist.all_to_all_single, pairs, output, whole, receives, sends)


def barrier(what: What, place: Place) -> Call:
    return _collective(what, place, dist.barrier, list)


def coalesced(what: What, place: Place) -> Call:
    tensors = [data(what, place.me, block) for block in range(3)]

    def start() -> Sequence[Any]:
        with _coalescing_manager(place.group, torch.device("cpu"), async_ops=what.async_op) as works:
            for tensor in tensors:
                dist.all_reduce(tensor, op=reduce_op(what), group=place.group)
        return (works,) if what.async_op else ()

    def pairs() -> Pairs:
        return [(tensor, reduced(what, _all_inputs(what, place, block))) for block, tensor in enumerate(tensors)]

    return Call(what, start, pairs)


def all_gather_object(what: What, place: Place) -> Call:
    outputs: list[Any] = [None] * place.size
    own = {"salt": what.salt, "rank": place.me}

    def start() -> Sequence[Any]:
        dist.all_gather_object(outputs, own, group=place.group)
        return ()

    def pairs() -> Pairs:
        if outputs != [{"salt": what.salt, "rank": rank} for rank in range(place.size)]:
            raise WrongDataError(f"{what}: got {outputs}")
        return []

    return Call(what, start, pairs)
