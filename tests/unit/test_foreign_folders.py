"""What another user puts in the way of a job: folders, links and files that this user must not write to or believe.

The files really belong to another user where this process can give them away (`users.py`). Else the process itself
becomes another user, as far as the code can tell: it asks for the effective user.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from boxes import Call, make_box

from phalanx.commands import main, report
from phalanx.debug import folders, observing, own_box
from phalanx.debug.folders import Membership
from phalanx.debug.own_box import OwnBox
from phalanx.errors import PeerLost
from phalanx.types import GroupInfo
from users import ANOTHER, can_be_another, give_away, seem_given_away

INFO = GroupInfo(name="pair", rank=1, size=2)
JOB = "job-20300101-000000-1-abcd"
Give = Callable[..., None]


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_FOLDER", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Makes things belong to another user."""

    def pretend(*paths: Path) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    return give_away if can_be_another() else pretend


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnBox]:
    """The black box of this process, for one test."""
    monkeypatch.setattr(own_box._holder, "own", OwnBox())
    yield own_box.own_box()
    own_box.own_box().end()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def _planted(tmp_path: Path) -> Path:
    folder = tmp_path / JOB
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def _fail(rank: int = 1) -> None:
    observing._Watching().failed(PeerLost("rank 0 died", group="pair", rank=rank, op="barrier", seq=1))


def test_a_report_does_not_go_through_a_link_in_a_folder_of_another_user(
    tmp_path: Path, own: OwnBox, victim: Path, give: Give
) -> None:
    planted = _planted(tmp_path)
    for number in range(1, 4):
        (planted / f"rank1-{number}.txt").symlink_to(victim)
    give(planted, *planted.iterdir())
    own.make(INFO, str(planted))
    own.rank = 1
    _fail()
    assert victim.read_text() == "precious"
    assert {path.name for path in planted.iterdir()} == {f"rank1-{number}.txt" for number in range(1, 4)}
    assert own.folder != planted


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, own: OwnBox, base: Path) -> None:
    planted = _planted(tmp_path)
    own.make(INFO, str(planted))
    assert list(planted.iterdir()) == []
    assert own.folder is not None
    assert own.folder.parent == base


def test_a_folder_that_is_not_a_job_s_is_not_used(tmp_path: Path, own: OwnBox, victim: Path, base: Path) -> None:
    """The last process of a job removes its boxes and reports: not those of any folder that a store names."""
    notes = tmp_path / "notes"
    notes.mkdir(mode=0o700)
    (notes / "diary.txt").write_text("mine")
    for name in (str(notes), "notes", "", "/", "..", f"{tmp_path}/{JOB}/..", "a\0b", "x" * 5000):
        own.make(INFO, name)
        assert own.folder is not None
        assert own.folder.parent == base
        own.end()
        own.box = None
    assert [path.name for path in notes.iterdir()] == ["diary.txt"]


def test_a_link_to_a_job_folder_is_not_followed(tmp_path: Path, own: OwnBox, base: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    link = tmp_path / JOB
    link.symlink_to(tmp_path / "elsewhere")
    own.make(INFO, str(link))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_why_an_offered_folder_is_not_used_is_logged_once(
    tmp_path: Path, own: OwnBox, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planted = _planted(tmp_path)
    with caplog.at_level(logging.WARNING, "phalanx"):
        own.make(INFO, str(planted))
        own.make(INFO, str(planted))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the job folder that rank 0 offers can't be used: {planted}: others can write to it (mode 0777); "
        f"the black box of this process is in {own.folder}"
    )


def test_what_the_store_offers_is_logged_as_printable_text(
    tmp_path: Path, own: OwnBox, caplog: pytest.LogCaptureFixture
) -> None:
    offered = f"{tmp_path}/\x1b]0;owned\x07\x1b[2J\u202e"
    with caplog.at_level(logging.WARNING, "phalanx"):
        own.make(INFO, offered)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"the job folder that rank 0 offers can't be used: {tmp_path}/\\x1b]0;owned\\x07\\x1b[2J\\u202e: expected the "
        "folder of a job; the black box of this process is in "
    )


def test_a_link_in_our_own_folder_gives_way(own: OwnBox, victim: Path) -> None:
    own.offer_folder()
    own.make(INFO, "")
    own.rank = 1
    assert own.folder is not None
    (own.folder / "rank1-1.txt").symlink_to(victim)
    (own.folder / "rank_1").symlink_to(victim)
    _fail()
    assert victim.read_text() == "precious"
    report = own.folder / "rank1-1.txt"
    assert not report.is_symlink()
    assert report.read_text().startswith("PeerLost: ")
    assert stat.S_IMODE(report.stat().st_mode) == 0o600


def test_a_folder_that_was_replaced_is_neither_written_to_nor_emptied(own: OwnBox, base: Path, tmp_path: Path) -> None:
    own.make(INFO, "")
    own.rank = 1
    assert own.folder is not None
    folder = own.folder
    folder.rename(tmp_path / "away")
    folder.mkdir(mode=0o700)
    (folder / "1.txt").write_text("mine")
    _fail()
    own.end()
    assert [path.name for path in folder.iterdir()] == ["1.txt"]


@pytest.mark.parametrize("what", ["lock", "box"])
def test_links_instead_of_the_lock_and_the_box(own: OwnBox, base: Path, victim: Path, what: str) -> None:
    name = "lock" if what == "lock" else f"{os.getpid()}.box"
    folder = base / JOB
    folder.mkdir(mode=0o700, parents=True)
    (folder / name).symlink_to(victim)
    own.make(INFO, str(folder))
    own.end()
    assert victim.read_text() == "precious"
    assert stat.S_ISLNK((folder / name).lstat().st_mode)


def test_a_lock_whose_number_is_another_file_s_is_left_alone(base: Path, tmp_path: Path) -> None:
    made = folders.make_job_folder()
    assert made is not None
    membership = Membership.join(made)
    assert membership._lock is not None
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, membership._lock)
    number = membership._lock
    membership.end(False)
    assert os.fstat(number).st_ino == tmp_path.stat().st_ino
    os.close(number)
    os.close(other)


def test_the_newest_job_is_one_of_this_user_s(base: Path, capsys: pytest.CaptureFixture[str], give: Give) -> None:
    """In a folder that users share, as PHALANX_FOLDER may be."""
    folder = base / JOB
    folder.mkdir(parents=True)
    (folder / "7.box").write_bytes(make_box(Call()))
    give(folder, folder / "7.box")
    assert main(["report"]) == 2
    assert "there is no job folder in" in capsys.readouterr().err


def test_a_job_folder_that_is_replaced_by_a_link_is_not_read(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was found, as another user can where users share a folder."""
    folder = base / JOB
    folder.mkdir(parents=True, mode=0o700)
    (folder / "7.box").write_bytes(make_box(Call(), ending=1, world_size=1))
    (tmp_path / "lies").mkdir()
    (tmp_path / "lies" / "8.box").write_bytes(make_box(Call(), ending=2, world_size=1))
    real = folders.find_jobs

    def find_and_replace() -> list[Path]:
        found = real()
        folder.rename(tmp_path / "away")
        folder.symlink_to(tmp_path / "lies")
        return found

    monkeypatch.setattr(report, "find_jobs", find_and_replace)
    assert main(["report"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert str(folder) in said.err


def test_a_file_of_a_third_party_is_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7.box").write_bytes(make_box(Call(), world_size=1, ending=1))
    (tmp_path / "8.box").write_bytes(make_box(Call(), world_size=1, ending=1))
    (tmp_path / "9.txt").write_text("lies")
    with monkeypatch.context() as patch:
        seem_given_away(patch, tmp_path / "8.box", tmp_path / "9.txt")
        assert main(["report", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"  left out: {tmp_path}/8.box: it belongs to user {ANOTHER}" in lines
    assert f"  left out: {tmp_path}/9.txt: it belongs to user {ANOTHER}" in lines
    assert not any("lies" in line for line in lines)
