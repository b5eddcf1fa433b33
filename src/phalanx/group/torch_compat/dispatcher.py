"""torch's dispatcher: modes (CommDebugMode, FakeTensorMode) and classes of tensors (TwoTensor) that carry out calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey, _distributed_c10d
from torch._C import _are_functorch_transforms_active as are_transforms_active
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Work
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from phalanx.group.torch_compat.options import PREMUL_SUM

__all__ = [
    "are_transforms_active",
    "boxed_reduce_op",
    "can_dispatch",
    "dispatch",
    "fakes_tensors",
    "num_dispatch_modes",
]


def can_dispatch() -> bool:
    """Whether torch's dispatcher shows calls of this thread to modes and to classes of tensors."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python):
        return False
    # A mode of ours can't lie below torch's own tracing modes. Of those, the fake one carries out every call itself.
    return _is_active("FAKE") or not (_is_active("PROXY") or _is_active("FUNCTIONAL"))


def fakes_tensors() -> bool:
    """Whether calls of this thread are traced with tensors without memory: no backend is to make them."""
    return _is_active("FAKE") or _is_active("PROXY")


def _is_active(name: str) -> bool:
    return torch._C._get_dispatch_mode(getattr(torch._C._TorchDispatchModeKey, name)) is not None


def dispatch(group: ProcessGroup, op: str, args: tuple[Any, ...], carry_out: Callable[[list[Any]], Any]) -> Any:
    """Calls an op of `torch.ops.c10d` and returns its Work: modes and classes see it.

    Below all of them, `carry_out` takes the place of torch's kernel, which would look for a backend in C++. It gets the
    op's tensors, as the modes and classes passed them on, and returns a Work. It may be called several times, or never.
    """
    if _is_active("FAKE"):
        return _call_op(op, args)
    with _innermost(_Innermost(group, carry_out)):
        return _call_op(op, args)


def _call_op(op: str, args: tuple[Any, ...]) -> Any:
    returned = getattr(torch.ops.c10d, op).default(*args)
    return Work.unbox(returned[1] if isinstance(returned, (tuple, list)) else returned)


@contextmanager
def _innermost(mode: TorchDispatchMode) -> Iterator[None]:
    """Puts a mode below those that are active, of which another innermost one steps aside."""
    modes = [_pop_mode() for _ in range(num_dispatch_modes())]
    try:
        _push_mode(mode)
        for other in reversed(modes):
            if not isinstance(other, _Innermost):
                _push_mode(other)
        yield
    finally:
        for _ in range(num_dispatch_modes()):
            _pop_mode()
        for other in reversed(modes):
            _push_mode(other)


@cache
def boxed_reduce_op(number: int, factor: float) -> Any:
    """A reduce op as ops of `torch.ops.c10d` take it."""
    op = (
        _distributed_c10d._make_nccl_premul_sum(factor)
        if number == PREMUL_SUM
        else ReduceOp(ReduceOp.RedOpType(number))
    )
    if hasattr(op, "boxed"):
        return op.boxed()
    # torch 2.13 boxes it in C++ only, where an op is called: this group never gets as far as a backend.
    options = _distributed_c10d.AllreduceOptions()
    options.reduceOp = op
    seen: list[Any] = []
    with _disable_current_modes(), _Seen(seen):
        ProcessGroup(0, 1).allreduce([torch.empty(0)], options)  # type: ignore[call-arg]
    return seen[2]


class _Seen(TorchDispatchMode):
    """Keeps the arguments of an op of c10d instead of calling it."""

    def __init__(self, args: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._args = args

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        self._args[:] = args
        return args[0], _distributed_c10d.FakeWork().boxed()


class _Innermost(TorchDispatchMode):
    """The mode below all others, where calls of the group are carried out."""

    def __init__(self, group: ProcessGroup, carry_out: Callable[[list[Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group = group
        self._carry_out = carry_out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fake = any(issubclass(cls, FakeTensor) for cls in types)
        if is_fake or not self._is_own(func, args):
            return func(*args, **(kwargs or {}))
        if types:
            # Classes come after modes: they are asked next, and this mode again for the calls that they make.
            return NotImplemented
        work = self._carry_out([leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)])
        num_returned = len(func._schema.returns)
        return (args[0], work.boxed()) if num_returned == 2 else work.boxed() if num_returned else None

    def _is_own(self, func: Any, args: Any) -> bool:
        if func.namespace != "c10d":
            return False
        names = [argument.name for argument in func._schema.arguments]
        return "process_group" in names and ProcessGroup.unbox(args[names.index("process_group")]) is self._group


def _gather_into(tensor: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    group = _distributed_c10d._resolve_process_group(group_name)
    _distributed_c10d._register_work(out, group.all_gather_single(out, tensor))
    return out


if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 14):
    # In torch 2.13 the kernel in C++ does not find the methods of a group in Python. For other groups this one does the
    # same as that one.
    _kernels = torch.library.Library("_c10d_functional", "IMPL")
    _kernels.impl("all_gather_into_tensor_out", _gather_into, "CPU")
