"""The copies through which the calls of a group write to tensors that do not lie in plain memory.

`CopiesInFlight` owns the copies of the calls that have not brought them back: it decides which copies come back and in
which order, and brings them back. Calls ask it; it knows only their native handles.

Who may come in between: other threads; a signal handler, between two instructions of Python; the garbage collector,
anywhere, in a thread that holds any lock; a fork. Hence:

- One lock per group, held while copies come back, so that no thread goes on before copies that it asked for are back.
  A thread may take it again. Calls without copies never take it.
- Copying back is one call into C (`_bring_back`). A handler that interrupts before or after it, and brings back copies
  itself, finds them all back, or none of the rest.
- The copies of dropped calls come back without a wait for the lock (`bring_back_dropped`): if another thread has it, or
  this thread was interrupted while it had it, the holder brings them back before it goes on.
- The records of calls change by single operations of C. Each new call with copies asks which calls in flight concern
  its memory; an index finds them without a look at the others. A thread takes the index out of its list while it uses
  it. Another thread or a signal handler that finds the list empty makes an index of its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count, starmap
from typing import Protocol, TypeVar

import torch

from phalanx import _native
from phalanx.memory import region_of
from phalanx.transports.copy_index import CallCopies, CopyIndex
from phalanx.transports.plain_memory import Pairs, StandIns
from phalanx.transports.written_memory import CallInFlight, WrittenMemory

__all__ = ["CallCopies", "CopiesInFlight"]

_T = TypeVar("_T")
_FOREVER = -1.0
_GONE = object()


class Counter(Protocol):
    """Knows how many calls have copies that are not back."""

    def count_copies(self, change: int) -> None: ...


class CopiesInFlight:
    """The copies of one group's calls in flight, and the memory that the core writes for its collectives.

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

    __slots__ = (
        "__weakref__",
        "_collectives",
        "_counter",
        "_dropped",
        "_is_busy",
        "_lock",
        "_messages",
        "_numbers",
        "_written",
    )

    def __init__(self, counter: Counter | None = None) -> None:
        self._counter = counter
        self._numbers = count(1)
        self._collectives = _Indexed()
        self._messages = _Indexed()
        self._written = WrittenMemory()
        # Held while copies come back; `_is_busy` is set meanwhile.
        self._lock = threading.RLock()
        self._is_busy = False
        # Copies of calls that have ended and that nobody waits for.
        self._dropped: deque[CallCopies] = deque()
        _all.add(self)

    @property
    def has_collectives(self) -> bool:
        """Whether a collective has copies that are not back."""
        return bool(self._collectives.calls)

    @property
    def has_writers(self) -> bool:
        """Whether a collective in flight may write to anything."""
        return bool(self._collectives.calls or self._written)

    def add(self, call: CallInFlight, pairs: Pairs, *, is_message: bool = False) -> CallCopies:
        """The copies of a call or a message that has begun."""
        copies = CallCopies(next(self._numbers), call, pairs, is_message)
        if is_message:
            tensors = [tensor for tensor, _ in pairs]
            copies.after = self._messages.look(partial(CopyIndex.newest_sharing, tensors=tensors))
        if self._counter is not None:
            self._counter.count_copies(1)
        (self._messages if is_message else self._collectives).add(copies)
        return copies

    def add_writing(self, call: CallInFlight, written: Sequence[tuple[int, int]]) -> None:
        """A collective that has begun. The core writes the memory between these addresses."""
        self._written.add(call, written)

    def bring_back(self, copies: CallCopies) -> None:
        """Brings back the copies of a call that has ended, and before them those that must come first."""
        if copies.are_back:
            return
        try:
            with self._lock:
                self._bring_back_in_order([copies])
        finally:
            self._bring_back_all_dropped()

    def bring_back_ended(self, *, messages: bool = True) -> None:
        """Brings back the copies of all calls that have ended."""
        if not (self._collectives.calls or (messages and self._messages.calls)):
            return
        try:
            with self._lock:
                while (first := self._collectives.first()) is not None and first.is_over:
                    self._bring_back_in_order([first])
                if messages:
                    self._bring_back_in_order([each for each in self._messages.all() if each.is_over])
        finally:
            self._bring_back_all_dropped()

    def bring_back_dropped(self, copies: CallCopies) -> None:
        """`bring_back` for a call that nobody waits for. Never waits: the garbage collector may come here."""
        self._dropped.append(copies)
        self._bring_back_all_dropped()

    def make_way(self, tensors: Iterable[torch.Tensor]) -> StandIns:
        """Before a call with these tensors: what they hold, or will hold when the calls before have ended.

        A call that takes the very same tensor as one before can use the copy, which the core reads and writes in order.
        One that takes another view of the same memory waits until the copy is back in it.
        """
        tensors = list(tensors)
        self.bring_back_ended(messages=False)
        while (copies := self._collectives.look(partial(CopyIndex.last_in_the_way, tensors=tensors))) is not None:
            self._wait_and_bring_back(copies)
        return self._collectives.look(partial(CopyIndex.stand_ins, tensors=tensors))

    def catch_up(self, tensors: Iterable[torch.Tensor]) -> None:
        """Before these tensors are read here: waits for the collectives in flight that write to them."""
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            region = region_of(tensor)
            for call in self._written.writers(region):
                call.wait(_FOREVER)
            copies = self._collectives.look(partial(CopyIndex.last_with_copy, region=region))
            if copies is not None:
                self._wait_and_bring_back(copies)

    def forget_all(self) -> None:
        """In a forked child, which has none of the calls. A thread that it does not have may have held the lock."""
        self._lock = threading.RLock()
        self._is_busy = False
        self._collectives = _Indexed()
        self._messages = _Indexed()
        self._dropped.clear()
        self._written.forget_all()

    def _wait_and_bring_back(self, copies: CallCopies) -> None:
        """For the sake of another call. A failure is raised by waits for this call."""
        call = copies.call
        if call is not None:
            call.wait(_FOREVER)
        # Collectives end in order: those before it have ended, too.
        self.bring_back(copies)

    def _bring_back_all_dropped(self) -> None:
        """A thread that has held the lock comes here afterwards, for dropped calls that found the lock held."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._is_busy:
                    # This thread was interrupted while it had the lock, and comes here again.
                    return
                self._bring_back_in_order(_take_first(self._dropped))
            finally:
                self._lock.release()

    def _bring_back_in_order(self, calls: Sequence[CallCopies]) -> None:
        """With the lock. These calls have ended."""
        was_busy, self._is_busy = self._is_busy, True
        try:
            for copies in calls:
                if copies.is_message:
                    # Messages end in any order, and only those that write the same memory are kept in order.
                    earlier = _earlier(copies)
                    for each in earlier:
                        if each.is_over:
                            self._bring_back(each)
                    copies.after = [each for each in earlier if not each.are_back]
                else:
                    # Collectives end in order.
                    while not copies.are_back and (first := self._collectives.first()) is not None:
                        if first is copies or not first.is_over:
                            break
                        self._bring_back(first)
                self._bring_back(copies)
        finally:
            self._is_busy = was_busy

    def _bring_back(self, copies: CallCopies) -> None:
        call = copies.call
        if call is not None and call.result == _native.FINISHED:
            try:
                # Writing in inference mode neither asks for grad nor refuses inference tensors.
                with torch.inference_mode():
                    # Taking a pair and copying it must be one step for signal handlers: they would write it again
                    # later, after copies that must come after it.
                    deque(starmap(torch.Tensor.copy_, copies.remaining), maxlen=0)
            except Exception as error:
                copies.error = error
        copies.are_back = True
        copies.pairs = []
        copies.remaining = iter(())
        # A call that is over does not keep the group's memory mapped.
        copies.call = None
        waiting = self._messages if copies.is_message else self._collectives
        if waiting.remove(copies) and self._counter is not None:
            self._counter.count_copies(-1)


class _Indexed:
    """Calls whose copies are not back, in order, and an index of them."""

    __slots__ = ("_back", "_index", "_new", "calls")

    def __init__(self) -> None:
        self.calls: OrderedDict[CallCopies, None] = OrderedDict()
        # What the index has yet to take in, and to leave out.
        self._new: deque[CallCopies] = deque()
        self._back: deque[CallCopies] = deque()
        # Empty while a thread uses it.
        self._index = [CopyIndex()]

    def add(self, copies: CallCopies) -> None:
        self.calls[copies] = None
        self._new.append(copies)
        if self._back:
            # They would pile up where each call ends before the next one is made.
            self.look(lambda index: None)

    def remove(self, copies: CallCopies) -> bool:
        """False: they were removed before."""
        if self.calls.pop(copies, _GONE) is _GONE:
            return False
        self._back.append(copies)
        return True

    def first(self) -> CallCopies | None:
        while True:
            try:
                return next(iter(self.calls), None)
            except RuntimeError:
                # Another thread has added one in between.
                continue

    def all(self) -> list[CallCopies]:
        return list(self.calls)

    def look(self, find: Callable[[CopyIndex], _T]) -> _T:
        """What `find` finds in the index."""
        try:
            index = self._index.pop()
        except IndexError:
            return find(CopyIndex(self.all()))
        try:
            while self._new:
                index.add(self._new.popleft())
            while self._back:
                index.remove(self._back.popleft())
            return find(index)
        except BaseException:
            # Interrupted, maybe while the index changed.
            index = CopyIndex(self.all())
            raise
        finally:
            self._index.append(index)


def _take_first(queue: deque[CallCopies]) -> list[CallCopies]:
    """Empty where a signal handler has just taken it."""
    try:
        return [queue.popleft()]
    except IndexError:
        return []


def _earlier(message: CallCopies) -> list[CallCopies]:
    """The messages before this one that have yet to write the same memory, in order."""
    found: dict[int, CallCopies] = {}
    rest = list(message.after)
    while rest:
        each = rest.pop()
        if each.number not in found:
            found[each.number] = each
            rest += each.after
    return [found[number] for number in sorted(found) if not found[number].are_back]


_all: weakref.WeakSet[CopiesInFlight] = weakref.WeakSet()


def _forget_in_child() -> None:
    for each in list(_all):
        each.forget_all()


os.register_at_fork(after_in_child=_forget_in_child)
