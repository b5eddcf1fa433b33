"""The collectives that are timed: each makes its tensors for one rank and says how to call the op on a group.

Tensors are float32. `numel` counts the elements of the op's larger side; ops that divide them among the ranks use at
least one element a rank. Roots are rank 0. A call takes further options of the op, such as `async_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Case:
    """One op at one size on one rank. `buffers` is all that the call reads or writes, `result` what it must write."""

    buffers: list[torch.Tensor]
    result: list[torch.Tensor]
    call: Callable[..., Any]


def all_reduce(numel: int, rank: int, ranks: int) -> Case:
    tensor = torch.empty(numel)
    return Case([tensor], [tensor], lambda group, **more: dist.all_reduce(tensor, group=group, **more))


def broadcast(numel: int, rank: int, ranks: int) -> Case:
    tensor = torch.empty(numel)
    return Case([tensor], [tensor], lambda group, **more: dist.broadcast(tensor, src=0, group=group, **more))


def reduce(numel: int, rank: int, ranks: int) -> Case:
    tensor = torch.empty(numel)
    return Case(
        [tensor], _at_root([tensor], rank), lambda group, **more: dist.reduce(tensor, dst=0, group=group, **more)
    )


def all_gather(numel: int, rank: int, ranks: int) -> Case:
    part, parts = _part_and_parts(numel, ranks)
    return Case([part, *parts], parts, lambda group, **more: dist.all_gather(parts, part, group=group, **more))


def all_gather_single(numel: int, rank: int, ranks: int) -> Case:
    part, whole = torch.empty(_share(numel, ranks)), torch.empty(_share(numel, ranks) * ranks)
    return Case([part, whole], [whole], lambda group, **more: dist.all_gather_single(whole, part, group=group, **more))


def gather(numel: int, rank: int, ranks: int) -> Case:
    part, parts = _part_and_parts(numel, ranks)
    parts = _at_root(parts, rank)
    return Case(
        [part, *parts], parts, lambda group, **more: dist.gather(part, parts or None, dst=0, group=group, **more)
    )


def scatter(numel: int, rank: int, ranks: int) -> Case:
    part, parts = _part_and_parts(numel, ranks)
    parts = _at_root(parts, rank)
    return Case(
        [part, *parts], [part], lambda group, **more: dist.scatter(part, parts or None, src=0, group=group, **more)
    )


def reduce_scatter(numel: int, rank: int, ranks: int) -> Case:
    part, parts = _part_and_parts(numel, ranks)
    return Case([part, *parts], [part], lambda group, **more: dist.reduce_scatter(part, parts, group=group, **more))


def reduce_scatter_single(numel: int, rank: int, ranks: int) -> Case:
    part, whole = torch.empty(_share(numel, ranks)), torch.empty(_share(numel, ranks) * ranks)
    return Case(
        [part, whole], [part], lambda group, **more: dist.reduce_scatter_single(part, whole, group=group, **more)
    )


def all_to_all(numel: int, rank: int, ranks: int) -> Case:
    (_, sources), (_, targets) = _part_and_parts(numel, ranks), _part_and_parts(numel, ranks)
    return Case(
        [*sources, *targets], targets, lambda group, **more: dist.all_to_all(targets, sources, group=group, **more)
    )


def all_to_all_single(numel: int, rank: int, ranks: int) -> Case:
    source, target = (torch.empty(_share(numel, ranks) * ranks) for _ in range(2))
    return Case(
        [source, target], [target], lambda group, **more: dist.all_to_all_single(target, source, group=group, **more)
    )


def barrier(numel: int, rank: int, ranks: int) -> Case:
    return Case([], [], lambda group, **more: dist.barrier(group=group, **more))


OPS: dict[str, Callable[[int, int, int], Case]] = {
    make.__name__: make
    for make in (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        all_gather_single,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_single,
        all_to_all,
        all_to_all_single,
        barrier,
    )
}


def _share(numel: int, ranks: int) -> int:
    return max(1, numel // ranks)


def _part_and_parts(numel: int, ranks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.empty(_share(numel, ranks)), [torch.empty(_share(numel, ranks)) for _ in range(ranks)]


def _at_root(tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    return tensors if rank == 0 else []
