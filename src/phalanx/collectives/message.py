"""send and recv: one rank gets another's tensor. Messages of one sender and tag arrive in order.

A message is no Call: it has two sides only, and nothing about it is compared across the group.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from phalanx.collectives.checks import check_tensor, fail
from phalanx.collectives.moving import give, take
from phalanx.types import DTYPE_CODES, Blocks, GroupInfo

__all__ = ["ANY_SOURCE", "check", "meaning", "plain"]

# Receive from whoever comes first.
ANY_SOURCE = -1
_MOST_TAG = 2**31 - 1
_STRIDED = torch.strided
_PLAIN_CODES = {dtype: code for dtype, code in DTYPE_CODES.items() if not dtype.is_complex}


def plain(info: GroupInfo, tensor: Any, peer: Any, tag: Any) -> int:
    """The dtype's code where the message is right as it stands and the tensor's memory can be used as it is, else 0.

    Most messages are of this kind; for them nothing else needs to be looked at.
    """
    try:
        code = _PLAIN_CODES.get(tensor.dtype, 0)
        fits = tensor.layout is _STRIDED and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    except AttributeError:
        return 0
    right = type(peer) is int and 0 <= peer < info.size and type(tag) is int and 0 <= tag <= _MOST_TAG
    return code if fits and right else 0


def check(info: GroupInfo, op: str, tensor: Any, peer: Any, tag: Any) -> tuple[int, int]:
    """Peer and tag as numbers. Raises where this rank's side of a message is wrong.

    `peer` is ANY_SOURCE for a receive from anybody.
    """
    check_tensor(info, op, "tensor", tensor, written=op == "recv")
    peer, tag = _whole(peer), _whole(tag)
    if type(peer) is not int or not 0 <= peer < info.size:
        _check_peer(info, op, peer)
    if type(tag) is not int or not 0 <= tag <= _MOST_TAG:
        fail(
            info,
            op,
            "TAG",
            f"expected a tag between 0 and {_MOST_TAG}, got {tag!r}",
            "number the kinds of messages from 0",
        )
    return peer, tag


def _whole(number: Any) -> Any:
    """Other classes of whole numbers, such as NumPy's, as an int."""
    try:
        return operator.index(number)
    except TypeError:
        return number


def meaning(sent: Tensor, received: Tensor) -> None:
    give(Blocks([received]), take(Blocks([sent])))


def _check_peer(info: GroupInfo, op: str, peer: Any) -> None:
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
