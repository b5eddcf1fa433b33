"""A store for ranks that are threads: whoever waits for a key lets the others go on, and time is the run's own."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import DistStoreError, HashStore

from phalanx.testing.scheduling import forked
from phalanx.transports.base import Scheduler
from phalanx.types import Store

__all__ = ["KeyWait", "SharedStore"]

_Value = str | bytes
_FOREVER = timedelta(days=3650)


class _Scheduler(Scheduler, Protocol):
    """What a store asks of those who say whose turn it is."""

    @property
    def is_rank(self) -> bool:
        """Whether this is a rank's thread."""

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child of the process in which the ranks run."""

    def happened(self) -> None:
        """Something that a rank may look for."""

    def step(self) -> None:
        """Others may go first, where the schedule has them do so before each call."""

    def yield_turn(self) -> None:
        """Others may go first."""


def _as_bytes(value: _Value) -> bytes:
    return value.encode() if isinstance(value, str) else value


class KeyWait:
    """What a rank waits for that waits for keys."""

    kind = "STORE"

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.ended = False

    def describe(self) -> str:
        return f"the store, for {', '.join(map(repr, self.keys))}"

    def waited_for(self) -> list[int]:
        """Whoever sets the keys: nobody knows."""
        return []

    def remarks(self) -> list[str]:
        return []


class SharedStore(Store):
    """Waits for ever unless a timeout was set: when nobody can go on, that is found at once."""

    def __init__(self, scheduler: _Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        # Its stubs lack some methods, and that it takes bytes.
        self._kept: Any = HashStore()
        self._lock = threading.Lock()
        self._waits: list[KeyWait] = []
        super().set_timeout(_FOREVER)

    # Who reads.

    def get(self, key: str) -> bytes:
        (value,) = self.multi_get([key])
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        while True:
            self.wait(keys)
            with self._lock:
                # A key may have been deleted again.
                if self._kept.check(keys):
                    values: list[bytes] = self._kept.multi_get(keys)
                    return values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._check_forked()
        if not self._scheduler.is_rank:
            self._kept.wait(keys, *([] if timeout is None else [timeout]))
            return
        self._scheduler.step()
        given: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        timeout = None if given >= _FOREVER else given
        with self._lock:
            is_there = self._kept.check(keys)
            wait = KeyWait(keys)
            if not is_there:
                self._waits.append(wait)
        if is_there:
            # Whoever reads it again and again, until it changes, would never let the others come.
            self._scheduler.yield_turn()
            return
        try:
            arrived = self._scheduler.wait(wait, None if timeout is None else timeout.total_seconds())
        finally:
            with self._lock:
                if wait in self._waits:
                    self._waits.remove(wait)
        if not arrived:
            assert timeout is not None
            raise DistStoreError(
                f"gave up after a timeout of {timeout.total_seconds():g} s: nobody has set "
                f"{', '.join(repr(key) for key in keys if not self._kept.check([key]))} in the store"
            )

    def check(self, keys: list[str]) -> bool:
        self._look_again()
        return bool(self._kept.check(keys))

    def num_keys(self) -> int:
        self._look_again()
        return int(self._kept.num_keys())

    # Who writes.

    def set(self, key: str, value: _Value) -> None:
        self._step()
        self._kept.set(key, value)
        self._wake()

    def multi_set(self, keys: list[str], values: list[_Value]) -> None:
        self._step()
        for key, value in zip(keys, values, strict=True):
            self._kept.set(key, value)
        self._wake()

    def append(self, key: str, value: _Value) -> None:
        self._step()
        self._kept.append(key, value)
        self._wake()

    def add(self, key: str, amount: int) -> int:
        # To add nothing is to look.
        self._step() if amount else self._look_again()
        total: int = self._kept.add(key, amount)
        self._wake() if amount else None
        return total

    def compare_set(self, key: str, expected: _Value, desired: _Value) -> bytes:
        self._step()
        value: bytes = self._kept.compare_set(key, expected, desired)
        # One that stores nothing is a look.
        self._wake() if value == _as_bytes(desired) else self._look_again()
        return value

    def delete_key(self, key: str) -> bool:
        self._step()
        with self._lock:
            return bool(self._kept.delete_key(key))

    # By these names C++ looks for them.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SharedStore:
        return self

    def _check_forked(self) -> None:
        if self._scheduler.is_forked:
            raise forked()

    def _step(self) -> None:
        self._check_forked()
        if self._scheduler.is_rank:
            self._scheduler.step()

    def _look_again(self) -> None:
        """Whoever asks again and again would never let the others come."""
        self._check_forked()
        if self._scheduler.is_rank:
            self._scheduler.pause()

    def _wake(self) -> None:
        if self._scheduler.is_rank:
            self._scheduler.happened()
        with self._lock:
            arrived = [wait for wait in self._waits if self._kept.check(wait.keys)]
            for wait in arrived:
                self._waits.remove(wait)
                wait.ended = True
        for wait in arrived:
            self._scheduler.wake(wait)
