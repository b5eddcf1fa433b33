"""The forms that are methods of a group, under torch's public names.

Each takes the group, the rank, the case and the form's arguments, and returns the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from contract_forms import FORMS, AllToAllSplit, Case

import phalanx

__all__ = ["METHODS"]

Group = phalanx.ProcessGroup


def _reducing(name: str) -> Callable[[Group, int, Case, list[Any]], Any]:
    def call(group: Group, rank: int, case: Case, args: list[Any]) -> Any:
        return getattr(group, name)(*args, case.op(rank), async_op=case.async_op)

    return call


def _moving(name: str, other_name: str | None = None) -> Callable[[Group, int, Case, list[Any]], Any]:
    def call(group: Group, rank: int, case: Case, args: list[Any]) -> Any:
        return getattr(group, (case.seed % 2 and other_name) or name)(*args, async_op=case.async_op)

    return call


def _rooted(name: str, keyword: str) -> Callable[[Group, int, Case, list[Any]], Any]:
    def call(group: Group, rank: int, case: Case, args: list[Any]) -> Any:
        root = {keyword if case.seed % 2 else "root": case.root}
        op = {"op": case.op(rank)} if case.reduce_op >= 0 else {}
        return getattr(group, name)(*args, **root, **op, async_op=case.async_op)

    return call


def _split(group: Group, rank: int, case: Case, args: list[Any]) -> Any:
    form = FORMS["all_to_all split"]
    assert isinstance(form, AllToAllSplit)
    output, tensor = args
    splits = form.splits(case, rank, group.size())
    return group.all_to_all_single(output, tensor, *splits, async_op=case.async_op)


METHODS: dict[str, Callable[[Group, int, Case, list[Any]], Any]] = {
    "all_reduce": _reducing("all_reduce"),
    "all_reduce coalesced": _reducing("all_reduce_coalesced"),
    "reduce": _rooted("reduce", "dst"),
    "broadcast": _rooted("broadcast", "src"),
    "all_gather": _moving("all_gather"),
    "all_gather uneven": _moving("all_gather"),
    "all_gather single": _moving("all_gather_single", "all_gather_into_tensor"),
    "all_gather stacked": _moving("all_gather_single", "all_gather_into_tensor"),
    "all_gather coalesced": _moving("all_gather_coalesced"),
    "gather": _rooted("gather", "dst"),
    "scatter": _rooted("scatter", "src"),
    "reduce_scatter": _reducing("reduce_scatter"),
    "reduce_scatter uneven": _reducing("reduce_scatter"),
    "reduce_scatter single": _reducing("reduce_scatter_tensor"),
    "all_to_all": _moving("all_to_all"),
    "all_to_all single": _moving("all_to_all_single"),
    "all_to_all split": _split,
}
