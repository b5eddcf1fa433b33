"""Tensors that are no plain memory, or not only: each is communicated as its numbers say, or refused on its rank.

No call is left half made: after each refusal the group goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, values
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

import phalanx


def _functional() -> Tensor:
    with FunctionalTensorMode():
        functional: Tensor = FunctionalTensor.to_functional(torch.ones(4))
        return functional


def _matrix() -> Tensor:
    return torch.ones(2, 4)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "nested, strided": (lambda: torch.nested.nested_tensor([torch.ones(2)] * 2, layout=torch.strided), "LAYOUT"),
    "nested, empty": (lambda: torch.nested.nested_tensor([], layout=torch.strided), "LAYOUT"),
    "nested, jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)] * 2, layout=torch.jagged), "LAYOUT"),
    "CSR": (lambda: _matrix().to_sparse_csr(), "LAYOUT"),
    "CSC": (lambda: _matrix().to_sparse_csc(), "LAYOUT"),
    "BSR": (lambda: _matrix().to_sparse_bsr((1, 2)), "LAYOUT"),
    "BSC": (lambda: _matrix().to_sparse_bsc((1, 2)), "LAYOUT"),
    "MKLDNN": (lambda: torch.ones(4).to_mkldnn(), "LAYOUT"),
    "meta": (lambda: torch.ones(4, device="meta"), "DEVICE"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "TENSOR"),
    "functional, a class": (_functional, "TENSOR"),
}


def _spellings(rank: int) -> dict[str, Callable[[Tensor], Any]]:
    """A tensor in each place of each op. All ranks are refused, or all would go on."""
    group: Any = dist.group.WORLD
    peer = 1 - rank

    def four() -> Tensor:
        return torch.zeros(4)

    return {
        "all_reduce": dist.all_reduce,
        "all_reduce, later": lambda x: dist.all_reduce(x, async_op=True),
        "all_reduce_coalesced": lambda x: group.allreduce_coalesced([four(), x]),
        "reduce": lambda x: dist.reduce(x, 0),
        "broadcast": lambda x: dist.broadcast(x, 0),
        "all_gather, input": lambda x: dist.all_gather([four(), four()], x),
        "all_gather, output": lambda x: dist.all_gather([four(), x], four()),
        "all_gather_single, input": lambda x: group.all_gather_single(torch.zeros(8), x),
        "all_gather_single, output": lambda x: group.all_gather_single(x, torch.zeros(2)),
        "all_gather_coalesced": lambda x: group.allgather_coalesced([[four()], [four()]], [x]),
        "all_gather_single_coalesced": lambda x: group.all_gather_single_coalesced([torch.zeros(8)], [x]),
        "gather": lambda x: dist.gather(x, [four(), four()] if rank == 0 else None, 0),
        "scatter": lambda x: dist.scatter(x, [four(), four()] if rank == 0 else None, 0),
        "reduce_scatter, input": lambda x: dist.reduce_scatter(four(), [four(), x]),
        "reduce_scatter, output": lambda x: dist.reduce_scatter(x, [four(), four()]),
        "reduce_scatter_single": lambda x: group.reduce_scatter_single(torch.zeros(2), x),
        "reduce_scatter_single_coalesced": lambda x: group.reduce_scatter_single_coalesced([torch.zeros(2)], [x]),
        "all_to_all, input": lambda x: dist.all_to_all([four(), four()], [four(), x]),
        "all_to_all, output": lambda x: dist.all_to_all([four(), x], [four(), four()]),
        "all_to_all_single": lambda x: group.all_to_all_single(four(), x),
        "send": lambda x: dist.send(x, peer),
        "isend": lambda x: dist.isend(x, peer),
        "recv": lambda x: dist.recv(x, peer),
        "irecv": lambda x: dist.irecv(x, peer),
    }


def _refuse_all(here: Here, kind: str) -> list[str]:
    """What was not refused as it should be."""
    here.init()
    warnings.simplefilter("ignore")
    make, code = REFUSED[kind]
    wrong = []
    for spelling, call in _spellings(here.rank).items():
        try:
            call(make())
        except phalanx.InvalidCall as error:
            if error.code != f"INVALID:{code}" or not error.hint or not error.op:
                wrong.append(f"{spelling}: {error}")
        except Exception as error:
            wrong.append(f"{spelling}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{spelling}: not refused")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    return wrong


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_plain_memory_are_refused(kind: str, tmp_path: Path) -> None:
    wrong = [text for found in values(_refuse_all, 2, tmp_path, kind) for text in found]
    assert not wrong, "\n".join(wrong)


def _taken(here: Here) -> list[list[Any]]:
    """What the same tensors give that hold no more than plain memory, as lists, of rank 0's point of view."""
    here.init()
    group: Any = dist.group.WORLD
    numbers = torch.arange(4.0) + here.rank
    results: list[Tensor] = []
    turned = torch.complex(numbers, numbers + 1).conj()
    group.allreduce(turned).wait()
    results.append(turned)
    negated = torch._neg_view(numbers.clone())
    dist.all_reduce(negated)
    results.append(negated)
    leaf = numbers.clone().requires_grad_()
    dist.all_reduce(leaf)
    results.append(leaf)
    product = numbers.clone().requires_grad_() * 2
    dist.all_reduce(product)
    results.append(product)
    expanded = torch.tensor([here.rank + 1.0]).expand(4)
    gathered = torch.zeros(8)
    dist.all_gather_into_tensor(gathered, expanded)
    results.append(gathered)
    quantized = torch.quantize_per_tensor(torch.stack([numbers, numbers]), 0.5, 3, torch.quint8)[:, ::2]
    dist.broadcast(quantized, 1)
    results.append(quantized.int_repr())
    if here.rank == 1:
        # The root of a broadcast reads its tensor only.
        dist.broadcast(expanded, 1)
    else:
        received = torch.zeros(4)
        dist.broadcast(received, 1)
        results.append(received)
    with pytest.raises(phalanx.InvalidCall) as caught:
        dist.all_reduce(expanded)
    assert caught.value.code == "INVALID:OVERLAP"
    return [tensor.detach().flatten().tolist() for tensor in results]


def test_tensors_that_are_views_of_plain_memory_are_taken(tmp_path: Path) -> None:
    expected = [
        [1 - 3j, 3 - 5j, 5 - 7j, 7 - 9j],
        [-1.0, -3.0, -5.0, -7.0],
        [1.0, 3.0, 5.0, 7.0],
        [2.0, 6.0, 10.0, 14.0],
        [1.0] * 4 + [2.0] * 4,
        [5, 9, 5, 9],
    ]
    first, second = values(_taken, 2, tmp_path)
    assert first == [*expected, [2.0] * 4]
    assert second == expected
