"""torch's private names, gathered in one place: what changes between torch versions changes here."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C import DispatchKey, _distributed_c10d
from torch._C import _are_functorch_transforms_active as are_transforms_active
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C._distributed_c10d import ProcessGroup, ReduceOp, Work
from torch._C._dynamo import eval_frame
from torch._C._profiler import _RecordFunctionFast as ProfilerRange
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable, profiler
from torch.distributed import (
    GroupMember,
    PrefixStore,
    Store,
    c10d_logger,
    distributed_c10d,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _World
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from phalanx import _native

__all__ = [
    "LEARNED_OPTIONS",
    "NOT_GIVEN",
    "OPTION_CLASSES",
    "UNSET_TIMEOUT",
    "GroupName",
    "OwnWorlds",
    "ProfilerRange",
    "are_transforms_active",
    "at_end_of_backward",
    "boxed_reduce_op",
    "can_dispatch",
    "default_group",
    "dispatch",
    "in_backward",
    "in_final_callback",
    "not_traced",
    "num_dispatch_modes",
    "profiler",
    "reduce_op_of",
    "sample_options",
    "without_name",
]


def _keep_recorder_off(backend: str) -> None:
    """From 2.15 on torch attaches its flight recorder to every group that has devices, but for some backends.

    The recorder asks the group for its C++ backends, and a group written in Python has none: making the group would
    fail. Groups of this backend keep records of their own.
    """
    attach = getattr(distributed_c10d, "_maybe_attach_flight_recorder", None)
    if attach is None:
        return

    @wraps(attach)
    def attach_to_others(group: ProcessGroup, *args: Any, **kwargs: Any) -> None:
        if group.name() != backend:
            attach(group, *args, **kwargs)

    distributed_c10d._maybe_attach_flight_recorder = attach_to_others  # type: ignore[attr-defined]


_keep_recorder_off("phalanx")

_KINDS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.BXOR)
_REDUCE_OP_CLASSES = (ReduceOp, ReduceOp.RedOpType)
_PREMUL_SUM: int = ReduceOp.PREMUL_SUM.value


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


def default_group() -> ProcessGroup | None:
    """torch.distributed's default group, if there is one."""
    return GroupMember.WORLD


def without_name(store: Store) -> Store | None:
    """The store that all groups of a world share, of one that torch gives to a group; None: torch has changed.

    torch puts two prefixes before it, the group's name and the device type.
    """
    for _ in range(2):
        if not isinstance(store, PrefixStore):
            return None
        store = store.underlying_store
    return store


def in_backward() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def in_final_callback() -> bool:
    """Whether the backward pass under way is through, and the engine calls what was queued for its end."""
    return torch._C._current_autograd_node() is None


def at_end_of_backward(callback: Callable[[], Any]) -> None:
    """Has the autograd engine call it when the backward pass under way is through, before those queued later."""
    Variable._execution_engine.queue_callback(callback)


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


# The timeout in the options of a call that was made without one.
NOT_GIVEN = timedelta(milliseconds=-1)


def reduce_op_of(op: Any) -> tuple[int, float]:
    """The number of a ReduceOp or RedOpType, and the factor of a PREMUL_SUM (1 for the others)."""
    if not isinstance(op, _REDUCE_OP_CLASSES):
        raise TypeError(f"expected a torch.distributed.ReduceOp, got {op!r}")
    number = _number_of(op)
    if number != _PREMUL_SUM:
        return number, 1.0
    factor = getattr(op, "factor", 1.0)
    return number, float(factor)


# torch's dispatcher: modes (CommDebugMode, FakeTensorMode) and classes of tensors (TwoTensor) that carry out calls.


def can_dispatch() -> bool:
    """Whether torch's dispatcher shows calls of this thread to modes and to classes of tensors."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python):
        return False
    # A mode of ours can't lie below torch's own tracing modes. Of those, the fake one carries out every call itself.
    return _is_active("FAKE") or not (_is_active("PROXY") or _is_active("FUNCTIONAL"))


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
        if number == _PREMUL_SUM
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


# What torch gives to groups made without a timeout while ranks are threads, told apart from one that was asked for. On
# its way torch makes a number of seconds of little precision of it.
UNSET_TIMEOUT = timedelta(minutes=30, milliseconds=500)


class _OwnWorld(_World):
    """What torch knows of the groups of one rank; its own class keeps most of it in the module."""

    # In place of torch's properties, which can't be set.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


class OwnWorlds:
    """Gives each thread that is a rank a world of torch's; other threads keep theirs."""

    def __init__(self, let_others: Callable[[], None], stranger: Callable[[], Exception]) -> None:
        """`let_others` is called by a rank that waits; `stranger` makes the error for threads that are no rank's."""
        self._let_others = let_others
        self._stranger = stranger
        self._original = distributed_c10d._world
        self._here = _Here(self._original)
        self._before: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        self._replace(distributed_c10d, "_world", _Switch(self._here))
        self._replace(distributed_c10d, "default_pg_timeout", UNSET_TIMEOUT)
        self._replace(distributed_c10d, "_default_pg_init_method", distributed_c10d._default_pg_init_method)
        # A default group's end puts back what was there when it was made.
        self._replace(sys, "excepthook", sys.excepthook)
        # It repeats at length, for each rank, what the run raises.
        self._replace(c10d_logger._c10d_logger, "disabled", True)
        self._replace(distributed_c10d, "_get_default_group", self._known(distributed_c10d._get_default_group))
        self._replace(DeviceMesh, "__init__", self._apart(DeviceMesh.__init__))
        self._replace(torch._C.Future, "wait", self._sharing(torch._C.Future.wait))
        _distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        _installed.append(self)

    def enter(self) -> None:
        """In the thread of a rank, first of all."""
        self._here.world = _OwnWorld()
        self._here.number = next(_numbers)

    def belongings(self) -> tuple[Any, int | None]:
        """In the thread of a rank: what threads that it starts have in common with it."""
        return self._here.world, self._here.number

    def enter_as(self, belongings: tuple[Any, int | None]) -> None:
        """First of all, in a thread that a rank has started."""
        self._here.world, self._here.number = belongings
        # C++ has a registry for each thread.
        for group, name in list(self._here.world.pg_names.items()):
            _distributed_c10d._register_process_group(name, group)

    def leave(self) -> None:
        """Last of all, in such a thread."""
        for name in list(self._here.world.pg_names.values()):
            _distributed_c10d._unregister_process_group(name)
        self._here.world, self._here.number = self._original, None

    def remove(self, for_all: bool = True) -> None:
        """`for_all`: also for threads that are ranks, which must have ended."""
        _distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        _installed.remove(self)
        switch = distributed_c10d._world
        while self._before:
            setattr(*self._before.pop())
        if not for_all:
            distributed_c10d._world = switch

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _apart(self, original: Callable[..., None]) -> Callable[..., None]:
        """Meshes of two ranks, or of two runs, are not equal: torch has caches that find one for the other."""

        @wraps(original)
        def init(mesh: Any, *args: Any, **kwargs: Any) -> None:
            original(mesh, *args, **kwargs)
            if self._here.number is not None:
                mesh._thread_id = self._here.number

        return init

    def _known(self, original: Callable[[], ProcessGroup]) -> Callable[[], ProcessGroup]:
        """A thread of which nobody knows whose it is must not be told that there is no default group."""

        @wraps(original)
        def get_default_group() -> ProcessGroup:
            if self._here.world is self._original and self._original.default_pg is None:
                raise self._stranger()
            return original()

        return get_default_group

    def _sharing(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """torch waits in C++ for futures that it made of ours, and a rank would keep its turn."""
        done = torch._C.Future.done

        @wraps(original)
        def wait(future: Any) -> Any:
            while self._here.number is not None and not done(future):
                self._let_others()
            return original(future)

        return wait


# Those of a run under way.
_installed: list[OwnWorlds] = []


def _forget_rank() -> None:
    """In a forked child no thread is a rank. What it had of torch's groups it keeps: their calls say what is wrong."""
    for worlds in _installed:
        worlds._here.number = None


os.register_at_fork(after_in_child=_forget_rank)

# Of all ranks there ever were, below those of threads.
_numbers = itertools.count(-1, -1)


class _Here(threading.local):
    """The world of this thread, and which rank of all it is."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.number: int | None = None


class _Switch:
    """Stands for the world of whoever asks."""

    def __init__(self, here: _Here) -> None:
        object.__setattr__(self, "_here", here)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_here").world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_here").world, name, value)
