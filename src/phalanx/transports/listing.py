"""Objects that take part from now on, in an order: observers, and makers and wrappers of transports.

They are read without a lock, in the middle of anything: the tuple is replaced as a whole. Changes may come from any
thread, and from the garbage collector in the middle of another change; none is lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Listing"]

_Listed = TypeVar("_Listed")


class Listing(Generic[_Listed]):
    """Lives as long as the process."""

    def __init__(self) -> None:
        self._listed: tuple[_Listed, ...] = ()
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        """In a forked child, where a thread of the parent may hold the lock."""
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[_Listed]:
        return iter(self._listed)

    def __contains__(self, one: object) -> bool:
        return one in self._listed

    def change(self, make: Callable[[tuple[_Listed, ...]], tuple[_Listed, ...]]) -> None:
        """Replaces those that are listed by what `make` makes of them. It is called again after another change."""
        with self._lock:
            while True:
                before = self._listed
                after = make(before)
                if self._listed is before:
                    self._listed = after
                    return

    def remove(self, one: _Listed) -> None:
        self.change(lambda listed: tuple(other for other in listed if other is not one))
