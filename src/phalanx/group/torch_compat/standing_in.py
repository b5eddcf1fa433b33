"""A group that stands for a plain one of torch's: torch holds the stand-in, and the plain group does the work."""

# torch's stubs give every spelling of a method as an overload.
# mypy: disable-error-code="override, misc"

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch._C import _distributed_c10d
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork

from phalanx.group.torch_compat.tracing import not_traced

__all__ = ["StandIn", "StandInWork", "backends_of", "devices_of", "end_coalescing", "num_calls", "start_coalescing"]

# The names of the class that identify the object that torch holds.
_OWN = {"boxed", "unbox"}
# torch's own hooks, as far as this version has them. In C++ they would look for calls at the stand-in.
_HOOKS = ("FlightRecorderHook", "HealthCheckHook", "NanCheckHook")
# Names by which C++ asks a group that is written in Python, and those under which Python knows them.
_ASKED_BY_CPP = {"getBackendName": "name", "getGroupName": "group_name", "getGroupDesc": "group_desc"}


@not_traced
class StandIn(ProcessGroup):
    """Passes everything on to `plain`. A subclass overrides what it does itself, under the names of torch's class.

    The backends are registered here as well, for callers in C++ of methods that Python can't override.
    """

    plain: ProcessGroup

    @classmethod
    def around(cls, plain: ProcessGroup) -> Self:
        _attach_hooks_to_plain_groups()
        self = cls.__new__(cls)
        ProcessGroup.__init__(self, plain.rank(), plain.size())  # type: ignore[call-arg]
        self.plain = plain
        default = plain.name()
        for device in plain._device_types:
            backend = plain._get_backend(device)
            kind = getattr(ProcessGroup.BackendType, backend.name().upper(), ProcessGroup.BackendType.CUSTOM)
            ProcessGroup._register_backend(self, device, kind, backend)
            if backend.name() == default:
                ProcessGroup._set_default_backend(self, kind)
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.end_coalescing(device)

    def start_coalescing(self, device: torch.device) -> None:
        start_coalescing(self.plain, device)

    def end_coalescing(self, device: torch.device) -> Any:
        return end_coalescing(self.plain, device)

    def _register_backend(self, *args: Any) -> None:
        self.plain._register_backend(*args)
        ProcessGroup._register_backend(self, *args)

    def _set_default_backend(self, *args: Any) -> None:
        self.plain._set_default_backend(*args)
        ProcessGroup._set_default_backend(self, *args)


class StandInWork(TorchWork):
    """The Work of an engine in a class of ours. `engines` is the engine's own."""

    def __init__(self, engines: TorchWork) -> None:
        TorchWork.__init__(self)
        self.engines: Any = engines

    def _source_rank(self) -> int:
        return int(self.engines._source_rank())

    def get_future_result(self) -> Any:
        return self.engines.get_future_result()

    def block_current_stream(self) -> None:
        self.engines.block_current_stream()

    def _get_op_type(self) -> Any:
        return self.engines._get_op_type()

    def _get_duration(self) -> Any:
        return self.engines._get_duration()


def start_coalescing(group: ProcessGroup, device: torch.device) -> None:
    group._start_coalescing(device)


def end_coalescing(group: ProcessGroup, device: torch.device) -> Any:
    return group._end_coalescing(device)


def devices_of(group: ProcessGroup) -> list[str]:
    """The types of devices for which a group has backends."""
    return [device.type for device in group._device_types]


def backends_of(group: ProcessGroup) -> Sequence[Any]:
    """The backends of a group, each once; the group itself where it is written in Python and has none."""
    found: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if all(backend is not known for known in found):
            found.append(backend)
    return found or [group]


def num_calls(group: ProcessGroup) -> int:
    """How many collectives this rank has made; 0 where the backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def _passed_on(name: str, asked: str) -> Callable[..., Any]:
    def method(self: StandIn, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.plain, asked)
        return found(*args, **kwargs) if callable(found) else found

    method.__name__ = name
    method.__qualname__ = f"{StandIn.__name__}.{name}"
    return not_traced(method)


def _attach_hooks_to_plain_groups() -> None:
    for name in _HOOKS:
        hook = getattr(_distributed_c10d, name, None)
        if hook is not None and not hasattr(hook, "attach_to_plain"):
            hook.attach_to_plain = hook.attach
            hook.attach = staticmethod(_attaching(hook.attach))


def _attaching(attach: Callable[..., Any]) -> Callable[..., Any]:
    def attach_to_plain(pg: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return attach(pg.plain if isinstance(pg, StandIn) else pg, *args, **kwargs)

    return attach_to_plain


def _shared(name: str) -> property:
    def get(self: StandIn) -> Any:
        return getattr(self.plain, name)

    def assign(self: StandIn, value: Any) -> None:
        setattr(self.plain, name, value)

    return property(not_traced(get), not_traced(assign))


def _pass_on_everything() -> None:
    for name in dir(ProcessGroup):
        if name in vars(StandIn) or name in _OWN or name.startswith(("__", "_pybind11")):
            continue
        found = inspect.getattr_static(ProcessGroup, name)
        if isinstance(found, property):
            setattr(StandIn, name, _shared(name))
        elif callable(getattr(ProcessGroup, name)) and not isinstance(found, (type, staticmethod)):
            setattr(StandIn, name, _passed_on(name, name))
    for name, asked in _ASKED_BY_CPP.items():
        setattr(StandIn, name, _passed_on(name, asked))


_pass_on_everything()
