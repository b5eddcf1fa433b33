"""Calls as torch's dispatcher shows them to modes and to classes of tensors.

torch's own backends lie below the dispatcher: a mode (CommDebugMode, FakeTensorMode) or a class of tensors (TwoTensor)
sees `torch.ops.c10d.allreduce_` before the backend does. A group in Python is called above it. Plain calls of plain
tensors stay there, which is quicker; the others take the way through the dispatcher and come back.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor

from phalanx.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from phalanx.collectives.checks import PLAIN_CLASSES, fail
from phalanx.errors import InvalidCall, PhalanxError
from phalanx.group.torch_compat.dispatcher import boxed_reduce_op, dispatch, num_dispatch_modes
from phalanx.group.work import Work, Works
from phalanx.types import Call, GroupInfo

__all__ = ["Form", "present", "present_message", "tensors_of"]


class Form:
    """One of torch's methods for collectives: `build` makes a Call of `args`.

    `pack` takes the group, boxed, and the args. It returns the arguments of the op of `torch.ops.c10d`, up to the one
    that says whether the call is asynchronous. Tensors have the same order there as in the args.
    """

    __slots__ = ("build", "op", "pack")

    def __init__(self, op: str, build: Callable[..., Call], pack: Callable[..., tuple[Any, ...]]) -> None:
        self.op = op
        self.build = build
        self.pack = pack


_boxed = boxed_reduce_op

ALL_REDUCE = Form(
    "allreduce_", all_reduce.build, lambda group, tensor, op, factor: ([tensor], group, _boxed(op, factor), None)
)
ALL_REDUCE_COALESCED = Form(
    "allreduce_coalesced_",
    all_reduce.build_coalesced,
    lambda group, tensors, op, factor: (tensors, group, _boxed(op, factor)),
)
REDUCE = Form(
    "reduce_",
    reduce.build,
    lambda group, tensor, root, op, factor: ([tensor], group, _boxed(op, factor), root, 0),
)
BROADCAST = Form("broadcast_", broadcast.build, lambda group, tensor, root: ([tensor], group, root, 0))
ALL_GATHER = Form("allgather_", all_gather.build, lambda group, outputs, tensor: ([outputs], [tensor], group))
ALL_GATHER_SINGLE = Form(
    "_allgather_base_", all_gather.build_single, lambda group, output, tensor: (output, tensor, group)
)
ALL_GATHER_COALESCED = Form(
    "allgather_coalesced_", all_gather.build_coalesced, lambda group, outputs, inputs: (outputs, inputs, group)
)
ALL_GATHER_SINGLE_COALESCED = Form(
    "allgather_into_tensor_coalesced_",
    all_gather.build_single_coalesced,
    lambda group, outputs, inputs: (outputs, inputs, group),
)
GATHER = Form(
    "gather_",
    gather.build,
    lambda group, outputs, tensor, root: ([outputs] if outputs else [], [tensor], group, root),
)
SCATTER = Form(
    "scatter_",
    scatter.build,
    lambda group, output, inputs, root: ([output], [inputs] if inputs else [], group, root),
)
REDUCE_SCATTER = Form(
    "reduce_scatter_",
    reduce_scatter.build,
    lambda group, output, inputs, op, factor: ([output], [inputs], group, _boxed(op, factor)),
)
REDUCE_SCATTER_SINGLE = Form(
    "_reduce_scatter_base_",
    reduce_scatter.build_single,
    lambda group, output, tensor, op, factor: (output, tensor, group, _boxed(op, factor)),
)
REDUCE_SCATTER_SINGLE_COALESCED = Form(
    "reduce_scatter_tensor_coalesced_",
    reduce_scatter.build_single_coalesced,
    lambda group, outputs, inputs, op, factor: (outputs, inputs, group, _boxed(op, factor)),
)
ALL_TO_ALL = Form("alltoall_", all_to_all.build, lambda group, outputs, inputs: (outputs, inputs, group))
ALL_TO_ALL_SINGLE = Form(
    "alltoall_base_",
    all_to_all.build_single,
    lambda group, output, tensor, *splits: (output, tensor, group, *(list(map(index, one)) for one in splits)),
)
# torch's own groups make such a tensor, too: the op's kernel is found by its device.
BARRIER = Form("barrier", barrier.build, lambda group: (torch.empty(1, dtype=torch.uint8), group, []))


def present(
    group: Any,
    form: Form,
    args: tuple[Any, ...],
    results: list[Tensor],
    runs_async: bool,
    run: Callable[[tuple[Any, ...], list[Tensor]], Work],
) -> Any:
    """Shows a collective to modes and classes. `run` carries it out with other `args` and `results`."""
    packed = form.pack(group.boxed(), *args)
    # Builders are in files named after their ops.
    name = form.build.__module__.rpartition(".")[2]
    return _dispatch(group, name, form.op, (*packed, runs_async), args, results, run)


def present_message(
    group: Any, op: str, tensor: Tensor, peer: int | None, tag: int, run: Callable[[Tensor], Work]
) -> Any:
    """The same for "send" and "recv"; without a peer, from any source."""
    name = "send" if op == "send" else "recv_any_source_" if peer is None else "recv_"
    packed = ([tensor], group.boxed(), *(() if peer is None else (peer,)), tag)
    return _dispatch(group, op, name, packed, (tensor,), [], lambda args, _: run(args[0]))


def _dispatch(
    group: Any,
    name: str,
    op: str,
    packed: tuple[Any, ...],
    args: tuple[Any, ...],
    results: list[Tensor],
    run: Callable[[tuple[Any, ...], list[Tensor]], Work],
) -> Any:
    given = tensors_of(args)
    works: list[Work] = []

    def carry_out(tensors: list[Tensor]) -> Work:
        instead = {id(tensor): _target(tensor, other) for tensor, other in zip(given, tensors, strict=False)}
        work = run(_replace(args, instead), [instead.get(id(tensor), tensor) for tensor in results])
        works.append(work)
        return work

    has_modes = num_dispatch_modes() > 0
    try:
        work = dispatch(group, op, packed, carry_out)
    except (NotImplementedError, RuntimeError) as error:
        if has_modes or works or isinstance(error, PhalanxError | OSError):
            raise
        _refuse(group._info, name, given, error)
    if len(works) == 1 or all(one.pending is None for one in works):
        return work
    # A class of tensors has made several calls of one, and passes one work on.
    both = Works()
    for one in works:
        both.add(one)
    return both


def _refuse(info: GroupInfo, op: str, tensors: list[Tensor], error: Exception) -> NoReturn:
    """The class of a tensor does not carry out the call."""
    kind = next((type(tensor).__name__ for tensor in tensors if type(tensor) not in PLAIN_CLASSES), "Tensor")
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    try:
        fail(
            info,
            op,
            "TENSOR",
            f"expected tensors whose class carries out {op}, got a {kind}, which raised: {reason}",
            f"pass the plain tensors that the {kind} holds",
        )
    except InvalidCall as refused:
        raise refused from error


def _target(tensor: Tensor, other: Tensor) -> Tensor:
    """What the call uses. torch passes on copies of negative and conjugate views, which nobody copies back."""
    is_lazy = tensor.is_neg() or tensor.is_conj()
    return tensor if is_lazy and type(other) is type(tensor) else other


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of an argument, in order."""
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return [value] if isinstance(value, Tensor) else []


def _replace(value: Any, instead: dict[int, Tensor]) -> Any:
    """The same argument with other tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(part, instead) for part in value)
    return instead.get(id(value), value)
