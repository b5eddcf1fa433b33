"""Black boxes are read as they were written, also while they are written."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from boxes import EPOCH, NOBODY, RECORD_BYTES, RECORDS_OFFSET, SECOND, Call, box_of, collective, make_box, message

from phalanx import _native
from phalanx.debug import job_folder
from phalanx.debug.box_layout import NEWEST
from phalanx.debug.box_reader import read_box, read_header
from phalanx.debug.records import DIED, ENDED_WELL, FAILED, RUNNING, CallSite, GroupName, ending_of, is_alive

# Field 22 of what the system says of the process, then waits.
_SAY_START = """
import sys
print(open("/proc/self/stat").read().rpartition(") ")[2].split()[19], flush=True)
sys.stdin.read()
"""


def test_a_header_in_words() -> None:
    box = read_box(make_box(rank=3, world_size=8, pid=77, start=5, ending=2, capacity=4, program="/opt/train.py"))
    assert (box.rank, box.world_size, box.pid, box.start) == (3, 8, 77, 5)
    assert (box.ending, box.capacity, box.num_begun, box.program) == (FAILED, 4, 0, "/opt/train.py")
    assert (box.path, box.records, box.last_ns) == ("", [], 0)


def test_a_record_in_words() -> None:
    call = collective(
        "broadcast",
        7,
        state="failed",
        group="tp",
        desc="mesh_tp",
        rank=1,
        ranks=(4, 6),
        count=6,
        dtype="bfloat16",
        peer=0,
        at=2.5,
        took=0.5,
        line=12,
        function="step",
        filename="/opt/train.py",
        flags=1 | 2,
        sizes=(2, 3),
        timeout_ms=5000,
    )
    (record,) = box_of(call).records
    assert (record.number, record.state, record.op, record.seq) == (1, "failed", "broadcast", 7)
    assert record.group == GroupName("tp", "mesh_tp", 1, (4, 6))
    assert (record.group.rank_in_job(record.root), record.peer) == (4, -1)
    assert (record.count, record.dtype, record.reduce_op, record.timeout_ms) == (6, "bfloat16", None, 5000)
    assert (record.bytes_in, record.bytes_out, record.sizes, record.num_sizes) == (12, 12, (2, 3), 2)
    times = [EPOCH + int(seconds * SECOND) for seconds in (2.5, 2.5, 3.0)]
    assert [record.created_ns, record.started_ns, record.ended_ns] == times
    assert record.last_ns == times[-1]
    assert record.location == CallSite("/opt/train.py", 12, "step")
    assert (record.is_async, record.in_backward, record.by_reducer, record.is_list) == (True, True, False, False)
    assert not record.is_message


def test_what_has_not_happened_has_no_time() -> None:
    (scheduled, started) = box_of(Call(state="scheduled"), Call(state="started", seq=2)).records
    assert (scheduled.started_ns, scheduled.ended_ns, started.ended_ns) == (None, None, None)
    assert started.started_ns == EPOCH + SECOND


def test_what_is_not_known() -> None:
    (record,) = box_of(message("recv", -1, dtype=None, line=0)).records
    assert (record.location, record.dtype, record.peer, record.is_message) == (None, None, -1, True)


def test_a_place_in_the_working_folder_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CallSite(str(tmp_path / "train.py"), 20, "step").describe() == "train.py:20, in step"
    assert CallSite("/elsewhere/train.py", 20, "step").describe() == "/elsewhere/train.py:20, in step"


def test_of_many_sizes_the_first_are_kept() -> None:
    (record,) = box_of(Call(sizes=tuple(range(12)), listed=True)).records
    assert (record.num_sizes, record.sizes, record.is_list) == (12, tuple(range(8)), True)


def test_the_newest_records_in_order() -> None:
    box = box_of(*(Call(seq=seq) for seq in range(1, 7)), capacity=4)
    assert [record.number for record in box.records] == [3, 4, 5, 6]
    assert box.num_begun == 6


def test_a_record_that_is_being_written_is_left_out() -> None:
    data = make_box(Call(seq=1), Call(seq=2), Call(seq=3))
    struct.pack_into("<Q", data, RECORDS_OFFSET + RECORD_BYTES, 0)
    assert [record.seq for record in read_box(data).records] == [1, 3]


def test_a_record_that_is_being_marked_is_read() -> None:
    """Also after the process has died in the middle of it."""
    data = make_box(Call(seq=1), Call(seq=2), Call(seq=3))
    struct.pack_into("<Q", data, RECORDS_OFFSET + RECORD_BYTES, 2 | 1 << 63)
    assert [(record.number, record.seq) for record in read_box(data).records] == [(1, 1), (2, 2), (3, 3)]


def _read_one_after_another(monkeypatch: pytest.MonkeyPatch, *contents: bytes) -> None:
    """Each read of a first record gets the next of these; all others get the last."""
    reads = list(contents)

    def read(self: object, offset: int, size: int) -> bytes:
        is_first = offset == RECORDS_OFFSET and size >= RECORD_BYTES
        whole = reads.pop(0) if is_first and len(reads) > 1 else reads[-1] if is_first else contents[-1]
        return whole[offset : offset + size]

    monkeypatch.setattr(job_folder.Bytes, "read_at", read)


def _torn(box: bytes, other: bytes) -> bytes:
    """With the first record's number, and all else of the other's."""
    place = RECORDS_OFFSET + 8
    return box[:place] + other[place:]


def test_a_record_that_is_overwritten_meanwhile_is_not_mixed_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bytes(make_box(Call(seq=1), Call(seq=2), capacity=2))
    after = bytes(make_box(Call(seq=1), Call(seq=2), Call(seq=3, group="another"), capacity=2))
    _read_one_after_another(monkeypatch, _torn(before, after), after)
    found = [(record.number, record.seq, record.group.name) for record in read_box(before).records]
    assert found == [(2, 2, "default_pg"), (3, 3, "another")]


def test_a_record_that_changes_all_the_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [bytes(make_box(Call(seq=1, count=count), Call(seq=2), capacity=2)) for count in range(9)]
    _read_one_after_another(monkeypatch, *boxes)
    assert [record.seq for record in read_box(boxes[0]).records] == [2]


@pytest.mark.parametrize(
    ("field", "value"), [("state", 9), ("kind", 2), ("op", 200), ("reduce_op", -2), ("dtype", 254), ("failure", 7)]
)
def test_a_record_that_nobody_writes_is_left_out(field: str, value: int) -> None:
    data = make_box(Call(seq=1), Call(seq=2))
    NEWEST.record.pack_into(data, RECORDS_OFFSET, **{field: value})
    assert [record.seq for record in read_box(data).records] == [2]


def test_texts_that_are_damaged_are_not_known() -> None:
    data = make_box(Call())
    data[4096:RECORDS_OFFSET] = b"\xff" * (RECORDS_OFFSET - 4096)
    (record,) = read_box(data).records
    assert (record.group, record.location) == (GroupName("", "", -1, ()), None)


def test_a_group_without_ranks_has_those_of_the_world() -> None:
    (record,) = box_of(Call(ranks=()), world_size=3).records
    assert record.group.ranks == (0, 1, 2)


def test_a_file_and_its_bytes_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "1.box"
    path.write_bytes(make_box(Call(), ending=1))
    box = read_box(path)
    assert box.path == str(path)
    assert box.records == read_box(str(path)).records == read_box(memoryview(path.read_bytes())).records
    assert (read_header(path).ending, read_header(path).rank) == (ENDED_WELL, 0)


def _cut(data: bytearray) -> bytearray:
    return data[:-1]


def _older(data: bytearray) -> bytearray:
    data[8] = 7
    return data


def _damaged(data: bytearray) -> bytearray:
    data[20] = 64
    return data


def _foreign(data: bytearray) -> bytearray:
    return bytearray(b"\x7fELF") + data


def _empty(data: bytearray) -> bytearray:
    return bytearray()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut, r"expected a black box of \d+ bytes, got one that was cut"),
        (_older, "expected a black box of version 1, 2 or 3, got version 7"),
        (_damaged, "expected a black box, got one that is damaged: record_bytes is 64"),
        (_foreign, "expected a black box, got something else"),
        (_empty, "expected a black box, got something else"),
    ],
)
def test_what_is_no_box_is_refused_by_name(spoil: object, said: str, tmp_path: Path) -> None:
    assert callable(spoil)
    path = tmp_path / "1.box"
    path.write_bytes(spoil(make_box(Call())))
    with pytest.raises(ValueError, match=f"^{path}: {said}$"):
        read_box(path)


def test_what_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.box"):
        read_box("no.box")


def test_endings() -> None:
    pid, start = _native.own_identity()
    assert ending_of(box_of(pid=pid, start=start)) == RUNNING
    assert ending_of(box_of(pid=pid, start=start + 1)) == DIED
    assert ending_of(box_of()) == DIED
    assert ending_of(box_of(ending=1)) == ENDED_WELL
    assert ending_of(box_of(ending=2)) == FAILED


def test_a_process_is_alive_until_it_is_killed() -> None:
    program = [sys.executable, "-c", _SAY_START]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        start = int(process.stdout.readline())
        assert is_alive(process.pid, start)
        assert not is_alive(process.pid, start + 1)
        os.kill(process.pid, signal.SIGKILL)
        # Dead, and not collected.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(process.pid, start)
    assert not is_alive(*NOBODY)


def test_the_native_writer_writes_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "1.box"
    with path.open("wb+") as file:
        box = _native.BlackBox(file.fileno(), 8, 1, 2, "train.py")
    found = read_box(path)
    assert (found.rank, found.world_size, found.capacity, found.program) == (1, 2, 8, "train.py")
    assert (found.pid, found.start) == _native.own_identity()
    assert (found.records, ending_of(found)) == ([], RUNNING)
    group = box.remember_group("default_pg", 1, "0-1", description="all", identity="77")
    before = time.time_ns()
    total = _native.Description("all_reduce", reduce_op=4, dtype=12, count=6, sizes=(2, 3))
    send = _native.Description("send", peer=0, tag=9, dtype=12, count=6, sizes=[6])
    for number, (seq, call) in enumerate(((4, total), (7, send)), 1):
        found_number = box.begin(group, call, bytes_in=24, bytes_out=8, timeout=2.5, is_async=seq == 7)
        assert found_number == number
        box.number(number, seq)
        box.start(number)
    box.end(1, True)
    one, other = read_box(path).records
    assert one.group == other.group == GroupName("default_pg", "all", 1, (0, 1), "77")
    assert [(call.op, call.seq, call.state) for call in (one, other)] == [
        ("all_reduce", 4, "completed"),
        ("send", 7, "started"),
    ]
    assert (one.reduce_op, one.dtype, one.count, one.peer, one.sizes, one.is_list) == (
        "MAX",
        "float32",
        6,
        -1,
        (2, 3),
        False,
    )
    assert (one.bytes_in, one.bytes_out, one.timeout_ms, one.is_async) == (24, 8, 2500, False)
    assert (other.reduce_op, other.peer, other.tag, other.is_async, other.is_list) == (None, 0, 9, True, True)
    assert one.started_ns is not None
    assert one.ended_ns is not None
    # The two clocks are read one after the other when the box is made.
    assert before - SECOND < one.created_ns <= one.started_ns <= one.ended_ns < time.time_ns() + SECOND
    assert (other.ended_ns, one.location) == (None, other.location)
    assert read_header(path).ending == RUNNING


_WRITE = """
import select, sys
from phalanx import _native
with open(sys.argv[1], "wb+") as file:
    box = _native.BlackBox(file.fileno(), 2000, 0, 2, "")
number = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(100):
        number += 1
        group = box.remember_group(f"{number % 50}", 0, "0,1")
        call = _native.Description("all_reduce", reduce_op=0, dtype=12, count=number, tag=number)
        assert box.begin(group, call, bytes_in=number, bytes_out=number, timeout=1.0, is_async=False) == number
        box.number(number, number)
    if number == 100:
        print(flush=True)
"""


def test_a_box_that_is_written_meanwhile_is_read_record_by_record(tmp_path: Path) -> None:
    path = tmp_path / "1.box"
    program = [sys.executable, "-c", _WRITE, str(path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = set()
        for _ in range(20):
            for record in read_box(path).records:
                seen.add(record.number)
                assert record.count == record.tag == record.bytes_in == record.bytes_out == record.number
                assert record.group.name == str(record.number % 50)
        process.communicate()
    assert process.returncode == 0
    assert len(seen) > 2000
