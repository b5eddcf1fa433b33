"""Where job folders are when nobody says where."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import NamedTuple

import pytest
from boxes import Call, make_box

from phalanx.commands import main
from phalanx.debug import bases
from phalanx.debug.folders import Membership, find_jobs, make_job_folder
from users import can_be_another, give_away, seem_given_away

NAME = f"phalanx-{os.geteuid()}"


class Places(NamedTuple):
    """What stands for /tmp, /var/tmp and the home folder."""

    tmp: Path
    var: Path
    home: Path


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.delenv("PHALANX_FOLDER", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TMPDIR", raising=False)
    places = Places(tmp_path / "tmp", tmp_path / "var", tmp_path / "home")
    for place in places:
        place.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(places.home))
    monkeypatch.setattr(bases, "_temporary_folders", lambda: [places.tmp, places.var])
    return places


def test_it_is_made_once_and_is_this_users(places: Places) -> None:
    made = [make_job_folder(), make_job_folder()]
    assert [folder.parent for folder in made if folder] == [places.tmp / NAME] * 2
    assert _mode(places.tmp / NAME) == 0o700


def test_one_of_ours_that_others_can_enter_is_closed(places: Places) -> None:
    (places.tmp / NAME).mkdir()
    (places.tmp / NAME).chmod(0o755)
    assert _made().parent == places.tmp / NAME
    assert _mode(places.tmp / NAME) == 0o700


def test_the_working_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_FOLDER", "boxes")
    assert _made().parent == tmp_path / "boxes"


def test_a_link_is_not_followed(places: Places, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (places.tmp / NAME).symlink_to(tmp_path / "target")
    assert _made().parent == places.var / NAME
    assert not any((tmp_path / "target").iterdir())


def test_it_is_never_in_shared_memory(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    (places.tmp / "link").symlink_to("/dev/shm")
    for name in ("/dev/shm", str(places.tmp / "link")):
        monkeypatch.setenv("TMPDIR", name)
        assert _made().parent == places.tmp / NAME


def test_jobs_and_reports_find_the_same_one_where_others_have_taken_the_names(places: Places) -> None:
    taken = [places.tmp / NAME, places.var / NAME]
    for path in taken:
        _take(path)
    jobs = [_leave_failed() for _ in range(3)]
    assert [job.parent for job in jobs] == [places.home / ".cache" / "phalanx" / "jobs"] * 3
    assert find_jobs() == sorted(jobs)
    assert main(["report"]) == 0
    # Nothing else is left behind.
    assert sorted(places.tmp.iterdir()) + sorted(places.var.iterdir()) == taken
    assert [list(path.iterdir()) for path in taken] == [[], []]


def test_reports_make_no_folders(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    _take(places.tmp / NAME)
    for _ in range(2):
        assert main(["report"]) == 2
    wanted = [places.tmp / NAME, places.var / NAME, places.home / ".cache" / "phalanx" / "jobs"]
    assert f"there is no job folder in {', '.join(map(str, wanted))};" in capsys.readouterr().err
    assert [path for place in places for path in place.iterdir()] == [places.tmp / NAME]


@pytest.mark.parametrize("problem", ["foreign", "file", "full", "missing", "circle", "dangling", "fifo"])
def test_the_next_place_is_taken(places: Places, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    if problem == "foreign":
        _take(places.tmp / NAME)
    elif problem in ("circle", "dangling"):
        (places.tmp / NAME).symlink_to(NAME if problem == "circle" else places.tmp / "nowhere")
    elif problem == "fifo":
        os.mkfifo(places.tmp / NAME)
    elif problem == "file":
        (places.tmp / NAME).write_text("")
    elif problem == "missing":
        places.tmp.rmdir()
    else:
        full = os.statvfs_result((4096, 4096, 100, 1, 1, 10, 10, 10, 0, 255))
        real = os.fstatvfs
        monkeypatch.setattr(os, "fstatvfs", lambda handle: full if _is_in(handle, places.tmp) else real(handle))
    job = _leave_failed()
    assert job.parent == places.var / NAME
    assert find_jobs() == [job]
    assert main(["report"]) == 0


@pytest.mark.parametrize("target", ["loop", "nowhere"])
def test_a_tmpdir_that_leads_nowhere(places: Places, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (places.tmp / "loop").symlink_to(target)
    monkeypatch.setenv("TMPDIR", str(places.tmp / "loop"))
    assert _made().parent == places.tmp / NAME


def test_without_any_place(places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As where HOME is missing, too: the box is in memory."""
    for place in places:
        place.rmdir()
    with caplog.at_level(logging.INFO, "phalanx"):
        assert make_job_folder() is None
    assert "there is no place for the folder of a job" in caplog.text
    assert find_jobs() == []


def test_a_chosen_place_that_can_t_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHALANX_FOLDER", "/proc/none")
    with caplog.at_level(logging.WARNING, "phalanx"):
        assert make_job_folder() is None
    assert caplog.messages == [
        "PHALANX_FOLDER can't have job folders: [Errno 2] No such file or directory: '/proc/none'; "
        "the black box is in memory"
    ]


@pytest.mark.parametrize("home", [None, "", "/none", "relative"])
def test_a_home_that_is_none(places: Places, monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    assert _made().parent == places.tmp / NAME
    assert not Path("relative").exists()


def test_a_home_of_another_user_is_left_alone(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under sudo."""
    _take(places.tmp / NAME)
    _take(places.var / NAME)
    seem_given_away(monkeypatch, places.home)
    assert make_job_folder() is None
    assert list(places.home.iterdir()) == []


def test_a_job_with_a_tmpdir_of_its_own_is_found_without_it(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    older = _leave_failed(day=20200101)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    job = _leave_failed()
    assert job.parent == tmp_path / "scratch" / NAME
    assert find_jobs() == [older, job]
    for other in (None, str(places.var)):
        monkeypatch.delenv("TMPDIR") if other is None else monkeypatch.setenv("TMPDIR", other)
        assert find_jobs() == [older, job]


def test_links_to_jobs_go_with_them(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    job = _made()
    assert [path.name for path in (places.tmp / NAME).iterdir()] == [job.name]
    Membership.join(job).end(False)
    assert not job.exists()
    assert list((places.tmp / NAME).iterdir()) == []
    lost = _made()
    lost.rmdir()
    kept = _made()
    assert [path.name for path in (places.tmp / NAME).iterdir()] == [kept.name]


def test_what_is_no_link_stays_where_links_are(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may have the name of a job."""
    (tmp_path / "scratch").mkdir()
    (places.tmp / NAME).mkdir(mode=0o700)
    file = places.tmp / NAME / "job-20300101-000000-1-abcd"
    file.write_text("mine")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    job = _made()
    assert {path.name for path in file.parent.iterdir()} == {file.name, job.name}


def test_links_lead_to_job_folders_of_this_user_only(places: Places, tmp_path: Path) -> None:
    _made()
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    (target / "1.box").write_bytes(make_box(Call()))
    (places.tmp / NAME / "job-20990101-000000-1-abcd").symlink_to(target)
    foreign = tmp_path / "job-20990101-000000-2-abcd"
    foreign.mkdir(mode=0o700)
    (foreign / "1.box").write_bytes(make_box(Call()))
    (places.tmp / NAME / foreign.name).symlink_to(foreign)
    foreign.chmod(0o777)
    assert find_jobs() == []


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _made() -> Path:
    folder = make_job_folder()
    assert folder is not None
    return folder


def _leave_failed(day: int = 0) -> Path:
    """A job that has failed."""
    folder = _made()
    if day:
        folder = folder.rename(folder.with_name(f"job-{day}-000000-1-abcd"))
    (folder / "1.box").write_bytes(make_box(Call(), world_size=1, ending=2))
    return folder


def _take(path: Path) -> None:
    """Another user has the name: really so where files can be given away; else a link, which is not ours to follow."""
    if can_be_another():
        path.mkdir(mode=0o700)
        give_away(path)
    else:
        target = path.parents[1] / f"target of {path.parent.name}"
        target.mkdir()
        path.symlink_to(target)


def _is_in(handle: int, folder: Path) -> bool:
    return Path(f"/proc/self/fd/{handle}").readlink().is_relative_to(folder)
