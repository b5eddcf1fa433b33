"""What calls mean, computed once per case for all ranks, groups of one size and transports.

The oracle carries a case out for every rank at once. It keeps a digest of every tensor that the ranks then have in a
folder that all processes of a test run share. A process that finds no answer there computes it and leaves it behind.
Nobody waits for an answer: where two processes need the same one at the same moment, both compute it. `turns` keeps
the ranks of a group, which run the same cases at the same time, from doing so.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from contract_data import difference, fingerprint
from contract_forms import FORMS, Case
from torch import Tensor

from phalanx.types import GroupInfo, carry_out

__all__ = ["Oracle", "expected", "flatten", "turns"]

T = TypeVar("T")


class Oracle:
    """`num_computed` counts the cases that this process has carried out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_computed = 0

    def problem(self, case: Case, rank: int, size: int, args: list[Any]) -> str | None:
        """How a rank's arguments differ from what they hold after a call that did what it means."""
        with torch.inference_mode(case.inference):
            got = list(flatten(args))
            if [fingerprint(each, nan_is_nan=case.reduce_op >= 0) for each in got] == self._answer(case, size)[rank]:
                return None
            due = list(flatten(expected(case, size)[rank]))
            for i, (one, other) in enumerate(zip(got, due, strict=True)):
                problem = difference(one, other, nan_is_nan=case.reduce_op >= 0)
                if problem is not None:
                    return f"tensor {i} of the arguments: {problem}"
        return "the arguments' fingerprints differ from the oracle's, but not their values"

    def _answer(self, case: Case, size: int) -> list[list[bytes]]:
        """The fingerprints of each rank's tensors."""
        path = f"{self._folder}/{case.meaning_key(size)}"
        try:
            return _read(path)
        except FileNotFoundError:
            pass
        self.num_computed += 1
        nan_is_nan = case.reduce_op >= 0
        answer = [[fingerprint(each, nan_is_nan=nan_is_nan) for each in flatten(args)] for args in expected(case, size)]
        part = f"{path}.{os.getpid()}"
        Path(part).write_bytes(pickle.dumps(answer))
        os.rename(part, path)
        return answer


# A case is asked for twice, as it is called sync and async.
@functools.lru_cache(maxsize=100)
def _read(path: str) -> list[list[bytes]]:
    with open(path, "rb") as file:
        answer: list[list[bytes]] = pickle.load(file)
    return answer


def expected(case: Case, size: int) -> list[list[Any]]:
    """The arguments of every rank after a call that did what it means."""
    form = FORMS[case.form]
    with torch.inference_mode(case.inference):
        everyones = [form.make(case, rank, size) for rank in range(size)]
        carry_out([form.build(case, GroupInfo("oracle", rank, size), args) for rank, args in enumerate(everyones)])
    return everyones


def turns(items: Sequence[T], rank: int, size: int) -> list[T]:
    """The same items, so that each rank of a group begins with other ones."""
    first = len(items) * rank // size
    return [*items[first:], *items[:first]]


def flatten(args: Any) -> Iterator[Tensor]:
    if isinstance(args, list):
        for arg in args:
            yield from flatten(arg)
    elif args is not None:
        yield args
