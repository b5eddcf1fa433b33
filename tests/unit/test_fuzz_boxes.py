"""Files that somebody has tampered with exhaust neither memory nor time, and print printable text only."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from boxes import Call, make_box
from jobs import SIX, process, report

from phalanx import CallTimeout, PeerLost
from phalanx.commands import main
from phalanx.debug.answers import Whereabouts
from phalanx.debug.records import GroupName
from phalanx.printable import printable, printable_lines

# Some of each kind; `make soak` runs thousands.
_CASES = 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_random_cases(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).parent / "fuzz_boxes.py"), "0", str(_CASES), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, f"{_CASES} cases\n"), done.stdout + done.stderr[-3000:]


def test_printable() -> None:
    assert printable("naïve — 日本") == "naïve — 日本"
    assert printable("a\x1b[31mb\x07\x9b\u202e\n\udcff") == "a\\x1b[31mb\\x07\\x9b\\u202e\\n\\udcff"
    assert printable_lines("a\tb\n\x1b[2Jc\n") == "a\tb\n\\x1b[2Jc\n"


@pytest.mark.parametrize("suffix", ["box", "txt"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "dangling", "folder"])
def test_what_is_no_file_is_left_out_by_name(
    kind: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1.box").write_bytes(make_box(*SIX, ending=1, world_size=1))
    odd = tmp_path / f"odd.{suffix}"
    if kind == "fifo":
        os.mkfifo(odd)
    elif kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to("/dev/zero" if kind == "zero" else tmp_path / "nowhere")
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path.name}: 1 rank, ended well"
    (left_out,) = [line for line in lines if "left out" in line]
    assert left_out == f"  left out: {odd}: expected a regular file, got something else"


@pytest.mark.parametrize(
    ("offset", "value", "said"),
    [
        (52, 0x7FFFFFFF, "world_size is 2147483647"),
        (12, 0xFFFFFFFF, "capacity is 4294967295"),
        (16, 0xFFFFFFF0, "arena_bytes is 4294967280"),
        (12, 0, "capacity is 0"),
    ],
)
def test_sizes_that_nobody_has_written(
    offset: int, value: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_box(Call())
    data[offset : offset + 4] = value.to_bytes(4, "little")
    (tmp_path / "1.box").write_bytes(data)
    assert main(["report", str(tmp_path)]) == 2
    problem = f"{tmp_path}/1.box: expected a black box, got one that is damaged: {said}"
    assert capsys.readouterr().err.splitlines()[1] == f"  {problem}"


def test_more_groups_than_a_report_has_room_for() -> None:
    """Each has all the ranks that a group can have."""
    made = process(0, *SIX)
    (record, *_) = made.box.records
    ranks = tuple(range(1024))
    made.box.records = [replace(record, group=GroupName(f"g{number}", "", 0, ranks)) for number in range(300)]
    lines = report(made)
    assert lines[1] == "  left out: 56 groups, more than a report has room for"
    assert len(lines) < 50


def test_texts_of_peers_in_errors_are_printable() -> None:
    error = PeerLost("rank 1 raised \x1b[2JValueError\nsecond line", group="\x1b]0;x\x07", rank=0, hint="\x07")
    assert str(error) == (
        "[PEER_LOST] group '\\x1b]0;x\\x07', rank 0: rank 1 raised \\x1b[2JValueError\nsecond line\n  Next: \\x07"
    )
    assert "\x1b" not in str(CallTimeout("in train\x1b.py"))
    assert Whereabouts.unpack("1\ntrain\x1b.py:1\nf\x9b") == Whereabouts(True, "train\\x1b.py:1", ["f\\x9b"])
