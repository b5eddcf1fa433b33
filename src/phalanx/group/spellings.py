"""Torch's many ways to give tensors, a root, a reduce op and a timeout, as one.

torch passes an options object. Users pass a root, a reduce op or a timeout in its place, or by keyword.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from phalanx.collectives.numbers import whole
from phalanx.errors import InvalidCall, InvalidType
from phalanx.group.torch_compat import NOT_GIVEN, reduce_op_of
from phalanx.types import GroupInfo

__all__ = ["check_root_tensor", "given", "only", "only_list", "reduction_of", "root_of", "timeout_of"]


def given(*spellings: Any) -> Any:
    """The one of an argument's names under which it was given; None if it was not."""
    return next((value for value in spellings if value is not None), None)


def timeout_of(opts: Any, timeout: timedelta | None) -> timedelta | None:
    """The call's own timeout, or that of its options; None where neither has one."""
    if timeout is not None or opts is None:
        return timeout
    if not hasattr(opts, "timeout"):
        return opts  # type: ignore[no-any-return]
    return None if opts.timeout == NOT_GIVEN else opts.timeout


def root_of(
    info: GroupInfo, name: str, opts: Any, root: Any, timeout: timedelta | None
) -> tuple[int, timedelta | None, Any]:
    """Root and timeout; what is left of `opts` may still hold a reduce op."""
    if hasattr(opts, "rootRank"):
        chosen = opts.rootRank if root is None else whole(info, name, "ROOT", "the root", root)
        return chosen, timeout_of(opts, timeout), opts
    if root is None:
        root = 0 if opts is None else opts
    return whole(info, name, "ROOT", "the root", root), timeout, None


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


def reduction_of(
    info: GroupInfo, name: str, opts: Any, op: Any, timeout: timedelta | None
) -> tuple[int, float, timedelta | None]:
    """Reduce op, factor and timeout."""
    chosen = getattr(opts, "reduceOp", None)
    if chosen is not None:
        timeout = timeout_of(opts, timeout)
    elif opts is not None:
        chosen = opts
    try:
        reduce_op, factor = reduce_op_of(op if op is not None else chosen if chosen is not None else ReduceOp.SUM)
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
        hint="pass one tensor a rank; several at once go through the coalesced calls",
    )
