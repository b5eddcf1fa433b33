"""A stand-in for an engine of devices, as NCCL is: a backend written in Python that a program registers.

A call is enqueued and returns at once. A thread per rank carries the calls out in order, when all ranks have enqueued
the same one; it hangs where they disagree. `wait()` returns before the call has completed, as the wait of a stream
does. `abort()` ends the calls.

Tensors of the device "meta" have no data at all: nothing can read them, and their device is not the host. Calls with
tensors of the host are waited for until they have completed, and give results.
"""

# torch's stubs give every spelling of a method as an overload.
# mypy: disable-error-code="override"

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

__all__ = ["NAME", "NAME_WITHOUT_ABORT", "DeviceEngine", "device_tensor", "register"]

NAME = "device_engine"
NAME_WITHOUT_ABORT = "endless_engine"
_BETWEEN_LOOKS = 0.002


class _Work(dist.Work):
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._end: Future[None] = Future()
        # One that fails by what is chained to it: torch's reducer does not survive others.
        self.future = self._end.then(self._result)
        self.tensors = list(tensors)
        self.ended = threading.Event()
        self.failed = False
        # How often a caller asked the device to come to an end.
        self.synchronized = 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if any(tensor.device.type == "cpu" for tensor in self.tensors):
            self.ended.wait()
            self._result(self._end)
        return True

    def synchronize(self) -> None:
        self.synchronized += 1
        self.ended.wait()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def is_success(self) -> bool:
        return self.ended.is_set() and not self.failed

    def get_future(self) -> Future[Any]:
        return self.future

    def end(self, *, well: bool) -> None:
        if not self.ended.is_set():
            self.failed = not well
            self.ended.set()
            self._end.set_result(None)

    def _result(self, end: Future[None]) -> Any:
        if self.failed:
            raise RuntimeError("the engine was aborted")
        return self.tensors


class DeviceEngine(dist.ProcessGroup):
    """The group. Like all third-party groups, it knows nothing of guards."""

    _name = NAME

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self.aborted = threading.Event()
        self.works: list[_Work] = []
        self._coalesced: list[_Work] | None = None
        self._calls: queue.SimpleQueue[tuple[str, _Work, Callable[[int], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(rank, size), daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)

    def getBackendName(self) -> str:  # noqa: N802
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """Of ones: every rank gives what its tensor has, and the sum of equal tensors is as many times that."""

        def finish(size: int) -> None:
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    tensor.mul_(size)

        return self._enqueue(f"allreduce {[tensor.numel() for tensor in tensors]}", tensors, finish)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._enqueue(f"broadcast {[tensor.numel() for tensor in tensors]}", tensors, lambda size: None)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        def finish(size: int) -> None:
            for output in outputs[0]:
                output.copy_(inputs[0])

        return self._enqueue(f"allgather {inputs[0].numel()}", outputs[0], finish)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._enqueue("barrier", [], lambda size: None)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        works, self._coalesced = self._coalesced, None
        return works[-1] if works else None

    def _enqueue(self, call: str, tensors: Sequence[torch.Tensor], finish: Callable[[int], None]) -> dist.Work:
        work = _Work(tensors)
        self.works.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        self._calls.put((call, work, finish))
        return work

    def abort(self) -> None:
        self.aborted.set()

    def shutdown(self) -> None:
        self.aborted.set()
        self._calls.put(None)
        self._thread.join()

    def _run(self, rank: int, size: int) -> None:
        number = 0
        while (taken := self._calls.get()) is not None:
            call, work, finish = taken
            number += 1
            self._store.set(f"{number}/{rank}", call)
            well = self._is_met([f"{number}/{one}" for one in range(size)], call)
            if well:
                finish(size)
            work.end(well=well)

    def _is_met(self, keys: list[str], call: str) -> bool:
        """Waits for the others; for ever, where one of them does something else."""
        while not self.aborted.wait(_BETWEEN_LOOKS):
            if self._store.check(keys) and all(self._store.get(key) == call.encode() for key in keys):
                return True
        return False


class EndlessEngine(DeviceEngine):
    """One that has no `abort()`: what it has begun goes on for ever."""

    _name = NAME_WITHOUT_ABORT
    abort = dist.ProcessGroup.abort


def device_tensor(*shape: int) -> torch.Tensor:
    """A tensor of ones whose device is not the host."""
    return torch.ones(*shape, device="meta")


def register() -> None:
    """As a package that brings the backend does when it is imported."""
    for kind in (DeviceEngine, EndlessEngine):

        def create(store: dist.Store, rank: int, size: int, timeout: timedelta, kind: Any = kind) -> DeviceEngine:
            engine: DeviceEngine = kind(store, rank, size)
            return engine

        dist.Backend.register_backend(kind._name, create, devices=["cpu", "meta"])
