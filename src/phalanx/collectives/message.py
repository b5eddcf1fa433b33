"""send and recv: one rank gets another's tensor. Messages of one sender and tag arrive in order.

A message is no Call: it has two sides only, and nothing about it is compared across the group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx.collectives.checks import check_tensor, fail
from phalanx.collectives.moving import give, take
from phalanx.collectives.numbers import index_of, whole
from phalanx.types import Blocks, GroupInfo

__all__ = ["ANY_SOURCE", "check", "known_ends", "meaning"]

# Receive from whoever comes first.
ANY_SOURCE = -1
_MOST_TAG = 2**31 - 1


def check(info: GroupInfo, op: str, tensor: Any, peer: Any, tag: Any) -> tuple[int, int]:
    """Peer and tag as numbers. Raises where this rank's side of a message is wrong.

    `peer` is ANY_SOURCE for a receive from anybody.
    """
    check_tensor(info, op, "tensor", tensor, written=op == "recv")
    peer = whole(info, op, "PEER", "the peer", peer)
    tag = whole(info, op, "TAG", "the tag", tag)
    if not 0 <= peer < info.size:
        _check_peer(info, op, peer)
    if not 0 <= tag <= _MOST_TAG:
        fail(
            info,
            op,
            "TAG",
            f"expected a tag between 0 and {_MOST_TAG}, got {tag!r}",
            "number the kinds of messages from 0",
        )
    return peer, tag


def known_ends(info: GroupInfo, op: str, peer: Any, tag: Any) -> tuple[int | None, int | None]:
    """Peer and tag of a message that may be wrong, as far as they are right."""
    peer, tag = index_of(peer), index_of(tag)
    is_peer = peer is not None and (0 <= peer < info.size or (op == "recv" and peer == ANY_SOURCE))
    is_tag = tag is not None and 0 <= tag <= _MOST_TAG
    return peer if is_peer else None, tag if is_tag else None


def meaning(sent: Tensor, received: Tensor) -> None:
    give(Blocks([received]), take(Blocks([sent])))


def _check_peer(info: GroupInfo, op: str, peer: int) -> None:
    if op == "recv" and peer == ANY_SOURCE and info.size > 1:
        return
    if op == "recv" and peer == ANY_SOURCE:
        fail(
            info,
            op,
            "PEER",
            "expected a group of several ranks to receive from any of the others, got one of a single rank",
            "name this rank as the source to receive what it sends to itself",
        )
    fail(
        info,
        op,
        "PEER",
        f"expected a peer between 0 and {info.size - 1}, got {peer!r}",
        "give the peer as a rank within this group (dist.get_group_rank turns a global rank into one)",
    )
