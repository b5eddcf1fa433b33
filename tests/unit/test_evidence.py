"""However much there is in the folders of a job, only so much of it is kept."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from boxes import Call, box_of, make_box
from jobs import SIX

from phalanx.commands import main
from phalanx.debug import evidence
from phalanx.debug.box_reader import read_box
from phalanx.debug.box_texts import Room
from phalanx.debug.evidence import read_boxes, read_text
from phalanx.debug.job_folder import JobFolder


def _give_room(monkeypatch: pytest.MonkeyPatch, **most: int) -> None:
    monkeypatch.setattr(evidence, "Room", functools.partial(Room, **most))


def test_every_box_has_its_share_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several folders are one job."""
    _give_room(monkeypatch, most_records=10)
    folders = [tmp_path / "one", tmp_path / "other"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for rank in range(2):
            (folder / f"{rank}.box").write_bytes(make_box(*SIX, rank=2 * number + rank))
    (folders[1] / "strange.box").write_text("?")
    boxes, problems = read_boxes(*folders)
    assert [[record.seq for record in box.records] for box in boxes] == [[5, 6]] * 4
    assert problems == [f"{folders[1]}/strange.box: expected a black box, got something else"]


def test_so_many_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "_MOST_BOXES", 3)
    for rank in range(5):
        (tmp_path / f"{rank}.box").write_bytes(make_box(*SIX, rank=rank, world_size=5))
    boxes, problems = read_boxes(tmp_path)
    assert [box.rank for box in boxes] == [0, 1, 2]
    assert problems == ["2 black boxes, more than a report has room for"]


def test_lists_of_ranks_are_kept_once_and_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest groups have the room."""
    _give_room(monkeypatch, most_ranks=8)
    calls = [Call(group=f"g{number}", ranks=(0, number), rank=0, at=1.0 + number) for number in range(1, 7)]
    for rank in range(2):
        (tmp_path / f"{rank}.box").write_bytes(make_box(*calls, rank=rank, world_size=7))
    boxes, problems = read_boxes(tmp_path)
    for box in boxes:
        assert [record.group.name for record in box.records] == ["", "", "g3", "g4", "g5", "g6"]
    one, other = (box.records[-1].group.ranks for box in boxes)
    assert one is other
    assert problems == [
        f"{tmp_path}/{rank}.box: calls of 2 groups, more than a report has room for" for rank in range(2)
    ]


def test_texts_are_kept_once_and_only_so_many_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [Call(filename=f"{number}{'x' * 99}", function="f", group="g", at=1.0 + number) for number in range(4)]
    room = Room(most_letters=220)
    box, again = (read_box(make_box(*calls), room=room) for _ in range(2))
    assert [record.location is not None for record in box.records] == [False, False, True, True]
    assert [record.group.name for record in box.records] == ["g"] * 4
    assert box.records == again.records
    one, other = (each.records[-1].location for each in (box, again))
    assert one is not None
    assert other is not None
    assert one.filename is other.filename


def test_a_box_can_t_name_more_ranks_than_a_report_shows() -> None:
    """The groups have the same ranks, so that their list is kept once: a dump would write it for each group."""
    ranks = tuple(range(1000))
    box = box_of(*(Call(group=f"g{number}", ranks=ranks) for number in range(260)), capacity=260)
    assert box.num_left_out == 10
    assert [record.group.rank for record in box.records] == [-1] * 10 + [0] * 250


def test_one_report_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
        os.utime(tmp_path / f"{number}.txt", ns=(10 - number, 10 - number))
    (tmp_path / "5.txt").symlink_to("/dev/zero")
    read: list[str] = []
    real = JobFolder.read

    def count(folder: JobFolder, name: str, most: int | None = None) -> bytes:
        read.append(name)
        return real(folder, name, most)

    monkeypatch.setattr(JobFolder, "read", count)
    written, problems = read_text(tmp_path)
    assert (written, read) == (("4.txt", "text 4", 4), ["4.txt"])
    assert problems == [f"{tmp_path}/5.txt: expected a regular file, got something else"]


def test_a_few_of_the_files_that_are_left_out_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0.box").write_bytes(make_box(*SIX, ending=1, world_size=1))
    for number in range(30):
        (tmp_path / f"{number}.strange.box").write_text("?")
    assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "expected a black box, got something else" in line]) == 20
    assert "  left out: 10 more files like these" in lines
