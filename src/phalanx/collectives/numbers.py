"""Numbers that callers pass: roots, peers, tags and splits.

Whatever is an integer to Python (`operator.index`) is taken: NumPy's integers, 0-dim integer tensors, bools. Where a
list is expected, a range and a 1-D tensor or array of integers are taken, too. Everything else is an `InvalidCall`,
also a reduce op, which Python takes for an integer.
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any, NoReturn

from torch.distributed import ReduceOp

from phalanx.errors import InvalidType
from phalanx.types import GroupInfo

__all__ = ["index_of", "whole", "whole_list"]


def index_of(value: Any) -> int | None:
    """The value as an int; None if it is no integer."""
    if type(value) is int:
        return value
    if isinstance(value, ReduceOp.RedOpType):
        return None
    try:
        return operator.index(value)
    except Exception:
        # Tensors raise errors of several classes.
        return None


def whole(info: GroupInfo, op: str, code: str, what: str, value: Any) -> int:
    number = index_of(value)
    if number is None:
        _refuse(info, op, code, f"expected {what} as an integer, got {_show(value)}", f"pass {what} as an int")
    return number


def whole_list(info: GroupInfo, op: str, what: str, values: Any) -> list[int]:
    """Integers as a list; of None an empty one."""
    if values is None:
        return []
    if not isinstance(values, (list, tuple, range)):
        if getattr(values, "ndim", None) != 1 or not hasattr(values, "tolist"):
            _refuse_list(info, op, what, _show(values))
        try:
            values = values.tolist()
        except Exception as error:
            _refuse_list(info, op, what, f"{_show(values)} ({error})")
    if all(type(value) is int for value in values):
        return list(values)
    numbers = []
    for i, value in enumerate(values):
        number = index_of(value)
        if number is None:
            _refuse_list(info, op, what, f"{_show(value)} in place {i}")
        numbers.append(number)
    return numbers


def _refuse_list(info: GroupInfo, op: str, what: str, got: str) -> NoReturn:
    _refuse(info, op, "LIST", f"expected {what} as a list of integers, got {got}", f"pass {what} as a list of ints")


def _refuse(info: GroupInfo, op: str, code: str, message: str, hint: str) -> NoReturn:
    raise InvalidType(message, code=f"INVALID:{code}", group=info.name, rank=info.rank, op=op, hint=hint)


def _show(value: Any) -> str:
    """The value, short and on one line."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:
        return f"an object of class {type(value).__name__}"
