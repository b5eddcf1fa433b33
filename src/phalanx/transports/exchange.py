"""One rank's talk with the others through a store, while a group is made. Errors of the store become ours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

from phalanx.durations import read_limit
from phalanx.errors import CallTimeout, GroupError, PhalanxError
from phalanx.transports import limits
from phalanx.transports.hello import UnreadableError, count_of
from phalanx.types import GroupInfo, Store

__all__ = ["Exchange", "Key", "Watcher"]

# Seconds between two looks into the store, which grow, and between two looks at what may have become of a rank.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
_FIRST_LOOK, _BETWEEN_LOOKS = 0.01, 0.25

_Value = TypeVar("_Value")


class Key(NamedTuple):
    """A key in the store, and the rank of the group that writes it; negative: any may."""

    name: str
    rank: int = -1


class Watcher(Protocol):
    """Looks after those who have to say something."""

    def check(self, keys: list[Key]) -> None:
        """Between any two looks into the store: raises to end the wait."""

    def look(self, keys: list[Key], waited: float) -> None:
        """Likewise, a closer look, every quarter of a second."""

    def absent(self, keys: list[Key]) -> CallTimeout:
        """The error for those who did not come in time."""


class Exchange:
    def __init__(self, store: Store, info: GroupInfo, timeout: float, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when the store fails: it may know of a reason, and raise it."""
        self._store = store
        self._info = info
        self._limit = min(timeout, _timeout_of(store))
        self._deadline = time.monotonic() + self._limit
        self._on_failure = on_failure

    def set(self, key: str, value: str) -> None:
        with self._asking():
            self._store.set(key, value)

    def has(self, *keys: str) -> bool:
        with self._asking():
            return self._store.check(list(keys))

    def read(self, keys: list[Key], parse: Callable[[bytes], _Value]) -> list[_Value]:
        """The values of keys that are there."""
        with self._asking():
            values = self._store.multi_get([key.name for key in keys])
        return [self._parsed(key, value, parse) for key, value in zip(keys, values, strict=True)]

    def find(self, key: Key, parse: Callable[[bytes], _Value]) -> _Value | None:
        """The value of a key; None where nobody has set it."""
        return self.read([key], parse)[0] if self.has(key.name) else None

    def count(self, key: Key) -> int:
        return self.find(key, count_of) or 0

    def claim(self, key: Key, value: str) -> bool:
        """Sets the key unless somebody else has. False: somebody else has."""
        with self._asking():
            there: bytes = self._store.compare_set(key.name, "", value)
        return there == value.encode()

    @property
    def limit(self) -> float:
        """Seconds for all waits together."""
        return self._limit

    def wait(self, keys: list[Key], watcher: Watcher) -> None:
        """Returns when all keys are there."""
        # Polling keeps Ctrl-C working, which a store's own wait does not.
        names, pause = [key.name for key in keys], _FIRST_PAUSE
        began = time.monotonic()
        next_look = began + _FIRST_LOOK
        while not self.has(*names):
            watcher.check(keys)
            now = time.monotonic()
            if now >= next_look:
                watcher.look(keys, now - began)
                next_look = now + _BETWEEN_LOOKS
            if now > self._deadline:
                absent = self.missing(keys)
                if absent:
                    raise watcher.absent(absent)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def missing(self, keys: list[Key]) -> list[Key]:
        return [key for key in keys if not self.has(key.name)]

    def remove_with_last(self, counter: str, keys: Iterable[str]) -> None:
        """The last of the ranks that calls this removes the keys, which nobody reads any more."""
        # The group is made: a store that has gone with its rank, or has no removal, does no harm any more. A counter
        # that others wrote must not be added to: a TCPStore would end the connection.
        with contextlib.suppress(RuntimeError, ValueError):
            if self._store.check([counter]):
                count_of(self._store.multi_get([counter])[0])
            if self._store.add(counter, 1) == self._info.size:
                for key in [*keys, counter]:
                    self._store.delete_key(key)

    def _parsed(self, key: Key, value: bytes, parse: Callable[[bytes], _Value]) -> _Value:
        try:
            return parse(value)
        except UnreadableError as error:
            whose = f" of {self._info.describe(key.rank)}" if key.rank >= 0 else ""
            raise self.error(
                "GROUP:STORE_KEY",
                f"did not understand the key {key.name!r}{whose} in the store: {error}",
                "look for what else uses this store: another job or program on the same MASTER_ADDR and MASTER_PORT "
                "(or file), another group of the same name, or another version of Phalanx on some ranks",
            ) from None

    def error(self, code: str, text: str, hint: str) -> GroupError:
        return GroupError(text, code=code, group=self._info.name, rank=self._info.rank, hint=hint)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """While the store is asked: what it raises when it is gone, most likely with the rank that hosts it."""
        try:
            yield
        except PhalanxError:
            # It says what is wrong by itself, as the store of ranks that are threads does in a forked child.
            raise
        except RuntimeError as error:
            limit = limits.find_in_text(str(error))
            if limit is not None:
                raise limits.group_error(self._info, "the store's client", error, limit) from error
            self._on_failure()
            raise self.error(
                "GROUP:STORE",
                f"the store failed while the group was being made: {error}",
                "look for an error on the rank that hosts the store, usually rank 0",
            ) from error


def _timeout_of(store: Store) -> float:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    return read_limit(timeout)
