"""Copies of calls in flight, found by the tensors and the memory that they come back to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch

from phalanx.memory import Region, region_of
from phalanx.transports.plain_memory import Pairs, StandIns
from phalanx.transports.regions import Entry, Regions
from phalanx.transports.written_memory import CallInFlight

__all__ = ["CallCopies", "CopyIndex"]


class CallCopies:
    """The copies of one call in flight. `CopiesInFlight` makes them and brings them back; others only look."""

    __slots__ = ("after", "are_back", "call", "error", "is_message", "number", "pairs", "remaining")

    def __init__(self, number: int, call: CallInFlight, pairs: Pairs, is_message: bool) -> None:
        self.number = number
        self.call: CallInFlight | None = call
        # All of them, and those that have yet to come back. None of either once all are back.
        self.pairs = pairs
        self.remaining: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(pairs)
        self.is_message = is_message
        # Of a message: those before it that share memory with it, as far as they are not back.
        self.after: list[CallCopies] = []
        self.are_back = False
        # What went wrong when they came back.
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether the call has ended."""
        call = self.call
        return call is None or call.is_over


class _View:
    """A tensor that copies come back to: which calls have one, by number, and its place among the call's pairs."""

    __slots__ = ("calls", "entry", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.calls: dict[int, tuple[CallCopies, int]] = {}
        # None: it has no elements.
        self.entry: Entry[_View] | None = None

    def newest(self) -> tuple[CallCopies, int] | None:
        """The last call whose copies have yet to come back."""
        return next((each for each in reversed(self.calls.values()) if not each[0].are_back), None)


class CopyIndex:
    """Not thread-safe. It may have copies that are back, and keeps no tensor."""

    __slots__ = ("_calls", "_regions", "_views")

    def __init__(self, calls: Iterable[CallCopies] = ()) -> None:
        self._calls: dict[int, list[_View]] = {}
        self._views: dict[Hashable, _View] = {}
        self._regions: Regions[_View] = Regions()
        for call in calls:
            self.add(call)

    def add(self, call: CallCopies) -> None:
        pairs = call.pairs
        # Where they come back from now on, the call is removed later.
        if call.are_back or call.number in self._calls:
            return
        views = self._calls[call.number] = []
        for place, (tensor, _) in enumerate(pairs):
            view = self._view_of(tensor)
            view.calls[call.number] = (call, place)
            views.append(view)

    def _view_of(self, tensor: torch.Tensor) -> _View:
        key = _key(tensor)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = _View(key)
            if tensor.numel():
                view.entry = self._regions.add(region_of(tensor), view)
        return view

    def remove(self, call: CallCopies) -> None:
        for view in self._calls.pop(call.number, ()):
            if view.calls.pop(call.number, None) is not None and not view.calls:
                del self._views[view.key]
                if view.entry is not None:
                    self._regions.remove(view.entry)

    def last_in_the_way(self, tensors: Sequence[torch.Tensor]) -> CallCopies | None:
        """The last call that has a copy of the memory of these tensors under another view."""
        views: list[_View] = []
        for tensor in tensors:
            if tensor.numel():
                own = self._views.get(_key(tensor))
                views += [view for view in self._regions.find(region_of(tensor)) if view is not own]
        return max(_newest(views), key=_number, default=None)

    def last_with_copy(self, region: Region) -> CallCopies | None:
        """The last call that has a copy of this memory."""
        return max(_newest(self._regions.find(region)), key=_number, default=None)

    def newest_sharing(self, tensors: Sequence[torch.Tensor]) -> list[CallCopies]:
        """The last call of each view that has memory in common with these tensors."""
        regions = [region_of(tensor) for tensor in tensors if tensor.numel()]
        return _newest([view for region in regions for view in self._regions.find(region)])

    def stand_ins(self, tensors: Sequence[torch.Tensor]) -> StandIns:
        """Of the very tensors that calls have copies of."""
        found = {}
        for tensor in tensors:
            view = self._views.get(_key(tensor))
            newest = None if view is None else view.newest()
            if newest is not None:
                call, place = newest
                # Another thread may bring them back meanwhile.
                pairs = call.pairs
                if pairs:
                    found[id(tensor)] = pairs[place][1]
        return found


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


def _newest(views: Iterable[_View]) -> list[CallCopies]:
    return [newest[0] for view in views if (newest := view.newest()) is not None]


def _number(call: CallCopies) -> int:
    return call.number
