"""What is wrong with the arguments of a call, in words. The native front finds it (`_core/front_forms.hpp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from phalanx import _native
from phalanx.collectives.reduction import REDUCE_OPS
from phalanx.types import REDUCE_OP_NAMES, GroupInfo

__all__ = ["Asked", "Refusal", "explain", "explain_reduction"]

Kind = _native.ProblemKind
Problem = _native.Problem


class Asked(NamedTuple):
    """What else of a call its problem may be about."""

    root: object = None
    reduce_op: int = 0
    factor: float = 1.0
    output_splits: Sequence[int] = ()
    input_splits: Sequence[int] = ()


class Refusal(NamedTuple):
    """The code without "INVALID:", the verdict and the next step."""

    code: str
    message: str
    hint: str


def explain(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    return _TEXTS[problem.kind](problem, info, asked)


def _not_a_list(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    name, got = problem.name, type(problem.got).__name__
    return Refusal("LIST", f"expected {name} to be a list of tensors, got {got}", f"pass {name} as a list")


def _wrong_length(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    name, num = problem.name, problem.expected
    return Refusal(
        "LIST",
        f"expected {num} tensors in {name}, one a rank, got {problem.actual}",
        f"give {name} one entry for each of the {num} ranks of the group",
    )


def _empty_list(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    message = f"expected at least one tensor in {problem.name}, got none"
    return Refusal("LIST", message, "leave out calls without tensors")


def _unlike_length(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    message = f"expected {problem.expected} tensors in {problem.name}, as in {problem.other}, got {problem.actual}"
    one, other = ("output", "input") if problem.other == "inputs" else ("input", "output")
    return Refusal("LIST", message, f"pass one {one} for each {other}")


def _no_lists(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    got = len(problem.got) if isinstance(problem.got, (list, tuple)) else type(problem.got).__name__
    message = f"expected {problem.expected} lists of outputs, one a rank, got {got}"
    return Refusal("LIST", message, "pass outputs[p][i] for tensor i of rank p")


def _not_the_root(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    name = problem.name
    message = f"expected no {name} on a rank that is not the root ({asked.root}), got {problem.actual}"
    return Refusal("LIST", message, f"pass {name} on the root only")


def _wrong_dtype(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    name, dtype = problem.name, problem.like.dtype
    return Refusal(
        "DTYPE",
        f"expected {name} of {dtype}, got {problem.got.dtype}",
        f"make all tensors of the call {dtype}, for example with {name}.to({dtype})",
    )


def _wrong_size(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    return _size(problem, f"as in {problem.other}")


def _wrong_product(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    return _size(problem, f"{info.size} ranks times {problem.expected // info.size}")


def _size(problem: Problem, because: str) -> Refusal:
    name, expected = problem.name, problem.expected
    message = f"expected {expected} elements in {name} ({because}), got {problem.actual}"
    return Refusal("SIZE", message, f"pass {name} with {expected} elements")


def _wrong_own(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    return Refusal(
        "SIZE",
        f"expected this rank's block for itself to be of one size on both sides, got {problem.actual} elements of "
        f"input and {problem.expected} of output",
        f"make entry {info.rank} of the inputs as large as entry {info.rank} of the outputs",
    )


def _wrong_rows(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    return Refusal(
        "SIZE",
        f"expected rows of {problem.name} that {info.size} ranks can share equally, got {problem.actual}",
        f"pass {problem.other}, or a dimension 0 that is a multiple of {info.size}",
    )


def _wrong_splits(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    name = problem.name
    return Refusal(
        "LIST",
        f"expected {problem.expected} {name}, one per rank, got {problem.actual}",
        f"give {name} one entry for each of the {info.size} ranks of the group",
    )


def _wrong_sum(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    name, tensor = problem.name, problem.other
    splits = asked.output_splits if tensor == "output" else asked.input_splits
    return Refusal(
        "SIZE",
        f"expected {name} of at least 0 that add up to the {problem.expected} rows of {tensor}, got {list(splits)}",
        f"make {name} add up to {tensor}.shape[0]",
    )


def _wrong_root(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    return Refusal(
        "ROOT",
        f"expected a root between 0 and {info.size - 1}, got {asked.root!r}",
        "give the root as a rank within this group (dist.get_group_rank turns a global rank into one)",
    )


def _no_reduction(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    return explain_reduction(problem.got.dtype, asked.reduce_op, asked.factor)


def explain_reduction(dtype: torch.dtype, reduce_op: int, factor: float) -> Refusal:
    """Of a reduction that the core does not have."""
    if not isinstance(reduce_op, int) or not 0 <= reduce_op < len(REDUCE_OP_NAMES):
        message = f"expected a reduce op between 0 and {len(REDUCE_OP_NAMES) - 1}, got {reduce_op!r}"
        return Refusal("REDUCE_OP", message, f"use one of {', '.join(REDUCE_OP_NAMES)}")
    allowed = REDUCE_OPS.get(dtype)
    if allowed is None:
        return Refusal(
            "DTYPE",
            f"expected a dtype that can be reduced, got {dtype}",
            "convert the tensor, for example to torch.float32, or move it with a call that does not reduce",
        )
    if reduce_op not in allowed:
        names = ", ".join(REDUCE_OP_NAMES[i] for i in sorted(allowed))
        return Refusal(
            "REDUCE_OP",
            f"expected a reduce op that {dtype} has, got {REDUCE_OP_NAMES[reduce_op]}",
            f"use one of {names}, or convert the tensor",
        )
    return Refusal(
        "REDUCE_OP",
        f"expected an integral factor of at most 64 bits for PREMUL_SUM of {dtype}, got {factor}",
        "use an integral factor, or convert the tensor to a float dtype",
    )


def _overlaps(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    one, other = problem.name, problem.other
    return Refusal(
        "OVERLAP",
        f"expected outputs that share no memory, got {one} and {other}, which do",
        f"pass {other}.clone() and copy the result back, or give each output memory of its own",
    )


def _overlaps_self(problem: Problem, info: GroupInfo, asked: Asked) -> Refusal:
    name, tensor = problem.name, problem.got
    return Refusal(
        "OVERLAP",
        f"expected {name} to have memory for each element, got size {tuple(tensor.shape)} with stride "
        f"{tensor.stride()}",
        f"pass {name}.contiguous() and copy the result back",
    )


_TEXTS: dict[Kind, Callable[[Problem, GroupInfo, Asked], Refusal]] = {
    Kind.not_a_list: _not_a_list,
    Kind.wrong_length: _wrong_length,
    Kind.empty_list: _empty_list,
    Kind.unlike_length: _unlike_length,
    Kind.no_lists: _no_lists,
    Kind.not_the_root: _not_the_root,
    Kind.wrong_dtype: _wrong_dtype,
    Kind.wrong_size: _wrong_size,
    Kind.wrong_product: _wrong_product,
    Kind.wrong_own: _wrong_own,
    Kind.wrong_rows: _wrong_rows,
    Kind.wrong_splits: _wrong_splits,
    Kind.wrong_sum: _wrong_sum,
    Kind.wrong_root: _wrong_root,
    Kind.no_reduction: _no_reduction,
    Kind.overlaps: _overlaps,
    Kind.overlaps_self: _overlaps_self,
}
