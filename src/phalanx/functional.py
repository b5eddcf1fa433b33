"""Collectives as differentiable functions: they return new tensors, never write their inputs, and wait.

    import phalanx.functional as F

    total = F.all_reduce(tensor, group)

Without `group` they use the current process group (`with phalanx.process_group(group):`), else torch's default group.
Roots are ranks within the group. `timeout` also holds for each collective of the backward pass.

Gradients are those of `torch.distributed.nn.functional`: in a backward pass every rank passes its own gradient of its
own results, and each input gets the sum of what all ranks' results owe to it. A backward pass communicates, so all
ranks must make it. Of the reduce ops, SUM, AVG and PREMUL_SUM have a gradient; the others raise InvalidCall in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.collectives.checks import check_tensors, fail
from phalanx.collectives.numbers import whole, whole_list
from phalanx.group import gradients
from phalanx.group.gradients import Target, apply
from phalanx.group.process_group import ProcessGroup
from phalanx.group.refusing import collective
from phalanx.group.scope import group_of_call
from phalanx.group.torch_compat.dispatcher import are_transforms_active
from phalanx.group.torch_compat.tracing import not_traced

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]


@not_traced
def all_reduce(
    tensor: Tensor, group: ProcessGroup | None = None, *, op: Any = ReduceOp.SUM, timeout: timedelta | None = None
) -> Tensor:
    """The reduction of all ranks' tensors, on every rank.

    Gradient: the sum of all ranks' gradients.
    """
    target = _target(group, "all_reduce", timeout)
    result: Tensor = apply(gradients.AllReduce, target, _op(target.group, "all_reduce", op), tensor)
    return result


@not_traced
def reduce(
    tensor: Tensor,
    root: int,
    group: ProcessGroup | None = None,
    *,
    op: Any = ReduceOp.SUM,
    timeout: timedelta | None = None,
) -> Tensor:
    """The reduction of all ranks' tensors on the root; on other ranks a copy of their own tensor.

    Gradient: that of the root's result, on every rank. Gradients of the other ranks' copies do not count.
    """
    target = _target(group, "reduce", timeout)
    root, op = _root(target.group, "reduce", root), _op(target.group, "reduce", op)
    result: Tensor = apply(gradients.Reduce, target, root, op, False, tensor)
    return result


@not_traced
def broadcast(
    tensor: Tensor, root: int, group: ProcessGroup | None = None, *, timeout: timedelta | None = None
) -> Tensor:
    """The root's tensor, on every rank. Other ranks pass a tensor of the same dtype and shape, which is not read.

    Gradient: the sum of all ranks' gradients on the root, zeros on the others.
    """
    target = _target(group, "broadcast", timeout)
    result: Tensor = apply(gradients.Broadcast, target, _root(target.group, "broadcast", root), tensor)
    return result


@not_traced
def gather(
    tensor: Tensor, root: int, group: ProcessGroup | None = None, *, timeout: timedelta | None = None
) -> tuple[Tensor, ...]:
    """All ranks' tensors on the root, by rank; on other ranks as many zero tensors of that shape.

    Gradient: the root's gradient of this rank's tensor. Gradients of the other ranks' zeros do not count.
    """
    target = _target(group, "gather", timeout)
    result: tuple[Tensor, ...] = apply(gradients.Gather, target, _root(target.group, "gather", root), tensor)
    return result


@not_traced
def scatter(
    tensors: Sequence[Tensor], root: int, group: ProcessGroup | None = None, *, timeout: timedelta | None = None
) -> Tensor:
    """This rank's entry of the root's list.

    Other ranks pass a list, too: its first tensor gives the dtype and shape of their result, and none of it is read.

    Gradient: on the root, each rank's gradient for the tensor that it got; zeros on the others.
    """
    target = _target(group, "scatter", timeout)
    _check_list(target.group, "scatter", tensors)
    result: Tensor = apply(gradients.Scatter, target, _root(target.group, "scatter", root), *tensors)
    return result


@not_traced
def all_gather(
    tensor: Tensor, group: ProcessGroup | None = None, *, timeout: timedelta | None = None
) -> tuple[Tensor, ...]:
    """All ranks' tensors, by rank, on every rank. All have the same shape.

    Gradient: the sum of all ranks' gradients of this rank's tensor.
    """
    target = _target(group, "all_gather", timeout)
    result: tuple[Tensor, ...] = apply(gradients.AllGather, target, None, tensor)
    return result


@not_traced
def all_gather_single(tensor: Tensor, group: ProcessGroup | None = None, *, timeout: timedelta | None = None) -> Tensor:
    """All ranks' tensors, concatenated along dimension 0, on every rank. Numbers (0-dim tensors) become a vector.

    Gradient: the sum of all ranks' gradients of this rank's block.
    """
    target = _target(group, "all_gather", timeout)
    result: Tensor = apply(gradients.AllGatherSingle, target, tensor)
    return result


@not_traced
def reduce_scatter(
    tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    op: Any = ReduceOp.SUM,
    timeout: timedelta | None = None,
) -> Tensor:
    """The reduction of all ranks' `tensors[rank]`. The tensors of a list may differ in shape; all ranks' lists agree.

    Gradient: rank p's gradient for `tensors[p]`.
    """
    target = _target(group, "reduce_scatter", timeout)
    _check_list(target.group, "reduce_scatter", tensors, target.group.size())
    result: Tensor = apply(gradients.ReduceScatter, target, _op(target.group, "reduce_scatter", op), *tensors)
    return result


@not_traced
def reduce_scatter_single(
    tensor: Tensor, group: ProcessGroup | None = None, *, op: Any = ReduceOp.SUM, timeout: timedelta | None = None
) -> Tensor:
    """The reduction of all ranks' blocks for this rank. Dimension 0 is cut into one block per rank, all of one size.

    Gradient: rank p's gradient for block p.
    """
    target = _target(group, "reduce_scatter", timeout)
    result: Tensor = apply(gradients.ReduceScatterSingle, target, _op(target.group, "reduce_scatter", op), tensor)
    return result


@not_traced
def all_to_all(
    tensors: Sequence[Tensor], group: ProcessGroup | None = None, *, timeout: timedelta | None = None
) -> tuple[Tensor, ...]:
    """The tensors that all ranks have for this rank, by rank. `tensors[p]` goes to rank p.

    What comes from rank p has the shape of `tensors[p]`. Where the two differ, use `all_to_all_single` with splits.

    Gradient: rank p's gradient for `tensors[p]`.
    """
    target = _target(group, "all_to_all", timeout)
    _check_list(target.group, "all_to_all", tensors, target.group.size())
    result: tuple[Tensor, ...] = apply(gradients.AllToAll, target, *tensors)
    return result


@not_traced
def all_to_all_single(
    tensor: Tensor,
    group: ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    timeout: timedelta | None = None,
) -> Tensor:
    """The blocks that all ranks have for this rank, concatenated along dimension 0. Block p of `tensor` goes to rank p.

    Splits are numbers of rows, one per rank: what this rank sends (`input_split_sizes`) and what it gets
    (`output_split_sizes`). Without them dimension 0 is cut into equal blocks.

    Gradient: rank p's gradient for block p.
    """
    target = _target(group, "all_to_all", timeout)
    received = _splits(target.group, "output_split_sizes", output_split_sizes)
    sent = _splits(target.group, "input_split_sizes", input_split_sizes)
    num_rows = max(sum(received), 0) if received else None
    result: Tensor = apply(gradients.AllToAllSingle, target, num_rows, received, sent, tensor)
    return result


def _target(group: ProcessGroup | None, op: str, timeout: timedelta | None) -> Target:
    target = Target(group_of_call(group, op), timeout)
    if are_transforms_active():
        _refuse_transform(target.group, op)
    return target


@collective
def _refuse_transform(group: ProcessGroup, op: str) -> None:
    fail(
        group._info,
        op,
        "TENSOR",
        "expected a call outside of torch.func's transforms, got one within a transform (grad, vmap, jvp, ...)",
        f"call {op} outside of torch.func; torch.autograd gives its gradients, also those of gradients",
    )


@collective
def _check_list(group: ProcessGroup, op: str, tensors: Any, num: int | None = None) -> None:
    """Refuses what can't be passed on as several tensors. All else is left to the group's own checks."""
    if not isinstance(tensors, (list, tuple)) or not tensors or len(tensors) != (num or len(tensors)):
        check_tensors(group._info, op, "tensors", tensors, num)


@collective
def _root(group: ProcessGroup, op: str, root: Any) -> int:
    """The methods take None for rank 0; here the root must be given."""
    return whole(group._info, op, "ROOT", "the root", root)


@collective
def _op(group: ProcessGroup, name: str, op: Any) -> Any:
    """The methods also take options; the backward pass needs the reduce op."""
    if hasattr(op, "reduceOp"):
        fail(
            group._info,
            name,
            "REDUCE_OP",
            f"expected a reduce op, got an object of class {type(op).__name__}",
            "pass one of torch.distributed.ReduceOp, for example ReduceOp.SUM, and the timeout by keyword",
        )
    return op


@collective
def _splits(group: ProcessGroup, what: str, values: Any) -> list[int]:
    return whole_list(group._info, "all_to_all", what, values)
