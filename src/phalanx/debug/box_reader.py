"""Reads black boxes: each record once, from where the last read has stopped.

`_core/black_box.hpp` says how a box is written, `box_layout` where its fields are. The process of a box may go on
writing while it is read:

- The header says how many records were begun. Record n has slot (n - 1) % capacity, so it may give way to record
  n + capacity, and nobody writes to it but to mark how far its call has come.
- The process writes one record at a time: the id in the slot becomes 0, the number of records goes up, the record is
  written, and it gets its id. So the newest record may be incomplete, and the oldest ones may be about to give way.
  Only these few are read a second time. A record that is the same both times was read whole: what overwrites it has
  changed its id before anything else.
- Texts are written before the records that refer to them, and only grow. So they are read after the records.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields

from phalanx import _native
from phalanx.debug.box_layout import FORMATS, HEADER_BYTES, NUMBERS
from phalanx.debug.box_parsing import Sizes, parse_header, parse_record
from phalanx.debug.box_texts import Room, Texts
from phalanx.debug.job_folder import Bytes, File, open_file
from phalanx.debug.records import Box, Header, Record

__all__ = ["BoxReader", "Source", "read_box", "read_header"]

Source = File | str | os.PathLike[str] | bytes | bytearray | memoryview

_NUMBER = struct.Struct("<Q")
# Of a box that has more, the newest records are read, a part at a time.
_MOST_RECORDS = 100_000
_RECORDS_AT_ONCE = 4096
# Records that may be about to give way, beyond those that were begun: a new record leaves out places that are being
# marked, one per thread that marks.
_MARGIN = 64
# How often a record that changes is read before it is left for the next time.
_ATTEMPTS = 3
_FINAL = (_native.STATE_COMPLETED, _native.STATE_FAILED)
# Of the last byte of an id, what belongs to the number.
_LAST_BYTE = NUMBERS >> 56
# What is known of a record that is not there yet.
_NOTHING = b""


def read_box(source: Source, most: int | None = None, room: Room | None = None) -> Box:
    """With its newest records only, where `most` says how many. Raises ValueError for what is no box, and OSError.

    Boxes that are kept at the same time share a `room`.
    """
    with _opened(source) as data:
        reader = BoxReader(data, most, room)
        return reader.box_of(reader.read_new())


def read_header(source: Source) -> Header:
    """Raises ValueError for what is no box, and OSError."""
    with _opened(source) as data:
        return parse_header(data.path, data.read_at(0, HEADER_BYTES))[0]


class BoxReader:
    """Follows a box that is open. Works for boxes of living and dead processes, and for copies.

    `most` is how many records one read gives at most, the newest ones. Raises ValueError for what is no box, or was
    cut, and OSError.
    """

    def __init__(self, data: File | Bytes, most: int | None = None, room: Room | None = None) -> None:
        room = room or Room()
        self._data = data
        self.header, sizes = parse_header(data.path, data.read_at(0, HEADER_BYTES))
        self._layout = FORMATS[self.header.version]
        self._first = HEADER_BYTES + sizes.arena
        self._most = min(room.records_per_box, _MOST_RECORDS if most is None else most)
        self._texts = Texts(self._layout.group, room)
        self._no_record = bytes(self._layout.record.size)
        places = self._layout.record.places
        self._fields = {name: (struct.Struct(f"<{places[name][1]}"), places[name][0]) for name in ("state", "ended")}
        # The number of the newest record that was looked at; None: nothing was read.
        self._position: int | None = None
        # Records to look at again, as they were: of calls in flight, and those that were not there yet.
        self._open: dict[int, bytes] = {}
        # Records that gave way to others before they were read, or for which a read had no room.
        self.num_missed = 0
        # Records that were read while their calls were in flight, and gave way before the calls had ended.
        self.num_lost = 0
        expected = self._first + self.header.capacity * self._layout.record.size
        if not data.read_at(expected - 1, 1):
            raise ValueError(f"{self._name}: expected a black box of {expected} bytes, got one that was cut")

    @property
    def position(self) -> int:
        """The number of the newest record that was looked at; 0: none."""
        return self._position or 0

    @property
    def num_awaited(self) -> int:
        """Records that were begun and were not there yet: being written, or left out by the writer."""
        return sum(data == _NOTHING for data in self._open.values())

    def read_new(self) -> list[Record]:
        """The records that were begun since the last read, and those that have changed since, by ascending number."""
        begun = self._read_num_begun()
        found = dict(self._read_first(begun) if self._position is None else self._read_since(begun))
        self._position = max(begun, *found, self._position or 0) if found else max(begun, self._position or 0)
        self._refresh()
        # The newest ones first: theirs is the room for texts.
        offset = self.header.clock_offset_ns
        numbers = sorted(found, reverse=True)
        records = [parse_record(self._layout, found[number], self._texts, offset) for number in numbers]
        return [record for record in reversed(records) if record is not None]

    def box_of(self, records: Iterable[Record]) -> Box:
        """What the box says now, with these records."""
        known = {each.name: getattr(self.header, each.name) for each in fields(Header)}
        records = list(records)
        return Box(
            **known,
            records=[record for record in records if not record.is_making],
            makings=[record for record in records if record.is_making],
            num_left_out=self._texts.num_left_out,
        )

    @property
    def _name(self) -> str:
        return self._data.path or "these bytes"

    def _read_num_begun(self) -> int:
        offset, _ = self._layout.header.places["next"]
        data = self._data.read_at(offset, _NUMBER.size)
        if len(data) < _NUMBER.size:
            raise self._is_being_cut()
        number: int = _NUMBER.unpack(data)[0]
        return number

    def _refresh(self) -> None:
        """Reads the header and the texts that have been added."""
        self.header, sizes = parse_header(self._data.path, self._data.read_at(0, HEADER_BYTES))
        self._texts.take_in(self._read_texts(sizes), self.header.world_size)

    def _read_texts(self, sizes: Sizes) -> bytes:
        known = self._texts.num_bytes
        return self._data.read_at(HEADER_BYTES + known, max(0, sizes.used - known))

    def _read_first(self, begun: int) -> Iterator[tuple[int, bytes]]:
        """Whatever records there are, also where a damaged header says otherwise."""
        capacity = self.header.capacity
        slots = _newest_slots(capacity, begun, self._most)
        num_awaited = sum(end - begin for begin, end in slots)
        read = dict(self._read_whole(slots, begun))
        begun_since = self._read_num_begun()
        for slot, data in read.items():
            # The newest record that has this slot by what the header said first; below 1: none has.
            expected = begun - (begun - 1 - slot) % capacity
            number = _number(data)
            if begun < number <= begun_since:
                # The next read gives it.
                number = 0
                self.num_missed += expected > 0
            elif expected > 0 and number < expected:
                self._open[expected] = _NOTHING
            if number:
                self._keep_if_open(number, data)
                yield number, data
        self.num_missed += max(0, begun - num_awaited)

    def _read_since(self, begun: int) -> Iterator[tuple[int, bytes]]:
        capacity, position = self.header.capacity, self.position
        first = max(position, begun - min(capacity, self._most)) + 1
        self.num_missed += max(0, first - 1 - position)
        wanted: dict[int, int] = {}
        # The writer leaves out a slot that is being marked: an older record may be there in place of the new one.
        older: dict[int, int] = {}
        for number in [*sorted(self._open), *range(first, begun + 1)]:
            slot = (number - 1) % capacity
            if slot in older:
                self._give_up(older[slot])
            if slot in wanted:
                older[slot] = wanted[slot]
            wanted[slot] = number
        for slot, data in self._read_whole(_ranges(sorted(wanted)), begun):
            expected, number = wanted[slot], _number(data)
            if slot in older and number != older[slot]:
                self._give_up(older[slot])
            if number > expected:
                self._give_up(expected)
            elif number < expected:
                self._open.setdefault(expected, _NOTHING)
            if number in (expected, older.get(slot)) and self._open.get(number) != data:
                self._keep_if_open(number, data)
                yield number, data

    def _give_up(self, number: int) -> None:
        """Counts a record that gave way."""
        if self._open.pop(number, _NOTHING) == _NOTHING:
            self.num_missed += 1
        else:
            self.num_lost += 1

    def _keep_if_open(self, number: int, data: bytes) -> None:
        """A call that has ended is not marked any more."""
        if self._value("state", data) in _FINAL and self._value("ended", data):
            self._open.pop(number, None)
        else:
            self._open[number] = data

    def _value(self, name: str, data: bytes) -> int:
        layout, offset = self._fields[name]
        value: int = layout.unpack_from(data, offset)[0]
        return value

    def _read_whole(self, ranges: list[tuple[int, int]], begun: int) -> Iterator[tuple[int, bytes]]:
        """What these slots hold, without the bit for marking; `_no_record` where there is none, or it kept changing."""
        capacity = self.header.capacity
        read = dict(self._read_slots(ranges))
        oldest = self._read_num_begun() + _MARGIN - capacity
        doubtful = [slot for slot, data in read.items() if not oldest < _number(data) < begun]
        again = dict(self._read_slots(_ranges(doubtful)))
        for slot, data in read.items():
            if slot in again:
                data = self._settle_on(slot, data, again[slot])
            # A record has its slot by its number.
            number = _number(data)
            if number and (number - 1) % capacity == slot:
                is_marked = data[_NUMBER.size - 1] > _LAST_BYTE
                yield slot, _NUMBER.pack(number) + data[_NUMBER.size :] if is_marked else data
            else:
                yield slot, self._no_record

    def _settle_on(self, slot: int, data: bytes, again: bytes) -> bytes:
        """What was read twice alike."""
        for _ in range(_ATTEMPTS):
            if again == data:
                return data
            data = again
            ((_, again),) = self._read_slots([(slot, slot + 1)])
        return self._no_record

    def _read_slots(self, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        size = self._layout.record.size
        for begin, end in ranges:
            for first in range(begin, end, _RECORDS_AT_ONCE):
                num = min(_RECORDS_AT_ONCE, end - first)
                data = self._data.read_at(self._first + first * size, num * size)
                if len(data) < num * size:
                    raise self._is_being_cut()
                for index in range(num):
                    record = data[index * size : (index + 1) * size]
                    # Slots without a record take no memory.
                    yield first + index, record if _number(record) else self._no_record

    def _is_being_cut(self) -> ValueError:
        return ValueError(f"{self._name}: expected a black box, got one that is being cut")


def _number(data: bytes) -> int:
    number: int = _NUMBER.unpack_from(data)[0]
    return number & NUMBERS


def _newest_slots(capacity: int, begun: int, most: int) -> list[tuple[int, int]]:
    """Ranges of slots that have the newest records."""
    if capacity <= most:
        return [(0, capacity)]
    if begun <= most:
        return [(0, most)]
    end = begun % capacity
    begin = end - most
    return [(begin, end)] if begin >= 0 else [(begin + capacity, capacity), (0, end)]


def _ranges(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending slots as ranges."""
    ranges: list[tuple[int, int]] = []
    for slot in slots:
        if ranges and ranges[-1][1] == slot:
            ranges[-1] = (ranges[-1][0], slot + 1)
        else:
            ranges.append((slot, slot + 1))
    return ranges


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[File | Bytes]:
    if isinstance(source, str | os.PathLike):
        with open_file(source) as file:
            yield file
    else:
        yield source if isinstance(source, File) else Bytes(source)
