"""The functions of `phalanx.functional`, each beside what torch.distributed.nn.functional has for the same.

Values are small integers, so that results are exact in every dtype and in any order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.nn.functional as torch_functional
from torch import Tensor

import phalanx
import phalanx.functional as pf

Function = Callable[[list[Tensor], Any], Any]

MATRIX, TRANSPOSED, NUMBER, EMPTY = "matrix", "transposed", "number", "empty"
KINDS = (MATRIX, TRANSPOSED, NUMBER, EMPTY)
ROOT = 1


@dataclass
class Case:
    """`ours` and `torchs` take the inputs of this rank, one or `size` of them, and a group."""

    ours: Function
    torchs: Function
    takes_list: bool = False
    kinds: tuple[str, ...] = KINDS
    # Ranks whose results mean something; None: all.
    results_on: int | None = None


def _uneven_splits(rank: int, size: int) -> tuple[list[int], list[int]]:
    """Of 2 * size rows: every rank sends a row to each rank but rank 0, which gets the rest."""
    sent = [size + 1, *[1] * (size - 1)]
    return [sent[rank]] * size, sent


def _our_uneven(tensors: list[Tensor], group: Any) -> Tensor:
    received, sent = _uneven_splits(group.rank(), group.size())
    return pf.all_to_all_single(tensors[0], group, received, sent)


def _their_uneven(tensors: list[Tensor], group: Any) -> Tensor:
    received, sent = _uneven_splits(group.rank(), group.size())
    output = tensors[0].new_empty(sum(received), *tensors[0].shape[1:])
    # torch's does not copy inputs that are not contiguous, and not all backends do.
    result: Tensor = torch_functional.all_to_all_single(output, tensors[0].contiguous(), received, sent, group)
    return result


def _concatenated(tensors: list[Tensor], group: Any) -> Tensor:
    # torch's form of one tensor has a gradient with NCCL only.
    parts = torch_functional.all_gather(tensors[0], group)
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)


CASES: dict[str, Case] = {
    "all_reduce": Case(
        lambda x, group: pf.all_reduce(x[0], group),
        lambda x, group: torch_functional.all_reduce(x[0], group=group),
    ),
    "reduce": Case(
        lambda x, group: pf.reduce(x[0], ROOT, group),
        lambda x, group: torch_functional.reduce(x[0], ROOT, group=group),
        results_on=ROOT,
    ),
    "broadcast": Case(
        lambda x, group: pf.broadcast(x[0], ROOT, group),
        lambda x, group: torch_functional.broadcast(x[0], ROOT, group),
    ),
    "gather": Case(
        lambda x, group: pf.gather(x[0], ROOT, group),
        lambda x, group: torch_functional.gather(x[0], ROOT, group),
    ),
    "scatter": Case(
        lambda x, group: pf.scatter(x, ROOT, group),
        # torch's does not copy inputs that are not contiguous, and not all backends do.
        lambda x, group: torch_functional.scatter([one.contiguous() for one in x], ROOT, group),
        takes_list=True,
    ),
    "all_gather": Case(
        lambda x, group: pf.all_gather(x[0], group),
        lambda x, group: torch_functional.all_gather(x[0], group),
    ),
    "all_gather_single": Case(lambda x, group: pf.all_gather_single(x[0], group), _concatenated),
    "reduce_scatter": Case(
        lambda x, group: pf.reduce_scatter(x, group),
        lambda x, group: torch_functional.reduce_scatter(torch.empty_like(x[0]), x, group=group),
        takes_list=True,
    ),
    "reduce_scatter_single": Case(
        lambda x, group: pf.reduce_scatter_single(x[0], group),
        lambda x, group: torch_functional.reduce_scatter(
            x[0].new_empty(x[0].shape[0] // group.size(), *x[0].shape[1:]),
            list(x[0].chunk(group.size())),
            group=group,
        ),
        kinds=(MATRIX, TRANSPOSED),
    ),
    "all_to_all": Case(
        lambda x, group: pf.all_to_all(x, group),
        lambda x, group: torch_functional.all_to_all(
            [torch.empty_like(one, memory_format=torch.contiguous_format) for one in x], x, group
        ),
        takes_list=True,
    ),
    "all_to_all_single": Case(
        lambda x, group: pf.all_to_all_single(x[0], group),
        lambda x, group: torch_functional.all_to_all_single(
            torch.empty_like(x[0], memory_format=torch.contiguous_format), x[0].contiguous(), group=group
        ),
        kinds=(MATRIX, TRANSPOSED, EMPTY),
    ),
    "all_to_all_single, splits": Case(_our_uneven, _their_uneven, kinds=(MATRIX, TRANSPOSED)),
}


def _numbers(kind: str, size: int, first: int, dtype: torch.dtype) -> Tensor:
    """`kind` of tensor with numbers from 0 to 6, others for each `first`. It is no leaf of a graph."""
    shape: tuple[int, ...] = {MATRIX: (2 * size, 3), TRANSPOSED: (3, 2 * size), NUMBER: (), EMPTY: (0, 3)}[kind]
    numel = torch.Size(shape).numel()
    tensor = (torch.arange(first, first + numel) % 7).reshape(shape)
    if dtype.is_complex:
        tensor = torch.complex(tensor.float(), (tensor * 3 % 5).float())
    tensor = tensor.to(dtype)
    return tensor.t() if kind == TRANSPOSED else tensor


def _inputs(case: Case, kind: str, rank: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    num = size if case.takes_list else 1
    return [_numbers(kind, size, 5 * rank + 3 * i, dtype).requires_grad_() for i in range(num)]


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _gradients(function: Function, inputs: list[Tensor], group: Any) -> list[list[Tensor]]:
    """Results, gradients with other gradients of the results on every rank, and gradients of those."""
    rank, results = group.rank(), _listed(function(inputs, group))
    given = [torch.full_like(one, rank + i + 1, memory_format=torch.contiguous_format) for i, one in enumerate(results)]
    for one in given:
        one.requires_grad_()
    first = torch.autograd.grad(results, inputs, given, create_graph=True)
    again = [torch.full_like(one, 2 * rank + i + 1) for i, one in enumerate(first)]
    second = torch.autograd.grad(first, given, again)
    return [results, list(first), list(second)]


def compare(name: str, kind: str, dtype: torch.dtype, ours: Any, torchs: Any) -> None:
    """On a rank: results, gradients and gradients of gradients are torch's, and nothing of ours was written."""
    case, rank, size = CASES[name], ours.rank(), ours.size()
    inputs = _inputs(case, kind, rank, size, dtype)
    before = [one.detach().clone() for one in inputs]
    results, *grads = _gradients(case.ours, inputs, ours)
    _same(inputs, before)
    memory = {one.data_ptr() for one in inputs if one.numel()}
    for one in results:
        assert one.is_contiguous()
        assert one.data_ptr() not in memory
    inputs = _inputs(case, kind, rank, size, dtype)
    expected, *expected_grads = _gradients(case.torchs, inputs, torchs)
    if case.results_on in (None, rank):
        _same(results, expected)
    for some, others in zip(grads, expected_grads, strict=True):
        _same(some, others)


def compare_all(dtypes: list[torch.dtype], ours: Any, torchs: Any) -> list[str]:
    """Every kind of tensor in float32, and matrices in other dtypes. Returns which functions were compared."""
    for name, case in CASES.items():
        for kind in case.kinds:
            compare(name, kind, torch.float32, ours, torchs)
        for dtype in dtypes:
            compare(name, TRANSPOSED, dtype, ours, torchs)
    return list(CASES)


def plain_group(rank: int, world: Any) -> phalanx.ProcessGroup:
    return phalanx.ProcessGroup(world.store, rank, world.size, name="plain")
