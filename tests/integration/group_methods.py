"""Every op of a group as a method under torch's public name, for tests that go through all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import phalanx
import phalanx.testing as pt

__all__ = ["LONG", "METHODS", "Arguments", "Method", "group_of"]

# So many elements do not fit into an envelope: a send waits for its receiver.
LONG = 5000
_MAX = dist.ReduceOp.MAX


def group_of(rank: int, world: pt.World, name: str = "group") -> phalanx.ProcessGroup:
    """The group of all ranks of a world of threads."""
    return phalanx.ProcessGroup(dist.PrefixStore(name, world.store), rank, world.size, name=name)


class Arguments:
    """Tensors of one rank, of two: `tensor` is full of the rank, inputs of 10 * rank and 10 * rank + 1."""

    def __init__(self, rank: int, count: int = 2) -> None:
        self.rank = rank
        self.count = count
        self.tensor = torch.full((count,), float(rank))
        self.outputs = [torch.empty(count), torch.empty(count)]
        self.inputs = [torch.full((count,), 10.0 * rank), torch.full((count,), 10.0 * rank + 1)]
        self.whole = torch.empty(2 * count)


Options = dict[str, Any]
Call = Callable[[phalanx.ProcessGroup, Arguments, Options], Any]


@dataclass
class Method:
    """`call` passes the options `timeout` and `async_op` on, and rank 0 needs rank 1 for it.

    By rank, `result` is what the work gives, two of each.
    `wrong` makes a wrong call, which is refused with the code.
    """

    call: Call
    result: list[list[float]]
    wrong: Callable[[phalanx.ProcessGroup], Any]
    code: str


def _at(rank: int, a: Arguments, value: Any) -> Any:
    return value if a.rank == rank else None


_BOTH = torch.ones(2)
_SPARSE = torch.eye(2).to_sparse()
_NUMBER: Any = 3

METHODS: dict[str, Method] = {
    "all_reduce": Method(
        lambda g, a, o: g.all_reduce(a.tensor, op=_MAX, **o),
        [[1], [1]],
        lambda g: g.all_reduce(_BOTH, op=_NUMBER),
        "INVALID:REDUCE_OP",
    ),
    "all_reduce_coalesced": Method(
        lambda g, a, o: g.all_reduce_coalesced([a.tensor, a.inputs[0]], _MAX, **o),
        [[1, 10], [1, 10]],
        lambda g: g.all_reduce_coalesced([], op=_MAX),
        "INVALID:LIST",
    ),
    "reduce": Method(
        lambda g, a, o: g.reduce(a.tensor, dst=0, op=_MAX, **o),
        [[1], [1]],
        lambda g: g.reduce(_BOTH, dst=7),
        "INVALID:ROOT",
    ),
    "broadcast": Method(
        lambda g, a, o: g.broadcast(a.tensor, src=1, **o),
        [[1], [1]],
        lambda g: g.broadcast(_BOTH, src=0, root=1),
        "INVALID:ROOT",
    ),
    "all_gather": Method(
        lambda g, a, o: g.all_gather(a.outputs, a.tensor, **o),
        [[0, 1], [0, 1]],
        lambda g: g.all_gather([], tensor=_BOTH),
        "INVALID:LIST",
    ),
    "all_gather_single": Method(
        lambda g, a, o: g.all_gather_single(a.whole, a.tensor, **o),
        [[0, 1], [0, 1]],
        lambda g: g.all_gather_single(output_tensor=torch.ones(7), input_tensor=_BOTH),
        "INVALID:SIZE",
    ),
    "all_gather_into_tensor": Method(
        lambda g, a, o: g.all_gather_into_tensor(output_tensor=a.whole, input_tensor=a.tensor, **o),
        [[0, 1], [0, 1]],
        lambda g: g.all_gather_into_tensor(torch.ones(7), _BOTH),
        "INVALID:SIZE",
    ),
    "all_gather_coalesced": Method(
        lambda g, a, o: g.all_gather_coalesced([[t] for t in a.outputs], [a.tensor], **o),
        [[0, 1], [0, 1]],
        lambda g: g.all_gather_coalesced(output_tensor_lists=[], input_tensor_list=[_BOTH]),
        "INVALID:LIST",
    ),
    "gather": Method(
        lambda g, a, o: g.gather(a.tensor, _at(0, a, a.outputs), dst=0, **o),
        [[0, 1], []],
        lambda g: g.gather(_BOTH, gather_list=[], dst=g.rank()),
        "INVALID:LIST",
    ),
    "scatter": Method(
        lambda g, a, o: g.scatter(a.tensor, _at(1, a, a.inputs), src=1, **o),
        [[10], [11]],
        lambda g: g.scatter(_BOTH, scatter_list=None, root=g.rank()),
        "INVALID:LIST",
    ),
    "reduce_scatter": Method(
        lambda g, a, o: g.reduce_scatter(a.tensor, a.inputs, op=_MAX, **o),
        [[10], [11]],
        lambda g: g.reduce_scatter(_BOTH, input_list=[]),
        "INVALID:LIST",
    ),
    "reduce_scatter_single": Method(
        lambda g, a, o: g.reduce_scatter_single(a.tensor, torch.cat(a.inputs), **o),
        [[10], [12]],
        lambda g: g.reduce_scatter_single(output=_BOTH, input=torch.ones(7)),
        "INVALID:SIZE",
    ),
    "reduce_scatter_tensor": Method(
        lambda g, a, o: g.reduce_scatter_tensor(output=a.tensor, input=torch.cat(a.inputs), op=_MAX, **o),
        [[10], [11]],
        lambda g: g.reduce_scatter_tensor(_BOTH, torch.ones(7)),
        "INVALID:SIZE",
    ),
    "all_to_all": Method(
        lambda g, a, o: g.all_to_all(a.outputs, input_tensor_list=a.inputs, **o),
        [[0, 10], [1, 11]],
        lambda g: g.all_to_all(output_tensor_list=[], input_tensor_list=[]),
        "INVALID:LIST",
    ),
    "all_to_all_single": Method(
        lambda g, a, o: g.all_to_all_single(a.whole, torch.cat(a.inputs), [a.count] * 2, [a.count] * 2, **o),
        [[0, 10], [1, 11]],
        lambda g: g.all_to_all_single(_BOTH, _BOTH, output_split_sizes=["x"]),  # type: ignore[list-item]
        "INVALID:LIST",
    ),
    "barrier": Method(
        lambda g, a, o: g.barrier(**o),
        [[], []],
        lambda g: g.barrier(timeout=timedelta(0)),
        "INVALID:TIMEOUT",
    ),
    "send": Method(
        lambda g, a, o: g.recv(a.tensor, 0, **o) if a.rank else g.send(a.tensor, dst=1, **o),
        [[0], [0]],
        lambda g: g.send(_SPARSE, dst=0),
        "INVALID:LAYOUT",
    ),
    "recv": Method(
        lambda g, a, o: g.send(a.tensor, 0, **o) if a.rank else g.recv(a.tensor, src=1, **o),
        [[1], [1]],
        lambda g: g.recv(_BOTH, src=-1),
        "INVALID:PEER",
    ),
    "isend": Method(
        lambda g, a, o: g.irecv(a.tensor, tag=3, **o) if a.rank else g.isend(a.tensor, 1, tag=3, **o),
        [[0], [0]],
        lambda g: g.isend(_BOTH, 0, tag=-1),
        "INVALID:TAG",
    ),
    "irecv": Method(
        lambda g, a, o: g.isend(a.tensor, 0, 5, **o) if a.rank else g.irecv(a.tensor, tag=5, **o),
        [[1], [1]],
        lambda g: g.irecv(_SPARSE, 0),
        "INVALID:LAYOUT",
    ),
}
