"""Folders of boxes that somebody has tampered with, and what `phalanx report` and `phalanx dump` make of them.

Run as a program, with the first seed, the number of cases and a folder: each case in this one process, with little
memory. Stops at the first case that raises, takes too long, keeps much more than its files hold, or prints what a
terminal would obey.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import shutil
import signal
import struct
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from boxes import ARENA_BYTES, RECORDS_OFFSET, Call, collective, make_box, message

from phalanx.commands import main, report
from phalanx.debug.box_layout import FORMATS, NEWEST, Format
from phalanx.reporters.text import report_lines

_CAPACITY = 8
_SECONDS = 30
_BYTES = 1024 * 1024 * 1024
# What a report may keep: so much, and so many times what its files take on the disk.
_KEPT_BYTES = 24 * 1024 * 1024
_KEPT_FACTOR = 16
_BAD = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2028\r"
# Groups of earlier versions, and what is no text that a group or a place refers to.
_TEXTS = [
    _BAD,
    "0-9999999999",
    ",".join(["0-1023"] * 50),
    "-3--1",
    "1-0,,x",
    "dp\x1f\x1f0\x1f0-9999999999",
    "dp\x1f\x1f0\x1f" + ",".join(["0-1023"] * 50),
    "dp\x1f\x1f99999999999999999999\x1f0,1",
    "dp\x1f\x1f-5\x1f-3--1",
    "dp\x1f\x1f0\x1f1-0,,x",
    f"{_BAD}\x1f{_BAD}\x1f0\x1f0,1\x1f{_BAD}",
    f"{_BAD}.py\x1f12\x1f{_BAD}",
    "a.py\x1f" + "9" * 5000 + "\x1ff",
]


def _healthy(dice: random.Random, rank: int) -> bytearray:
    calls = [collective("all_reduce", seq, identity="11", at=float(seq)) for seq in range(1, dice.randint(2, 10))]
    calls.append(collective("barrier", 11, state=dice.choice(["scheduled", "started", "failed"]), failure="lost"))
    calls.append(message("recv", dice.choice([-1, 0, 1]), state="started"))
    calls.append(Call(seq=1, group="tp", ranks=(1, 0), rank=rank, state="started"))
    version = dice.choice([1, 2, NEWEST.version, NEWEST.version])
    ending = dice.randint(0, 2)
    return make_box(*calls, rank=rank, capacity=_CAPACITY, ending=ending, deaths=[(3.0, 77, 1, 9)], version=version)


def _format_of(data: bytearray) -> Format:
    """By its header, which may be damaged."""
    at, code = NEWEST.header.places["version"]
    version = struct.unpack_from(f"<{code}", data, at)[0] if len(data) > at + 4 else 0
    return FORMATS.get(version, NEWEST)


def _pack(data: bytearray, at: int, code: str, value: object) -> None:
    if len(data) >= at + struct.calcsize(code):
        values = value if isinstance(value, tuple) else (value,)
        struct.pack_into(f"<{code}", data, at, *values)


def _value(dice: random.Random, code: str) -> object:
    if code.endswith("s"):
        return bytes(dice.choices(range(256), k=struct.calcsize(code)))
    if code == "d":
        return dice.choice([0.0, -1.0, float("nan"), float("inf")])
    if code == "?":
        return dice.choice([False, True])
    if len(code) > 1:
        return tuple(_value(dice, code[-1]) for _ in range(int(code[:-1])))
    bits = 8 * struct.calcsize(code)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if code.islower() else (0, 2**bits - 1)
    near = [low, high, 0, 1, -1, 2, 127, 1024, 1025, 4096, 2**31 - 1, 2**30, dice.randint(low, high)]
    return min(max(dice.choice(near), low), high)


def _change_field(dice: random.Random, data: bytearray) -> None:
    layout = _format_of(data)
    places = [(layout.header, 0), (layout.record, RECORDS_OFFSET + dice.randrange(_CAPACITY) * layout.record.size)]
    if layout.death is not None:
        number = dice.randrange(16)
        places.append((layout.death, layout.header.places["deaths"][0] + number * layout.death.size))
    if layout.group is not None:
        # Of some record.
        at = RECORDS_OFFSET + dice.randrange(_CAPACITY) * layout.record.size + layout.record.places["group"][0]
        group = struct.unpack_from("<I", data, at)[0] if len(data) >= at + 4 else 0
        places.append((layout.group, 4096 + group))
    fields, at = dice.choice(places)
    offset, code = fields.places[dice.choice(fields.names)]
    _pack(data, at + offset, code, _value(dice, code))


def _change_text(dice: random.Random, data: bytearray) -> None:
    """All records refer to it, or to groups of which all texts are this one."""
    layout = _format_of(data)
    text = dice.choice(_TEXTS).encode()
    arena = bytearray(b"\0" + text + b"\0")
    group = 1
    if layout.group is not None:
        group = len(arena) + -len(arena) % 4
        arena = arena.ljust(group + layout.group.size, b"\0")
        texts = [name for name in layout.group.names if name != "rank"]
        for name in dice.sample(texts, dice.randint(1, len(texts))):
            layout.group.pack_into(arena, group, **{name: 1})
    data[4096 : 4096 + len(arena)] = arena
    for slot in range(_CAPACITY):
        for name, offset in (("group", group), ("location", 1)):
            _pack(data, RECORDS_OFFSET + slot * layout.record.size + layout.record.places[name][0], "I", offset)


def _fill_arena(dice: random.Random, data: bytearray) -> None:
    """Thousands of groups of a thousand ranks each, and records that name them."""
    if _format_of(data).group is None:
        text = b"".join(b"%x\x1f\x1f0\x1f0-1023\0" % number for number in range(ARENA_BYTES // 20))
        data[4096 : 4096 + 1 + len(text)] = b"\0" + text
        return
    ranks = b"\0" + b"0-1023\0"
    assert NEWEST.group is not None
    group = bytearray(NEWEST.group.size)
    NEWEST.group.pack_into(group, 0, name=1, ranks=1)
    data[4096 : 4096 + ARENA_BYTES] = (ranks + group * (ARENA_BYTES // len(group)))[:ARENA_BYTES]


def _name_many(dice: random.Random, data: bytearray) -> None:
    """A box of many records, each of which names a group of a thousand ranks, and a place, of its own."""
    num = 1500
    calls = [Call(at=1.0 + number) for number in range(num)]
    data[:] = make_box(*calls, capacity=num, rank=dice.randrange(2), version=dice.choice([2, NEWEST.version]))
    layout = _format_of(data)
    arena = bytearray(b"\0")

    def add(text: str) -> int:
        arena.extend(text.encode() + b"\0")
        return len(arena) - len(text.encode()) - 1

    for slot in range(num):
        # A letter of four bytes makes all of them that wide.
        place = add(f"{slot:x}\U0001f600{chr(1) * dice.choice([1, 90])}\x1f1\x1ff")
        ranks = f"0-{dice.randint(900, 1022)},{slot}"
        if layout.group is None:
            group = add(f"{slot:x}\x1f\x1f0\x1f{ranks}")
        else:
            made = bytearray(layout.group.size)
            layout.group.pack_into(made, 0, name=add(f"{slot:x}"), ranks=add(ranks))
            arena.extend(bytes(-len(arena) % 4))
            group = len(arena)
            arena.extend(made)
        if len(arena) > ARENA_BYTES:
            break
        layout.record.pack_into(data, RECORDS_OFFSET + slot * layout.record.size, group=group, location=place)
    data[4096 : 4096 + ARENA_BYTES] = arena[:ARENA_BYTES].ljust(ARENA_BYTES, b"\0")


def _cut(dice: random.Random, data: bytearray) -> None:
    del data[dice.randrange(len(data) + 1) :]


def _scribble(dice: random.Random, data: bytearray) -> None:
    for _ in range(dice.randint(1, 40)):
        if data:
            data[dice.choice([dice.randrange(len(data)), dice.randrange(min(len(data), 2000))])] = dice.randrange(256)


def _grow(dice: random.Random, data: bytearray) -> None:
    """Much more capacity than there are records: the rest of the file is a hole."""
    if len(data) >= 16:
        struct.pack_into("<I", data, NEWEST.header.places["capacity"][0], dice.choice([100, 10_000_000, 2**32 - 1]))


_CHANGES: list[Callable[[random.Random, bytearray], None]] = [
    _change_field,
    _change_field,
    _change_field,
    _change_text,
    _fill_arena,
    _cut,
    _scribble,
    _grow,
]


def _odd_file(dice: random.Random, path: Path) -> None:
    kind = dice.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to("/dev/zero")
    elif kind == 2:
        path.symlink_to(path.parent / "nowhere")
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        path.write_text(_BAD * 10)
    else:
        with open(path, "wb") as file:
            file.truncate(2**40)


def make_case(seed: int, folder: Path) -> None:
    dice = random.Random(seed)
    for rank in range(2):
        data = _healthy(dice, rank)
        if dice.random() < 0.02:
            _name_many(dice, data)
        for _ in range(dice.choice([0, 1, 1, 2, 5])):
            dice.choice(_CHANGES)(dice, data)
        path = folder / f"{rank}.box"
        path.write_bytes(data)
        if dice.random() < 0.2:
            os.truncate(path, len(data) + 2**34)
    if dice.random() < 0.5:
        _odd_file(dice, folder / dice.choice(["2.box", "\x1b[31mred.box", "rank0-1.txt", "\x1b[2J.txt"]))
    if dice.random() < 0.02:
        for number in range(600):
            with open(folder / f"rank{number}-2.txt", "wb") as file:
                file.truncate(65536)
    (folder / "rank1-1.txt").write_text(dice.choice(["all is well", _BAD, "line\n" * 10_000, "x" * 300_000]))


def run_case(seed: int, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    make_case(seed, folder)
    for verb in (["report", str(folder)], ["dump", str(folder), "--out", str(folder / "out")]):
        out, err = io.StringIO(), io.StringIO()
        # Of CPU time: the machine may be busy with other things.
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _counted(folder):
            status = main(verb)
        signal.setitimer(signal.ITIMER_PROF, 0)
        said = out.getvalue() + err.getvalue()
        assert status in (0, 2), status
        assert said
        assert all(letter.isprintable() or letter == "\n" for letter in said), repr(said)
        for path in folder.iterdir():
            # What is odd is named, and left out.
            is_odd = path.is_symlink() or path.is_fifo()
            assert not is_odd or path.suffix == ".txt" or path.name.strip("\x1b") in said, (path, said)


@contextlib.contextmanager
def _counted(folder: Path) -> Iterator[None]:
    """Counts what a report is made of."""
    files = {status.st_ino: status.st_blocks * 512 for status in map(os.lstat, folder.iterdir())}

    def count(*args: Any) -> list[str]:
        kept = kept_bytes(args)
        assert kept <= _KEPT_BYTES + _KEPT_FACTOR * sum(files.values()), f"{kept} bytes of {sum(files.values())}"
        return report_lines(*args)

    with unittest.mock.patch.object(report, "report_lines", count):
        yield


def kept_bytes(root: object) -> int:
    """Of an object and of all that it holds. It is counted, not measured: the same in every run."""
    total, seen, todo = 0, set(), [root]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            todo += each
        else:
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += [getattr(each, name) for name in slots if hasattr(each, name)]
    return total


def _limit_memory() -> None:
    (used,) = [int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line]
    resource.setrlimit(resource.RLIMIT_AS, (used * 1024 + _BYTES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    _limit_memory()
    first, num = int(sys.argv[1]), int(sys.argv[2])
    for number in range(first, first + num):
        try:
            run_case(number, Path(sys.argv[3]) / "job")
        except BaseException:
            print(f"case {number}", flush=True)
            raise
    print(f"{num} cases")
