"""Torch's many ways to give tensors, a root, a reduce op and a timeout, as one.

torch passes an options object. Users pass a root, a reduce op or a timeout in its place, or by keyword.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, TypeAlias

from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.collectives.numbers import whole
from phalanx.errors import InvalidCall, InvalidType
from phalanx.group.torch_compat.options import NOT_GIVEN, reduce_op_of
from phalanx.types import GroupInfo

__all__ = [
    "OneList",
    "OneTensor",
    "Options",
    "Reduction",
    "check_root_tensor",
    "gathering_of",
    "given",
    "only",
    "only_list",
    "reduction_of",
    "root_of",
    "timing_of",
]


class Options(Protocol):
    """One of torch's options objects."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815  # torch's name


# What is taken for a reduce op, for a tensor and for a list of tensors.
Reduction: TypeAlias = ReduceOp | ReduceOp.RedOpType | Options
OneTensor: TypeAlias = Tensor | list[Tensor]
OneList: TypeAlias = list[Tensor] | list[list[Tensor]]


def given(first: Any, *others: Any) -> Any:
    """The value of an argument that has several names, of which the first is usual; None if it was not given."""
    if first is not None:
        return first
    return next((value for value in others if value is not None), None)


def timing_of(timeout: Any, opts: Any) -> tuple[timedelta | None, Any]:
    """The call's own timeout, or that of its options, and the options. Either may stand in place of the other."""
    if opts is None:
        timeout, opts = None, timeout
    if timeout is not None or opts is None:
        return timeout, opts
    # Groups and stores have a timeout, too.
    if not hasattr(opts, "asyncOp"):
        return opts, None
    return None if opts.timeout == NOT_GIVEN else opts.timeout, opts


def root_of(
    info: GroupInfo, name: str, rank: Any, root: Any, opts: Any, timeout: timedelta | None
) -> tuple[int, timedelta | None, Any]:
    """Root, timeout and options. `rank` is torch's `src` or `dst`, or the options object in its place."""
    if opts is None and hasattr(rank, "rootRank"):
        rank, opts = None, rank
    elif opts is not None and not hasattr(opts, "rootRank"):
        if rank is not None or root is not None:
            raise InvalidType(
                f"expected options that have a root, got an object of class {type(opts).__name__}",
                code="INVALID:ROOT",
                group=info.name,
                rank=info.rank,
                op=name,
                hint=f"pass the options that torch has for {name}, or the root and the timeout by keyword",
            )
        rank, opts = opts, None
    if rank is None and root is None:
        return 0 if opts is None else opts.rootRank, *timing_of(timeout, opts)
    ranks = [whole(info, name, "ROOT", "the root", one) for one in (root, rank) if one is not None]
    if ranks[0] != ranks[-1]:
        raise InvalidCall(
            f"expected one root, got root={ranks[0]} and rank {ranks[1]}",
            code="INVALID:ROOT",
            group=info.name,
            rank=info.rank,
            op=name,
            hint="pass the root once, as root= or under torch's name for it",
        )
    return ranks[0], *timing_of(timeout, opts)


def check_root_tensor(info: GroupInfo, op: str, opts: Any) -> None:
    """torch's options name one of several tensors as the root's; a call has one."""
    if getattr(opts, "rootTensor", 0) != 0:
        raise InvalidCall(
            f"expected 0 as the root tensor of a call of one tensor, got {opts.rootTensor}",
            code="INVALID:ROOT",
            group=info.name,
            rank=info.rank,
            op=op,
            hint="leave rootTensor as it is, and name the root with rootRank",
        )


def reduction_of(info: GroupInfo, name: str, op: Any, timeout: timedelta | None) -> tuple[int, float, timedelta | None]:
    """Reduce op, factor and timeout. `op` may be an options object."""
    chosen = getattr(op, "reduceOp", None)
    if chosen is not None:
        timeout, _ = timing_of(timeout, op)
    else:
        chosen = ReduceOp.SUM if op is None else op
    try:
        reduce_op, factor = reduce_op_of(chosen)
    except (TypeError, ValueError) as error:
        raise InvalidType(
            str(error),
            code="INVALID:REDUCE_OP",
            group=info.name,
            rank=info.rank,
            op=name,
            hint="pass one of torch.distributed.ReduceOp, for example ReduceOp.SUM",
        ) from None
    return reduce_op, factor, timeout


def gathering_of(first: Any, second: Any, tensors: Any, tensor: Any, outputs: Any) -> tuple[Any, Any]:
    """Input and outputs of a gather: torch's function has the input first, its groups have the outputs first."""
    if isinstance(first, (list, tuple)):
        return given(second, tensors, tensor), first
    return given(first, tensors, tensor), given(second, outputs, [])


def only(info: GroupInfo, op: str, tensors: Any) -> Tensor:
    """The one tensor of a call: torch passes it in a list, users often as it is."""
    if isinstance(tensors, (list, tuple)):
        if len(tensors) == 1:
            return tensors[0]  # type: ignore[no-any-return]
        raise _bad_list(info, op, "one tensor", f"a list of {len(tensors)}")
    return tensors  # type: ignore[no-any-return]


def only_list(info: GroupInfo, op: str, argument: str, lists: Any) -> list[Tensor]:
    """The one list of tensors of a call: torch wraps it in another list."""
    if not isinstance(lists, (list, tuple)):
        raise _bad_list(info, op, f"{argument} to be a list of tensors", type(lists).__name__)
    if lists and isinstance(lists[0], (list, tuple)):
        if len(lists) != 1:
            raise _bad_list(info, op, f"{argument} to hold one list of tensors", str(len(lists)))
        return list(lists[0])
    return list(lists)


def _bad_list(info: GroupInfo, op: str, expected: str, actual: str) -> InvalidCall:
    return InvalidCall(
        f"expected {expected}, got {actual}",
        code="INVALID:LIST",
        group=info.name,
        rank=info.rank,
        op=op,
        hint="pass one tensor per rank; several at once go through the coalesced calls",
    )
