"""A reader that follows a box: it gives what is new, once, and says what it has missed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from boxes import RECORD_BYTES, RECORDS_OFFSET, Call, make_box

from phalanx.debug.box_reader import BoxReader, read_box
from phalanx.debug.job_folder import Bytes, open_file


class _Growing:
    """A box that a test exchanges for a later one, and what is read of it."""

    path = ""

    def __init__(self, *calls: Call, capacity: int = 4) -> None:
        self._capacity = capacity
        self.reads: list[tuple[int, int]] = []
        self.become(*calls)

    def become(self, *calls: Call) -> None:
        self._data = bytes(make_box(*calls, capacity=self._capacity))

    def read_at(self, offset: int, size: int) -> bytes:
        self.reads.append((offset, size))
        return self._data[offset : offset + size]


def _reader(box: _Growing, most: int | None = None) -> BoxReader:
    return BoxReader(box, most)  # type: ignore[arg-type]


def _seqs(reader: BoxReader) -> list[int]:
    return [record.seq for record in reader.read_new()]


def _calls(num: int) -> list[Call]:
    return [Call(seq=seq) for seq in range(1, num + 1)]


def test_new_records_are_given_once() -> None:
    box = _Growing(*_calls(2))
    reader = _reader(box)
    assert _seqs(reader) == [1, 2]
    assert _seqs(reader) == []
    box.become(*_calls(5))
    assert _seqs(reader) == [3, 4, 5]
    assert (reader.position, reader.num_missed, reader.num_lost) == (5, 0, 0)


@pytest.mark.parametrize("num", [7, 8, 11, 12, 13])
def test_records_that_gave_way_are_counted(num: int) -> None:
    box = _Growing(*_calls(3))
    reader = _reader(box)
    assert _seqs(reader) == [1, 2, 3]
    box.become(*_calls(num))
    seen = _seqs(reader)
    assert seen == list(range(num - 3, num + 1))
    assert reader.num_missed == num - 4 - 3


def test_records_that_gave_way_before_the_first_read_are_counted() -> None:
    reader = _reader(_Growing(*_calls(9)))
    assert _seqs(reader) == [6, 7, 8, 9]
    assert reader.num_missed == 5


def test_a_read_gives_the_newest_records_that_it_has_room_for() -> None:
    box = _Growing(*_calls(2), capacity=8)
    reader = _reader(box, most=3)
    assert _seqs(reader) == [1, 2]
    box.become(*_calls(7))
    assert _seqs(reader) == [5, 6, 7]
    assert reader.num_missed == 2


def test_a_call_is_given_again_when_it_has_come_further() -> None:
    box = _Growing(Call(seq=1), Call(seq=2, state="scheduled"))
    reader = _reader(box)
    states = []
    for state in ("scheduled", "scheduled", "started", "started", "completed", "completed"):
        box.become(Call(seq=1), Call(seq=2, state=state))
        states.append([(record.seq, record.state) for record in reader.read_new()])
    assert states == [[(1, "completed"), (2, "scheduled")], [], [(2, "started")], [], [(2, "completed")], []]


def test_a_call_in_flight_whose_record_gave_way_is_lost() -> None:
    box = _Growing(Call(seq=1, state="started"), Call(seq=2))
    reader = _reader(box)
    assert _seqs(reader) == [1, 2]
    box.become(Call(seq=1, state="started"), *_calls(6)[1:])
    assert _seqs(reader) == [3, 4, 5, 6]
    assert (reader.num_missed, reader.num_lost) == (0, 1)


def test_a_record_that_is_being_written_is_given_later() -> None:
    calls = _calls(3)
    data = make_box(*calls, capacity=4)
    whole = bytes(data)
    data[RECORDS_OFFSET + 2 * RECORD_BYTES : RECORDS_OFFSET + 2 * RECORD_BYTES + 8] = bytes(8)
    box = _Growing()
    box._data = bytes(data)
    reader = _reader(box)
    assert _seqs(reader) == [1, 2]
    assert reader.num_awaited == 1
    assert _seqs(reader) == []
    box._data = whole
    assert _seqs(reader) == [3]
    assert (reader.num_awaited, reader.num_missed) == (0, 0)


def test_a_record_that_never_came_is_missed_when_its_slot_has_another() -> None:
    data = make_box(*_calls(3), capacity=4)
    data[RECORDS_OFFSET + 2 * RECORD_BYTES : RECORDS_OFFSET + 2 * RECORD_BYTES + 8] = bytes(8)
    box = _Growing()
    box._data = bytes(data)
    reader = _reader(box)
    assert _seqs(reader) == [1, 2]
    box.become(*_calls(7))
    assert _seqs(reader) == [4, 5, 6, 7]
    assert (reader.num_awaited, reader.num_missed) == (0, 1)


def test_a_record_in_whose_place_the_writer_left_an_older_one() -> None:
    """It was being marked when its turn came: the writer left out the slot and number 5."""
    size = RECORD_BYTES
    box = _Growing(Call(seq=1, state="started"), *_calls(4)[1:])
    reader = _reader(box)
    assert _seqs(reader) == [1, 2, 3, 4]
    later = make_box(*_calls(6), capacity=4)
    for state, expected in (("started", [6]), ("completed", [1]), ("completed", [])):
        mark = 1 << 63 if state == "started" else 0
        first = make_box(Call(seq=1, state=state), capacity=4)[RECORDS_OFFSET : RECORDS_OFFSET + size]
        first[:8] = (1 | mark).to_bytes(8, "little")
        later[RECORDS_OFFSET : RECORDS_OFFSET + size] = first
        box._data = bytes(later)
        assert _seqs(reader) == expected
    assert (reader.num_awaited, reader.num_missed, reader.num_lost) == (1, 0, 0)
    box.become(*_calls(9))
    assert _seqs(reader) == [7, 8, 9]
    # Number 5.
    assert (reader.num_awaited, reader.num_missed, reader.num_lost) == (0, 1, 0)


def test_what_is_known_is_not_read_again() -> None:
    num = 1000
    box = _Growing(*_calls(num), capacity=2000)
    reader = _reader(box)
    reader.read_new()
    # Once, and the newest one a second time.
    assert sum(size for offset, size in box.reads if offset >= RECORDS_OFFSET and size > 1) == 2001 * RECORD_BYTES
    box.become(*_calls(num), Call(seq=1001, group="another"))
    box.reads.clear()
    (record,) = reader.read_new()
    assert record.group.name == "another"
    assert sum(size for offset, size in box.reads if offset >= RECORDS_OFFSET) == 2 * RECORD_BYTES
    texts = sum(size for offset, size in box.reads if 4096 <= offset < RECORDS_OFFSET)
    assert 0 < texts < 200


def test_texts_are_made_once() -> None:
    box = _Growing(*_calls(1))
    reader = _reader(box)
    (first,) = reader.read_new()
    box.become(*_calls(2))
    (second,) = reader.read_new()
    assert first.group is second.group
    assert first.location is second.location


@pytest.mark.parametrize("version", [1, 2, 3])
def test_boxes_of_all_versions_are_followed(version: int) -> None:
    data = [make_box(*_calls(num), capacity=4, version=version) for num in (2, 6)]
    box = _Growing()
    box._data = bytes(data[0])
    reader = _reader(box)
    assert _seqs(reader) == [1, 2]
    box._data = bytes(data[1])
    assert _seqs(reader) == [3, 4, 5, 6]
    # Record 1 and 2 have given way, and were read.
    assert reader.num_missed == 0


def test_a_reader_and_a_whole_read_give_the_same() -> None:
    data = make_box(*_calls(9), Call(seq=10, state="started"), capacity=6)
    reader = BoxReader(Bytes(data))
    assert reader.box_of(reader.read_new()) == read_box(data)


_WRITE = """
import sys
from phalanx import _native
with open(sys.argv[1], "wb+") as file:
    box = _native.BlackBox(file.fileno(), int(sys.argv[2]), 0, 2, "")
print(flush=True)
in_flight = []
for number in range(1, int(sys.argv[3]) + 1):
    group = box.remember_group(f"{number % 50}", 0, "0,1")
    call = _native.Description("all_reduce", reduce_op=0, dtype=12, count=number, tag=number)
    assert box.begin(group, call, bytes_in=number, bytes_out=number, timeout=1.0, is_async=False) == number
    box.number(number, number)
    box.start(number)
    in_flight.append(number)
    if len(in_flight) > 5:
        box.end(in_flight.pop(0), True)
for number in in_flight:
    box.end(number, True)
"""


@pytest.mark.parametrize(("capacity", "num"), [(200, 30_000), (2000, 30_000), (50_000, 30_000)])
def test_a_box_that_is_written_meanwhile_is_followed(capacity: int, num: int, tmp_path: Path) -> None:
    """Each record is seen once and completes once, or is counted."""
    path = tmp_path / "1.box"
    program = [sys.executable, "-c", _WRITE, str(path), str(capacity), str(num)]
    begun: set[int] = set()
    completed: set[int] = set()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(program, stdout=subprocess.PIPE))
        assert process.stdout is not None
        process.stdout.readline()
        reader = BoxReader(stack.enter_context(open_file(path)))
        is_over = False
        while not is_over:
            # First: what the process has written last is read then.
            is_over = process.poll() is not None
            for record in reader.read_new():
                number = record.number
                assert record.count == record.tag == record.bytes_in == record.bytes_out == number
                assert record.seq in (number, 0 if record.state == "scheduled" else number)
                assert record.group.name == str(number % 50)
                assert number not in completed
                begun.add(number)
                if record.state == "completed":
                    assert record.ended_ns is not None
                    completed.add(number)
    assert process.returncode == 0
    assert reader.position == num
    assert reader.num_awaited == 0
    assert len(begun) + reader.num_missed == num
    assert len(completed) + reader.num_lost == len(begun)
    assert set(range(num - min(capacity, num) + 1, num + 1)) <= completed
    if capacity > num:
        assert (reader.num_missed, reader.num_lost) == (0, 0)
