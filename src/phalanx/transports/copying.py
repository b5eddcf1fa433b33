"""What calls in flight will write, and the copies through which they write to tensors of any form.

Each new call with copies asks which calls in flight concern its memory. `regions` finds them without a look at the
others, so thousands of calls may be in flight.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

import torch

from phalanx.memory import Region, region_of
from phalanx.transports.plain_memory import Copies, StandIns
from phalanx.transports.regions import Entry, Regions

__all__ = ["CallWithCopies", "Copying"]

# Held for a moment, while the records below are read or changed; nothing waits meanwhile.
_looking = threading.RLock()


class CallInFlight(Protocol):
    """A collective."""

    @property
    def is_over(self) -> bool: ...
    def wait_and_finish(self) -> None: ...


class CallWithCopies(Protocol):
    """A collective or a message."""

    copies: Copies

    @property
    def is_message(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    def wait_and_finish(self) -> None: ...
    def finish(self) -> None: ...


class HasCopies(Protocol):
    """Who is told how many calls have copies that have yet to come back."""

    copies: int


class _Nobody:
    copies = 0


class Copying:
    """What the collectives of a group that are in flight will write, and the copies of messages.

    The core carries out the collectives of a group in order, so that all it reads and writes is in order. Two things
    happen at other times, in Python: a call copies tensors that do not lie in plain memory when it is made, and what it
    wrote to copies of its outputs comes back when a thread looks, after it has ended. Hence the invariant: as long as a
    collective is in flight, all memory that the core writes for it is recorded (`add_writing`), copies included, and
    all tensors that its copies come back to (`add`). A thread that is about to read memory here (`catch_up`), or to
    hand memory to the core (`make_way`), waits for the calls that have yet to write it. What calls read needs no
    record: only the core writes it before they have ended, in order, and copies, which come back in the order of the
    calls.

    Messages and other groups are in no order with these calls: a program waits before it uses their tensors elsewhere.
    """

    __slots__ = ("_messages", "_written", "calls", "writing")

    def __init__(self, front: HasCopies | None = None) -> None:
        # Collectives with copies, until what they wrote is where it belongs; and messages.
        self.calls = _Waiting(front or _Nobody())
        self._messages = _Waiting(front or _Nobody())
        # Collectives, and the memory that the core writes for them, as addresses from and to. Not kept by this. Ordered
        # by address in `_written` only when a call has to look: plain calls do not.
        self.writing: deque[tuple[weakref.ref[CallInFlight], Sequence[tuple[int, int]]]] = deque()
        self._written = _Written()

    @property
    def has_calls(self) -> bool:
        """Whether a collective is in flight that writes to anything."""
        return bool(self.calls or self.writing or self._written)

    def add(self, call: CallWithCopies) -> None:
        """A call or a message with copies, which is in flight."""
        (self._messages if call.is_message else self.calls).add(call)

    def add_writing(self, call: CallInFlight, written: Sequence[tuple[int, int]]) -> None:
        """A collective that is in flight."""
        writing = self.writing
        if writing and _is_over(writing[0][0]):
            with _looking:
                while writing and _is_over(writing[0][0]):
                    writing.popleft()
        writing.append((weakref.ref(call), written))

    def settle(self, messages: bool = True) -> None:
        """Copies back what calls have written that have ended."""
        while (call := self.calls.first()) is not None and call.ended:
            _finish(call, self.calls)
        for message in self._messages.all() if messages else ():
            if message.ended:
                _finish(message, self._messages)

    def settle_before(self, call: CallWithCopies) -> None:
        """Copies back what calls before this one have written: the order is that of the calls."""
        if call.is_message:
            # Messages end in any order, and only those that write the same memory must be kept in order.
            for message in self._messages.before(call):
                if message.ended:
                    _finish(message, self._messages)
            return
        # Collectives end in order.
        while (first := self.calls.first()) is not None and first is not call and first.ended:
            _finish(first, self.calls)

    def forget(self, call: CallWithCopies) -> None:
        (self._messages if call.is_message else self.calls).forget(call)

    def make_way(self, tensors: Iterable[torch.Tensor]) -> StandIns:
        """Before a call with these tensors: what they hold, or will hold when the calls before have ended.

        A call that takes the very same tensor as one before can use the copy, which the core reads and writes in order.
        One that takes another view of the same memory waits until the copy is back in it.
        """
        tensors = list(tensors)
        self.settle(messages=False)
        while (call := self.calls.last_in_the_way(tensors)) is not None:
            # Collectives end in order: those before it have ended, too.
            call.wait_and_finish()
            self.settle(messages=False)
        return self.calls.copies_of(tensors)

    def catch_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Before these tensors are read here: waits for the collectives in flight that write to them."""
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            region = region_of(tensor)
            for writer in self._written.writers(region, self.writing):
                writer.wait_and_finish()
            # Collectives end in order, and so do their copies come back.
            call = self.calls.last_with_copy(region)
            if call is not None:
                call.wait_and_finish()


class _View:
    """A tensor that copies come back to: which copy the core works on, and of which calls, by number."""

    __slots__ = ("calls", "copy", "entry", "key")

    copy: torch.Tensor

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.calls: dict[int, CallWithCopies] = {}
        # None: it has no elements.
        self.entry: Entry[_View] | None = None


class _Waiting:
    """Calls whose copies have yet to come back, in order, and the tensors that they come back to."""

    __slots__ = ("_calls", "_front", "_num", "_regions", "_views")

    def __init__(self, front: HasCopies) -> None:
        self._front = front
        self._num = 0
        self._calls: OrderedDict[CallWithCopies, tuple[int, list[_View]]] = OrderedDict()
        self._views: dict[Hashable, _View] = {}
        self._regions: Regions[_View] = Regions()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: CallWithCopies) -> None:
        with _looking:
            self._num += 1
            views = [self._take(tensor, copy) for tensor, copy in call.copies]
            for view in views:
                view.calls[self._num] = call
            self._calls[call] = self._num, views
            self._front.copies += 1

    def _take(self, tensor: torch.Tensor, copy: torch.Tensor) -> _View:
        key = _key(tensor)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = _View(key)
            if tensor.numel():
                view.entry = self._regions.add(region_of(tensor), view)
        view.copy = copy
        return view

    def forget(self, call: CallWithCopies) -> None:
        with _looking:
            number, views = self._calls.pop(call, (0, []))
            if number:
                self._front.copies -= 1
            for view in views:
                if view.calls.pop(number, None) is not None and not view.calls:
                    del self._views[view.key]
                    if view.entry is not None:
                        self._regions.remove(view.entry)

    def first(self) -> CallWithCopies | None:
        with _looking:
            return next(iter(self._calls), None)

    def all(self) -> list[CallWithCopies]:
        with _looking:
            return list(self._calls)

    def before(self, call: CallWithCopies) -> list[CallWithCopies]:
        """Those before this one that have copies of the same memory, in order."""
        with _looking:
            number, views = self._calls.get(call, (0, []))
            regions = [view.entry.region for view in views if view.entry is not None]
            found: dict[int, CallWithCopies] = {}
            for region in regions:
                for view in self._regions.find(region):
                    found |= view.calls
            return [found[each] for each in sorted(found) if each < number]

    def last_in_the_way(self, tensors: list[torch.Tensor]) -> CallWithCopies | None:
        """The last one that has a copy of the memory of these tensors under another view."""
        with _looking:
            if not self._calls:
                return None
            views: list[_View] = []
            for tensor in tensors:
                if tensor.numel():
                    own = self._views.get(_key(tensor))
                    views += [view for view in self._regions.find(region_of(tensor)) if view is not own]
            return _last(views)

    def last_with_copy(self, region: Region) -> CallWithCopies | None:
        """The last one that has a copy of this memory."""
        with _looking:
            return _last(self._regions.find(region))

    def copies_of(self, tensors: list[torch.Tensor]) -> StandIns:
        with _looking:
            if not self._calls:
                return {}
            views = [(tensor, self._views.get(_key(tensor))) for tensor in tensors]
            return {id(tensor): view.copy for tensor, view in views if view is not None}


class _Written:
    """Memory that the core writes for collectives in flight, ordered by address."""

    __slots__ = ("_entries", "_regions")

    def __init__(self) -> None:
        self._regions: Regions[weakref.ref[CallInFlight]] = Regions()
        self._entries: deque[tuple[weakref.ref[CallInFlight], list[Entry[weakref.ref[CallInFlight]]]]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def writers(
        self, region: Region, more: deque[tuple[weakref.ref[CallInFlight], Sequence[tuple[int, int]]]]
    ) -> list[CallInFlight]:
        """Those that write to this memory; `more` are taken in first."""
        with _looking:
            while self._entries and _is_over(self._entries[0][0]):
                for entry in self._entries.popleft()[1]:
                    self._regions.remove(entry)
            while more:
                reference, written = more.popleft()
                entries = [
                    self._regions.add((start, end, end - start, []), reference) for start, end in written if start < end
                ]
                self._entries.append((reference, entries))
            calls = (reference() for reference in self._regions.find(region))
            return [call for call in calls if call is not None]


def _key(tensor: torch.Tensor) -> Hashable:
    """The same for tensors that are the same numbers in the same memory."""
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_neg(),
        tensor.is_conj(),
    )


def _last(views: list[_View]) -> CallWithCopies | None:
    calls = [next(reversed(view.calls.items())) for view in views if view.calls]
    return max(calls, key=lambda each: each[0])[1] if calls else None


def _finish(call: CallWithCopies, waiting: _Waiting) -> None:
    call.finish()
    waiting.forget(call)


def _is_over(reference: weakref.ref[CallInFlight]) -> bool:
    call = reference()
    return call is None or call.is_over


def _renew_lock() -> None:
    global _looking
    _looking = threading.RLock()


# A thread that a forked child does not have may have held it.
os.register_at_fork(after_in_child=_renew_lock)
