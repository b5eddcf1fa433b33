"""What steps of random programs are made of: Python source of one rank's side of a call.

Every side is one line, so that a line number tells the step. A side is written from the step's parameters: written from
others it is the side of a rank that disagrees.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "COLLECTIVES",
    "DTYPES",
    "EARLY",
    "MESSAGES",
    "OBJECTS",
    "REDUCE_OPS",
    "REDUCING",
    "ROOTED",
    "Params",
    "Side",
    "Spot",
    "draw_params",
    "write_side",
]

# Those that object collectives use are not among them: what they exchange must not be taken for sizes.
DTYPES = ("float32", "float64", "int32", "int16")
REDUCE_OPS = ("SUM", "MAX", "MIN", "PRODUCT")

_MOST_ELEMENTS = 5
# More than a slot of the staging memory of processes takes.
_MANY_ELEMENTS = 40_000

Params = dict[str, Any]


class Side(NamedTuple):
    """One rank's side of a step: what it is given or gets, the call, and what must hold when that has ended."""

    tensors: str
    call: str
    check: str


class Spot(NamedTuple):
    """Where a side is written."""

    members: tuple[int, ...]  # the ranks of the group, of all, in the group's order
    rank: int  # of all
    group: str  # its name in the source
    name: str  # of what the call gives

    @property
    def me(self) -> int:
        """The rank within the group."""
        return self.members.index(self.rank)


def draw_params(rng: random.Random, members: Sequence[int], dtypes: Sequence[str] = DTYPES) -> Params:
    """For any kind of step."""
    size = len(members)
    return {
        "dtype": rng.choice(dtypes),
        "count": _MANY_ELEMENTS if rng.random() < 0.02 else rng.randint(1, _MOST_ELEMENTS),
        "root": rng.choice(members),
        "reduce_op": rng.choice(REDUCE_OPS),
        "sizes": [rng.randint(0, _MOST_ELEMENTS) for _ in range(size)],
        # What rank p sends to rank q.
        "matrix": [[rng.randint(0, 3) for _ in range(size)] for _ in range(size)],
    }


def write_side(kind: str, params: Params, at: Spot) -> Side:
    return _WRITERS[kind](params, at)


def _value(rank: int) -> int:
    """What all elements are that a rank gives."""
    return rank + 1


def _reduced(params: Params, members: Sequence[int]) -> int:
    values = [_value(rank) for rank in members]
    by_name: dict[str, Callable[[list[int]], int]] = {"SUM": sum, "MAX": max, "MIN": min, "PRODUCT": math.prod}
    return by_name[params["reduce_op"]](values)


def _full(count: int, value: int, params: Params) -> str:
    return f"full({count}, {value}, '{params['dtype']}')"


def _empty(count: int, params: Params) -> str:
    return _full(count, 0, params)


def _op(params: Params) -> str:
    return f"op=dist.ReduceOp.{params['reduce_op']}"


def _all_reduce(params: Params, at: Spot) -> Side:
    return Side(
        _full(params["count"], _value(at.rank), params),
        f"dist.all_reduce({at.name}, {_op(params)}, group={at.group})",
        f"holds({at.name}, {_reduced(params, at.members)})",
    )


def _coalesced(params: Params, at: Spot) -> Side:
    parts = [_full(count, _value(at.rank), params) for count in (params["count"], 2)]
    return Side(
        f"[{', '.join(parts)}]",
        f"dist.all_reduce_coalesced({at.name}, {_op(params)}, group={at.group})",
        f"[holds(each, {_reduced(params, at.members)}) for each in {at.name}]",
    )


def _broadcast(params: Params, at: Spot) -> Side:
    root = params["root"]
    return Side(
        _full(params["count"], _value(at.rank), params),
        f"dist.broadcast({at.name}, {root}, group={at.group})",
        f"holds({at.name}, {_value(root)})",
    )


def _reduce(params: Params, at: Spot) -> Side:
    root = params["root"]
    return Side(
        _full(params["count"], _value(at.rank), params),
        f"dist.reduce({at.name}, {root}, {_op(params)}, group={at.group})",
        f"holds({at.name}, {_reduced(params, at.members) if at.rank == root else _value(at.rank)})",
    )


def _gather(params: Params, at: Spot) -> Side:
    root, given = params["root"], _full(params["count"], _value(at.rank), params)
    if at.rank != root:
        return Side(
            given, f"dist.gather({at.name}, None, {root}, group={at.group})", f"holds({at.name}, {_value(at.rank)})"
        )
    outputs = ", ".join(_empty(params["count"], params) for _ in at.members)
    return Side(
        f"[{outputs}]",
        f"dist.gather({given}, {at.name}, {root}, group={at.group})",
        f"hold({at.name}, {[_value(each) for each in at.members]})",
    )


def _scatter(params: Params, at: Spot) -> Side:
    root = params["root"]
    inputs = ", ".join(_full(params["count"], _value(each), params) for each in at.members)
    return Side(
        _empty(params["count"], params),
        f"dist.scatter({at.name}, {f'[{inputs}]' if at.rank == root else None}, {root}, group={at.group})",
        f"holds({at.name}, {_value(at.rank)})",
    )


def _all_gather_of(params: Params, at: Spot, sizes: Sequence[int]) -> Side:
    outputs = ", ".join(_empty(size, params) for size in sizes)
    given = _full(sizes[at.me], _value(at.rank), params)
    return Side(
        f"[{outputs}]",
        f"dist.all_gather({at.name}, {given}, group={at.group})",
        f"hold({at.name}, {[_value(each) for each in at.members]})",
    )


def _all_gather(params: Params, at: Spot) -> Side:
    return _all_gather_of(params, at, [params["count"]] * len(at.members))


def _all_gather_uneven(params: Params, at: Spot) -> Side:
    return _all_gather_of(params, at, params["sizes"])


def _all_gather_single(params: Params, at: Spot) -> Side:
    count = params["count"]
    return Side(
        _empty(count * len(at.members), params),
        f"dist.all_gather_single({at.name}, {_full(count, _value(at.rank), params)}, group={at.group})",
        f"hold({at.name}.chunk({len(at.members)}), {[_value(each) for each in at.members]})",
    )


def _reduce_scatter(params: Params, at: Spot) -> Side:
    inputs = ", ".join(_full(size, _value(at.rank), params) for size in params["sizes"])
    return Side(
        _empty(params["sizes"][at.me], params),
        f"dist.reduce_scatter({at.name}, [{inputs}], {_op(params)}, group={at.group})",
        f"holds({at.name}, {_reduced(params, at.members)})",
    )


def _reduce_scatter_single(params: Params, at: Spot) -> Side:
    count = params["count"]
    given = _full(count * len(at.members), _value(at.rank), params)
    return Side(
        _empty(count, params),
        f"dist.reduce_scatter_single({at.name}, {given}, {_op(params)}, group={at.group})",
        f"holds({at.name}, {_reduced(params, at.members)})",
    )


def _all_to_all_single(params: Params, at: Spot) -> Side:
    total = params["count"] * len(at.members)
    return Side(
        _empty(total, params),
        f"dist.all_to_all_single({at.name}, {_full(total, _value(at.rank), params)}, group={at.group})",
        f"hold({at.name}.chunk({len(at.members)}), {[_value(each) for each in at.members]})",
    )


def _all_to_all_uneven(params: Params, at: Spot) -> Side:
    me, matrix = at.me, params["matrix"]
    sent, received = matrix[me], [row[me] for row in matrix]
    given = _full(sum(sent), _value(at.rank), params)
    return Side(
        _empty(sum(received), params),
        f"dist.all_to_all_single({at.name}, {given}, {received}, {sent}, group={at.group})",
        f"hold({at.name}.split({received}), {[_value(each) for each in at.members]})",
    )


def _all_to_all(params: Params, at: Spot) -> Side:
    me, matrix = at.me, params["matrix"]
    inputs = ", ".join(_full(size, _value(at.rank), params) for size in matrix[me])
    outputs = ", ".join(_empty(row[me], params) for row in matrix)
    return Side(
        f"[{outputs}]",
        f"dist.all_to_all({at.name}, [{inputs}], group={at.group})",
        f"hold({at.name}, {[_value(each) for each in at.members]})",
    )


def _barrier(params: Params, at: Spot) -> Side:
    return Side("None", f"dist.barrier(group={at.group})", "None")


def _all_gather_object(params: Params, at: Spot) -> Side:
    return Side(
        f"[None] * {len(at.members)}",
        f"dist.all_gather_object({at.name}, 'x' * {_value(at.rank)}, group={at.group})",
        f"agree([len(each) for each in {at.name}], {[_value(each) for each in at.members]})",
    )


def _broadcast_object_list(params: Params, at: Spot) -> Side:
    root = params["root"]
    return Side(
        f"[{_value(at.rank)}]",
        f"dist.broadcast_object_list({at.name}, {root}, group={at.group})",
        f"agree({at.name}, [{_value(root)}])",
    )


def _gather_object(params: Params, at: Spot) -> Side:
    root = params["root"]
    is_root = at.rank == root
    return Side(
        f"[None] * {len(at.members)}" if is_root else "None",
        f"dist.gather_object({_value(at.rank)}, {at.name}, {root}, group={at.group})",
        f"agree({at.name}, {[_value(each) for each in at.members] if is_root else None})",
    )


def _scatter_object_list(params: Params, at: Spot) -> Side:
    root = params["root"]
    given = [_value(each) for each in at.members] if at.rank == root else None
    return Side(
        "[None]",
        f"dist.scatter_object_list({at.name}, {given}, {root}, group={at.group})",
        f"agree({at.name}, [{_value(at.rank)}])",
    )


# Messages. The parameters also have who sends to whom, and the tag.


def _send(params: Params, at: Spot, function: str = "send") -> Side:
    given = _full(params["count"], _value(at.rank), params)
    return Side("None", f"dist.{function}({given}, {params['to']}, group={at.group}, tag={params['tag']})", "None")


def _recv(params: Params, at: Spot, function: str = "recv") -> Side:
    return Side(
        _empty(params["count"], params),
        f"dist.{function}({at.name}, {params['sender']}, group={at.group}, tag={params['tag']})",
        f"holds({at.name}, {_value(params['sender'])})",
    )


def _message(params: Params, at: Spot) -> Side:
    return _send(params, at) if at.rank == params["sender"] else _recv(params, at)


def _isend(params: Params, at: Spot) -> Side:
    return _send(params, at, "isend")


def _irecv(params: Params, at: Spot) -> Side:
    return _recv(params, at, "irecv")


def _batch(params: Params, at: Spot) -> Side:
    """Both ranks send to each other."""
    peer = params["to"] if at.rank == params["sender"] else params["sender"]
    more = f"{peer}, {at.group}, {params['tag']}"
    sent = f"dist.P2POp(dist.isend, {_full(params['count'], _value(at.rank), params)}, {more})"
    received = f"dist.P2POp(dist.irecv, {at.name}, {more})"
    return Side(
        _empty(params["count"], params),
        f"[work.wait() for work in dist.batch_isend_irecv([{sent}, {received}])]",
        f"holds({at.name}, {_value(peer)})",
    )


def _fan_in(params: Params, at: Spot) -> Side:
    """One rank receives, from anybody, what the others send."""
    if at.rank != params["to"]:
        return _send(params, at)
    senders = sorted(set(at.members) - {at.rank})
    received = f"dist.recv(each, group={at.group}, tag={params['tag']})"
    return Side(
        f"[{', '.join(_empty(params['count'], params) for _ in senders)}]",
        f"{at.name} = [({received}, each) for each in {at.name}]",
        f"[hold([each], [source + 1]) for source, each in {at.name}]; "
        f"agree(sorted(source for source, _ in {at.name}), {senders})",
    )


_WRITERS: dict[str, Callable[[Params, Spot], Side]] = {
    "all_reduce": _all_reduce,
    "coalesced": _coalesced,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _all_gather,
    "all_gather_uneven": _all_gather_uneven,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "all_to_all_single": _all_to_all_single,
    "all_to_all_uneven": _all_to_all_uneven,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "message": _message,
    "isend": _isend,
    "recv": _recv,
    "irecv": _irecv,
    "send": _send,
    "batch": _batch,
    "fan_in": _fan_in,
}
OBJECTS = tuple(kind for kind in _WRITERS if "object" in kind)
# One side first, the other one later, and both at once.
EARLY = {"isend": "recv", "irecv": "send"}
MESSAGES = ("message", "batch", "fan_in", *EARLY, *EARLY.values())
COLLECTIVES = tuple(kind for kind in _WRITERS if kind not in (*OBJECTS, *MESSAGES))
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "coalesced", "reduce", "reduce_scatter", "reduce_scatter_single")
