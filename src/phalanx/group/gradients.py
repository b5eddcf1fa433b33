"""Collectives as functions that autograd knows: each makes new tensors, and its gradient is another collective.

The gradients are those of `torch.distributed.nn.functional`. A collective runs on all ranks, and so does its backward
pass. Every backward is made of the functions here, so it has a gradient, too. The calls wait before they return: unlike
a work that is waited for, they leave nothing to do at the end of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ReduceOp
from torch.nn.parameter import is_lazy

from phalanx.collectives.checks import HasOwnDispatch, check_tensor, fail
from phalanx.collectives.reduction import AVG, PREMUL_SUM, SUM
from phalanx.group.process_group import ProcessGroup
from phalanx.group.refusing import collective
from phalanx.group.torch_compat.options import reduce_op_of
from phalanx.types import REDUCE_OP_NAMES

__all__ = [
    "AllGather",
    "AllGatherSingle",
    "AllReduce",
    "AllToAll",
    "AllToAllSingle",
    "Broadcast",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "ReduceScatterSingle",
    "Scatter",
    "Target",
    "apply",
]

_ROW_MAJOR = torch.contiguous_format


class Target(NamedTuple):
    """Where a call goes, and how long it may take. Its backward pass gets the same."""

    group: ProcessGroup
    timeout: timedelta | None

    def is_root(self, root: int) -> bool:
        return root == self.group.rank()


def apply(function: type[Function], *args: Any) -> Any:
    return function.apply(*args)


class AllReduce(Function):
    """In the backward pass, the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, target: Target, op: Any, tensor: Tensor) -> Tensor:
        ctx.target, ctx.op = target, op
        output = _copy(target, "all_reduce", tensor)
        target.group.all_reduce(output, op, target.timeout, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale = _scaling(ctx.target, "all_reduce", ctx.op)
        if _reduce_op(ctx.op)[0] == AVG:
            # Rounded once, and a sum of small floats may overflow.
            return None, None, apply(AllReduce, ctx.target, ctx.op, grad)
        return None, None, scale(apply(AllReduce, ctx.target, ReduceOp.SUM, grad))


class Reduce(Function):
    """In the backward pass, every rank gets the root's gradient.

    Ranks that are not the root return a copy of their tensor, or zeros.
    """

    @staticmethod
    def forward(ctx: Any, target: Target, root: int, op: Any, zeros_elsewhere: bool, tensor: Tensor) -> Tensor:
        ctx.target, ctx.root, ctx.op = target, root, op
        output = _copy(target, "reduce", tensor)
        target.group.reduce(output, None, op, target.timeout, root=root, async_op=False)
        return output.zero_() if zeros_elsewhere and not target.is_root(root) else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale = _scaling(ctx.target, "reduce", ctx.op)
        return None, None, None, None, scale(apply(Broadcast, ctx.target, ctx.root, grad))


class Broadcast(Function):
    """In the backward pass, the root gets the sum of all ranks' gradients, the others get zeros."""

    @staticmethod
    def forward(ctx: Any, target: Target, root: int, tensor: Tensor) -> Tensor:
        ctx.target, ctx.root = target, root
        make = _copy if target.is_root(root) else _empty_like
        output = make(target, "broadcast", tensor)
        target.group.broadcast(output, None, target.timeout, root=root, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, apply(Reduce, ctx.target, ctx.root, ReduceOp.SUM, True, grad)


class Gather(Function):
    """In the backward pass, the root scatters its gradients. Ranks that are not the root return zeros."""

    @staticmethod
    def forward(ctx: Any, target: Target, root: int, tensor: Tensor) -> tuple[Tensor, ...]:
        # The method takes a list in the first place for the outputs.
        _check_usable(target, "gather", tensor)
        ctx.target, ctx.root = target, root
        size = target.group.size()
        is_root = target.is_root(root)
        outputs = [_empty_like(target, "gather", tensor) for _ in range(size if is_root else 0)]
        target.group.gather(tensor, outputs, None, target.timeout, root=root, async_op=False)
        return tuple(outputs or [torch.zeros_like(tensor, memory_format=_ROW_MAJOR) for _ in range(size)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, apply(Scatter, ctx.target, ctx.root, *grads)


class Scatter(Function):
    """In the backward pass, the root gathers the gradients, the others get zeros."""

    @staticmethod
    def forward(ctx: Any, target: Target, root: int, *tensors: Tensor) -> Tensor:
        ctx.target, ctx.root, ctx.shapes = target, root, _shapes(target, "scatter", tensors)
        output = _empty_like(target, "scatter", tensors[0])
        inputs = list(tensors) if target.is_root(root) else []
        target.group.scatter(output, inputs, None, target.timeout, root=root, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = apply(Gather, ctx.target, ctx.root, grad)
        # Ranks that are not the root may have passed any list.
        grads += (grad.new_zeros(0),) * (len(ctx.shapes) - len(grads))
        return None, None, *(_reshape(grad, shape) for grad, shape in zip(grads, ctx.shapes, strict=False))


class AllGather(Function):
    """In the backward pass, each rank gets the sum of all ranks' gradients of its tensor.

    `shapes` are those of all ranks' tensors; None: they are equal.
    """

    @staticmethod
    def forward(ctx: Any, target: Target, shapes: Sequence[torch.Size] | None, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.target = target
        _check_usable(target, "all_gather", tensor)
        outputs = [tensor.new_empty(shape) for shape in shapes or [tensor.shape] * target.group.size()]
        target.group.all_gather(outputs, tensor, target.timeout, async_op=False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, apply(ReduceScatter, ctx.target, ReduceOp.SUM, *grads)


class ReduceScatter(Function):
    """In the backward pass, every rank gets the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, target: Target, op: Any, *tensors: Tensor) -> Tensor:
        ctx.target, ctx.op, ctx.shapes = target, op, _shapes(target, "reduce_scatter", tensors)
        output = _empty_like(target, "reduce_scatter", tensors[target.group.rank()])
        target.group.reduce_scatter(output, list(tensors), op, target.timeout, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale = _scaling(ctx.target, "reduce_scatter", ctx.op)
        return None, None, *map(scale, apply(AllGather, ctx.target, ctx.shapes, grad))


class AllGatherSingle(Function):
    """In the backward pass, each rank gets the sum of all ranks' gradients of its block."""

    @staticmethod
    def forward(ctx: Any, target: Target, tensor: Tensor) -> Tensor:
        _check_usable(target, "all_gather", tensor)
        ctx.target, ctx.shape = target, tensor.shape
        size = target.group.size()
        output = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]) if tensor.dim() else (size,))
        target.group.all_gather_single(output, tensor, target.timeout, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, apply(ReduceScatterSingle, ctx.target, ReduceOp.SUM, grad).reshape(ctx.shape)


class ReduceScatterSingle(Function):
    """In the backward pass, every rank gets the gradients of all blocks."""

    @staticmethod
    def forward(ctx: Any, target: Target, op: Any, tensor: Tensor) -> Tensor:
        _check_usable(target, "reduce_scatter", tensor)
        ctx.target, ctx.op, ctx.shape = target, op, tensor.shape
        output = tensor.new_empty((_num_rows(target.group, tensor), *tensor.shape[1:]))
        target.group.reduce_scatter_single(output, tensor, op, target.timeout, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scale = _scaling(ctx.target, "reduce_scatter", ctx.op)
        return None, None, scale(apply(AllGatherSingle, ctx.target, grad).reshape(ctx.shape))


class AllToAll(Function):
    """In the backward pass, the gradients go back to where the tensors came from."""

    @staticmethod
    def forward(ctx: Any, target: Target, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.target = target
        outputs = [tensors[0].new_empty(shape) for shape in _shapes(target, "all_to_all", tensors)]
        target.group.all_to_all(outputs, list(tensors), target.timeout, async_op=False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *apply(AllToAll, ctx.target, *grads)


class AllToAllSingle(Function):
    """In the backward pass, the gradients go back to where the blocks came from.

    `num_rows` is the first dimension of the output; None: that of the input.
    """

    @staticmethod
    def forward(
        ctx: Any, target: Target, num_rows: int | None, output_splits: Any, input_splits: Any, tensor: Tensor
    ) -> Tensor:
        _check_usable(target, "all_to_all", tensor)
        ctx.target, ctx.splits, ctx.shape = target, (input_splits, output_splits), tensor.shape
        output = tensor.new_empty(tensor.shape if num_rows is None else (num_rows, *tensor.shape[1:]))
        splits = output_splits, input_splits
        target.group.all_to_all_single(output, tensor, *splits, target.timeout, async_op=False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        num_rows = ctx.shape[0] if ctx.shape else None
        return None, None, None, None, apply(AllToAllSingle, ctx.target, num_rows, *ctx.splits, grad)


def _reduce_op(op: Any) -> tuple[int, float]:
    """Its number and factor."""
    return reduce_op_of(ReduceOp.SUM if op is None else op)


def _scaling(target: Target, name: str, op: Any) -> Callable[[Tensor], Tensor]:
    """What the gradient of a reduction does beside that of a sum; InvalidCall where the reduce op has no gradient."""
    reduce_op, factor = _reduce_op(op)
    if reduce_op not in (SUM, AVG, PREMUL_SUM):
        fail(
            target.group._info,
            name,
            "GRADIENT",
            f"expected a reduce op that has a gradient, got {REDUCE_OP_NAMES[reduce_op]} in a backward pass",
            f"use SUM, AVG or PREMUL_SUM, or pass {name} a tensor that needs no gradient, for example tensor.detach()",
        )
    if reduce_op == AVG:
        return lambda grad: grad / target.group.size()
    return lambda grad: grad * factor if reduce_op == PREMUL_SUM else grad


def _reshape(grad: Tensor, shape: torch.Size) -> Tensor:
    """Zeros where it is of another size."""
    return grad.reshape(shape) if grad.numel() == shape.numel() else grad.new_zeros(shape)


def _copy(target: Target, op: str, tensor: Tensor) -> Tensor:
    if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
        return tensor.clone()
    _check_usable(target, op, tensor)
    return tensor.clone(memory_format=_ROW_MAJOR)


def _empty_like(target: Target, op: str, tensor: Tensor) -> Tensor:
    _check_usable(target, op, tensor)
    return torch.empty_like(tensor, memory_format=_ROW_MAJOR)


def _shapes(target: Target, op: str, tensors: Sequence[Tensor]) -> list[torch.Size]:
    for i, tensor in enumerate(tensors):
        _check_usable(target, op, tensor, f"tensors[{i}]")
    return [tensor.shape for tensor in tensors]


def _check_usable(target: Target, op: str, tensor: Tensor, name: str = "tensor") -> None:
    """Refuses what no output can be made of. All else is left to the group's own checks."""
    is_usable = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_nested
    if not is_usable or is_lazy(tensor):
        _refuse(target.group, op, name, tensor)


@collective
def _refuse(group: ProcessGroup, op: str, name: str, tensor: Tensor) -> None:
    try:
        check_tensor(group._info, op, name, tensor)
    except HasOwnDispatch:
        # Its class may carry out the call.
        return


@collective
def _num_rows(group: ProcessGroup, tensor: Tensor) -> int:
    """Of a block of one rank."""
    rows, size = tensor.shape[0] if tensor.dim() else 1, group.size()
    if rows % size:
        fail(
            group._info,
            "reduce_scatter",
            "SIZE",
            f"expected rows of tensor that {size} ranks can share equally, got {rows}",
            f"pass a tensor whose dimension 0 is a multiple of {size}",
        )
    return rows // size
