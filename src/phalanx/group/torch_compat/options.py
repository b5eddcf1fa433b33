"""Options objects and reduce ops, as torch's functions pass them to the methods of a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ReduceOp
from torch.distributed import distributed_c10d

from phalanx import _native

__all__ = ["LEARNED_OPTIONS", "NOT_GIVEN", "OPTION_CLASSES", "PREMUL_SUM", "reduce_op_of", "sample_options"]

_KINDS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.BXOR)
_REDUCE_OP_CLASSES = (ReduceOp, ReduceOp.RedOpType)
PREMUL_SUM: int = ReduceOp.PREMUL_SUM.value


def _number_by_value(op: Any) -> int:
    return int(getattr(op, "op", op).value)


# The hash of both classes is the number, and is the quickest way to it; only if that should change, the slow way.
_hash_is_number = all(hash(ReduceOp(kind)) == hash(kind) == kind.value for kind in _KINDS)
_number_of: Callable[[Any], int] = hash if _hash_is_number else _number_by_value
# Where it changes, the native front leaves reductions to Python.
_native.set_reduce_ops(list(_REDUCE_OP_CLASSES) if _hash_is_number else [])

# What torch's functions pass to the methods of a group.
OPTION_CLASSES: list[type] = [
    getattr(distributed_c10d, name)
    for name in (
        "AllgatherOptions",
        "AllreduceCoalescedOptions",
        "AllreduceOptions",
        "AllToAllOptions",
        "BarrierOptions",
        "BroadcastOptions",
        "GatherOptions",
        "ReduceOptions",
        "ReduceScatterOptions",
        "ScatterOptions",
    )
]


def sample_options(kind: type, number: int) -> Any:
    """Options whose fields differ from those of another number."""
    options = kind()
    options.timeout = timedelta(milliseconds=1001 + 7 * number)
    options.asyncOp = number % 3 == 0
    for name, value in (("rootRank", 5 + 3 * number), ("rootTensor", 11 + 5 * number)):
        if hasattr(options, name):
            setattr(options, name, value)
    if hasattr(options, "reduceOp"):
        options.reduceOp = (ReduceOp.MAX, ReduceOp.SUM, ReduceOp.AVG, ReduceOp.BXOR, ReduceOp.PRODUCT)[number % 5]
    return options


def _learn_options(num_samples: int = 16) -> dict[type, dict[str, bool]]:
    return {
        kind: _native.learn_options(kind, [sample_options(kind, number) for number in range(num_samples)])
        for kind in OPTION_CLASSES
    }


# Which fields the native front reads from memory.
LEARNED_OPTIONS = _learn_options()

# The timeout in the options of a call that was made without one.
NOT_GIVEN = timedelta(milliseconds=-1)


def reduce_op_of(op: Any) -> tuple[int, float]:
    """The number of a ReduceOp or RedOpType, and the factor of a PREMUL_SUM (1 for the others)."""
    if not isinstance(op, _REDUCE_OP_CLASSES):
        raise TypeError(f"expected a torch.distributed.ReduceOp, got {op!r}")
    number = _number_of(op)
    if number != PREMUL_SUM:
        return number, 1.0
    factor = getattr(op, "factor", 1.0)
    return number, float(factor)
