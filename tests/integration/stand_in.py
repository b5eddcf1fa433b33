"""A stand-in for a backend whose calls we only watch: calls are enqueued, complete later and in order, hang where ranks
disagree, and end by abort."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch.distributed as dist
from ranks import Here

from phalanx import _native
from phalanx.group import endings
from phalanx.transports import keeper, posting
from phalanx.types import GroupInfo


class EngineAbortedError(Exception):
    pass


class Engine:
    """Carries out a call when all ranks have enqueued it. Knows nothing of us."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._calls: queue.SimpleQueue[tuple[str, threading.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, call: str, on_end: Callable[[], None]) -> Callable[[], None]:
        """Returns at once; what it returns waits until the call has completed. `on_end` is called just before."""
        completed = threading.Event()
        self._calls.put((call, completed, on_end))

        def wait() -> None:
            while not completed.wait(0.01):
                if self._aborted.is_set():
                    raise EngineAbortedError

        return wait

    def abort(self) -> None:
        self._aborted.set()

    def close(self) -> None:
        self._aborted.set()
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while (taken := self._calls.get()) is not None:
            call, completed, on_end = taken
            number += 1
            self._store.set(f"{number}/{self._rank}", call)
            if not self._is_met(number, call):
                return
            on_end()
            completed.set()

    def _is_met(self, number: int, call: str) -> bool:
        """Waits for the others; for ever, where one of them does something else."""
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        while not self._aborted.wait(0.001):
            if self._store.check(keys) and all(self._store.get(key) == call.encode() for key in keys):
                return True
        return False


class Watched:
    """An engine whose calls are posted before they are enqueued. A difference between ranks aborts it."""

    def __init__(self, here: Here, name: str = "group") -> None:
        self.engine = Engine(here.store(f"engine of {name}"), here.rank, here.size)
        self.told = threading.Event()
        keeper.begin()
        info = GroupInfo(name, here.rank, here.size)
        self.posted = posting.join(here.store(name), info, 30, self._on_failure, engine="gloo")
        endings.enter(self.posted)

    def _on_failure(self) -> None:
        self.engine.abort()
        self.told.set()

    def call(self, description: _native.Description) -> Callable[[], None]:
        """Returns at once; what it returns waits until the call has completed, or raises why it can't."""
        seq = self.posted.post(description)
        told = f"{seq} {description.op} {description.count}"
        wait_for_engine = self.engine.enqueue(told, lambda: self.posted.end(description, seq))

        def wait() -> None:
            try:
                wait_for_engine()
            except EngineAbortedError:
                raise self.posted.explain(description.op, seq) from None

        return wait

    def close(self) -> None:
        endings.leave(self.posted)
        self.engine.close()
