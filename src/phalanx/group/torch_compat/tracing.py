"""What torch.compile and the profiler see of our code."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame
from torch._C._profiler import _RecordFunctionFast as ProfilerRange
from torch.autograd import profiler

__all__ = ["PROFILER_STATE", "ProfilerRange", "is_profiling", "not_traced"]

# The native front looks for `_is_profiler_enabled` here.
PROFILER_STATE = vars(profiler)


def is_profiling() -> bool:
    """Whether torch's profiler is on."""
    return bool(profiler._is_profiler_enabled)


_Traced = TypeVar("_Traced", bound=Callable[..., Any])


def not_traced(target: _Traced) -> _Traced:
    """Has torch.compile call a function, or a class' methods, as it calls those of C++, instead of looking into it."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for value in [target] if isinstance(target, FunctionType) else vars(target).values():
        value = getattr(value, "fallback", value)
        if isinstance(value, FunctionType):
            # Where a function that is compiled calls it, and where one does that was left as it is.
            value._torchdynamo_disable = True  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(value.__code__, skip)
    return target
