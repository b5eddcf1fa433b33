"""Point to point as calls with known results. Several messages of one tag must come in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from calls import Call, Place, What, WrongDataError, blank, data


def _messages(what: What) -> range:
    """Up to three of one tag, which must come in order."""
    return range(1 + what.choice % 3)


def send(what: What, place: Place) -> Call:
    return _one_way(what, place, 8 * what.tag, any_source=False)


def any_source(what: What, place: Place) -> Call:
    # A tag for each sender: else a sender that is ahead could be taken for the one that is due.
    return _one_way(what, place, 8 * what.tag + 1 + what.ends(place.size)[0], any_source=True)


def _one_way(what: What, place: Place, tag: int, *, any_source: bool) -> Call:
    source, target = what.ends(place.size)
    rest: dict[str, Any] = {"group": place.group, "tag": tag}
    if place.me == source:
        messages = [data(what, source, block) for block in _messages(what)]

        def start_sending() -> Sequence[Any]:
            if what.async_op:
                return [dist.isend(message, place.ranks[target], **rest) for message in messages]
            for message in messages:
                dist.send(message, place.ranks[target], **rest)
            return ()

        return Call(what, start_sending, list)
    outputs = [blank(what) for _ in _messages(what)]

    def start_receiving() -> Sequence[Any]:
        peer = None if any_source else place.ranks[source]
        if what.async_op:
            return [dist.irecv(output, peer, **rest) for output in outputs]
        for output in outputs:
            sender = dist.recv(output, peer, **rest)
            if sender != place.ranks[source]:
                raise WrongDataError(f"{what}: came from rank {sender}, not from rank {place.ranks[source]}")
        return ()

    return Call(
        what, start_receiving, lambda: [(output, data(what, source, block)) for block, output in enumerate(outputs)]
    )


def exchange(what: What, place: Place) -> Call:
    """irecv, then isend, on both ends."""
    ends = what.ends(place.size)
    peer = ends[0] if place.me == ends[1] else ends[1]
    return _swap(what, place, peer, peer, batch=False)


def batch(what: What, place: Place) -> Call:
    """Round the ring, with batch_isend_irecv."""
    return _swap(what, place, (place.me + 1) % place.size, (place.me - 1) % place.size, batch=True)


def _swap(what: What, place: Place, target: int, source: int, *, batch: bool) -> Call:
    outputs = [blank(what) for _ in _messages(what)]
    messages = [data(what, place.me, block) for block in _messages(what)]
    to, of, tag = place.ranks[target], place.ranks[source], 8 * what.tag

    def start() -> Sequence[Any]:
        if batch:
            ops = [dist.P2POp(dist.irecv, output, of, place.group, tag) for output in outputs]
            ops += [dist.P2POp(dist.isend, message, to, place.group, tag) for message in messages]
            return dist.batch_isend_irecv(ops)
        works = [dist.irecv(output, of, group=place.group, tag=tag) for output in outputs]
        return works + [dist.isend(message, to, group=place.group, tag=tag) for message in messages]

    return Call(what, start, lambda: [(output, data(what, source, block)) for block, output in enumerate(outputs)])
