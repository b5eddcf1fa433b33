"""Job folders: whose they are, when they stay, and when they go."""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from boxes import Call, make_box
from nursery import Nursery, Process

from phalanx.commands import main
from phalanx.debug import bases, folders
from phalanx.debug.evidence import read_boxes
from phalanx.debug.folders import Membership, find_jobs, job_folders, make_job_folder
from phalanx.debug.job_folder import JobFolder
from phalanx.debug.records import DIED, ENDED_WELL, FAILED, RUNNING, ending_of, read_header
from users import can_be_another, give_away, seem_given_away

NAME = f"phalanx-{os.geteuid()}"


class Places(NamedTuple):
    """What stands for /tmp, /var/tmp and the home folder."""

    tmp: Path
    var: Path
    home: Path


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_FOLDER", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.fixture
def folder() -> Path:
    folder = make_job_folder()
    assert folder is not None
    return folder


def _joined(nursery: Nursery, folder: Path, num: int) -> list[Process]:
    processes = [nursery.start() for _ in range(num)]
    for process in processes:
        assert process.do("join", folder) == folder / f"{process.pid}.box"
    return processes


def _endings(folder: Path) -> list[str]:
    return sorted(ending_of(read_header(path)) for path in folder.glob("*.box"))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_job_folder_is_its_users(base: Path, folder: Path) -> None:
    assert folder.parent == base
    assert (_mode(base), _mode(folder)) == (0o700, 0o700)
    _, day, time, pid, random = folder.name.split("-")
    assert (len(day), len(time), int(pid), len(random)) == (8, 6, os.getpid(), 4)
    assert make_job_folder() != folder
    assert len(job_folders(base)) == 2


def test_all_ended_well(nursery: Nursery, folder: Path) -> None:
    first, second = _joined(nursery, folder, 2)
    assert _endings(folder) == [RUNNING, RUNNING]
    first.do("end", False)
    assert _endings(folder) == [ENDED_WELL, RUNNING]
    second.do("end", False)
    assert not folder.exists()


def test_one_has_failed(nursery: Nursery, folder: Path) -> None:
    first, second = _joined(nursery, folder, 2)
    first.do("end", True)
    second.do("end", False)
    assert _endings(folder) == [ENDED_WELL, FAILED]


@pytest.mark.parametrize("killed", [0, 1])
def test_one_was_killed(nursery: Nursery, folder: Path, killed: int) -> None:
    processes = _joined(nursery, folder, 2)
    processes.pop(killed).kill()
    assert _endings(folder) == [DIED, RUNNING]
    processes[0].do("end", False)
    assert _endings(folder) == [DIED, ENDED_WELL]


def test_all_were_killed(nursery: Nursery, folder: Path, base: Path) -> None:
    for process in _joined(nursery, folder, 2):
        process.kill()
    assert _endings(folder) == [DIED, DIED]
    boxes, problems = read_boxes(folder)
    assert ([len(box.records) for box in boxes], problems) == ([1, 1], [])


def test_a_forked_child_does_not_keep_the_folder_and_can_t_end_it(nursery: Nursery, folder: Path) -> None:
    (process,) = _joined(nursery, folder, 1)
    child = process.do("fork")
    assert _endings(folder) == [RUNNING]
    process.do("end", False)
    os.kill(child, signal.SIGKILL)
    assert not folder.exists()


def test_a_job_that_was_killed_and_its_forked_child_was_not(nursery: Nursery, folder: Path, base: Path) -> None:
    """Its folder makes room for others: nobody holds the lock."""
    (process,) = _joined(nursery, folder, 1)
    child = process.do("fork")
    process.kill()
    for _ in range(folders._MOST_KEPT):
        _leave(base, 20300101)
    make_job_folder()
    os.kill(child, signal.SIGKILL)
    assert not folder.exists()


def test_a_box_that_says_that_it_failed_goes_on_saying_so(folder: Path) -> None:
    membership = Membership.join(folder)
    membership.box.write_bytes(make_box(Call(), ending=2))
    membership.end(False)
    assert _endings(folder) == [FAILED]


def test_an_end_counts_once(folder: Path) -> None:
    one, other = Membership.join(folder), Membership.join(folder)
    one.end(False)
    one.end(False)
    assert folder.exists()
    other.end(False)
    assert not folder.exists()


def test_what_is_no_box_is_kept(folder: Path) -> None:
    membership = Membership.join(folder)
    (folder / "strange.box").write_bytes(b"?")
    membership.end(False)
    assert folder.exists()
    _, problems = read_boxes(folder)
    assert problems == [f"{folder}/strange.box: expected a black box, got something else"]


def test_a_folder_that_is_gone_is_not_joined(folder: Path) -> None:
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        Membership.join(folder)


def test_a_process_joins_while_another_one_leaves_a_folder_that_stays(folder: Path) -> None:
    """The one that leaves has the lock alone while it looks whether all have ended well."""
    membership = Membership.join(folder)
    with membership.made_box() as handle:
        os.write(handle, make_box(Call()))
    looking, looked = threading.Event(), threading.Event()

    def look(folder: JobFolder) -> bool:
        looking.set()
        assert looked.wait(30)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "_all_ended_well", look)
        patch.setattr(folders, "_PATIENCE", 30.0)
        patch.setattr(folders.time, "sleep", lambda _: looked.set())
        leaver = threading.Thread(target=membership.end, args=(True,))
        leaver.start()
        assert looking.wait(30)
        joined = Membership.join(folder)
        leaver.join()
    joined.end(True)


def test_a_folder_that_is_being_removed_is_not_joined(folder: Path) -> None:
    with JobFolder.own(folder) as opened:
        with folders._locked_alone(opened) as alone:
            assert not alone
        (folder / "1.box").write_bytes(make_box())
        with folders._locked_alone(opened) as alone:
            assert alone
            with pytest.raises(FileNotFoundError, match="was removed"):
                Membership.join(folder)
    Membership.join(folder).end(False)


def test_nothing_that_goes_wrong_is_raised(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base.write_text("a file")
    with caplog.at_level(logging.INFO, "phalanx"):
        assert make_job_folder() is None
    assert "make_job_folder" in caplog.text


_num_left = 0


def _leave(base: Path, day: int, size: int = 0) -> Path:
    """The folder of a job that failed on that day."""
    global _num_left
    _num_left += 1
    folder = base / f"job-{day}-000000-1-{_num_left:04x}"
    folder.mkdir(parents=True)
    (folder / "1.box").write_bytes(make_box(Call()) + bytes(size))
    return folder


def test_of_the_jobs_that_are_over_the_newest_are_kept(nursery: Nursery, base: Path) -> None:
    process = nursery.start()
    oldest = _leave(base, 20200101)
    assert process.do("join", oldest)
    left = [_leave(base, 20200102 + day) for day in range(folders._MOST_KEPT + 2)]
    made = make_job_folder()
    # A folder that somebody is in stays, and so does one that is about to be used.
    assert job_folders(base) == [oldest, *left[2:], made]
    process.kill()
    another = make_job_folder()
    assert set(job_folders(base)) == {*left[2:], made, another}


def test_folders_of_others_are_left_alone(base: Path) -> None:
    theirs = [base / f"job-{number:03d}" for number in range(folders._MOST_KEPT + 4)]
    for folder in theirs:
        folder.mkdir(parents=True)
        (folder / "checkpoint.box").write_text("mine")
    make_job_folder()
    assert [sorted(path.name for path in folder.iterdir()) for folder in theirs] == [["checkpoint.box"]] * len(theirs)


def test_what_is_not_ours_stays_in_a_folder_that_is(base: Path) -> None:
    kept = _leave(base, 20200101)
    (kept / "notes.md").write_text("mine")
    for day in range(folders._MOST_KEPT + 1):
        _leave(base, 20200102 + day)
    make_job_folder()
    assert [path.name for path in kept.iterdir()] == ["notes.md"]


def test_a_folder_with_the_name_of_a_box_keeps_no_boxes(base: Path) -> None:
    kept = _leave(base, 20200101)
    (kept / "0.box").mkdir()
    (kept / "0.box" / "notes.md").write_text("mine")
    for day in range(folders._MOST_KEPT + 1):
        _leave(base, 20200102 + day)
    make_job_folder()
    assert [path.name for path in kept.iterdir()] == ["0.box"]


def test_the_jobs_that_are_over_have_so_much_room(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [_leave(base, 20200101 + day, size=1 << 20) for day in range(4)]
    monkeypatch.setattr(folders, "_MOST_KEPT_BYTES", 3 << 20)
    make_job_folder()
    assert job_folders(base)[:-1] == left[2:]
    monkeypatch.setattr(folders, "_MOST_KEPT_BYTES", 1)
    make_job_folder()
    assert left[3].exists()
    assert not left[2].exists()


def test_a_folder_that_nobody_has_used_goes_with_time(base: Path) -> None:
    left = [make_job_folder() for _ in range(3)]
    for _ in range(folders._MOST_KEPT):
        _leave(base, 20990101)
    assert left[0] is not None
    os.utime(left[0], (0, 0))
    make_job_folder()
    assert not left[0].exists()
    assert all(folder is not None and folder.exists() for folder in left[1:])


def test_others_files_are_left_alone(base: Path, tmp_path: Path) -> None:
    elsewhere = _leave(tmp_path, 20200101)
    base.mkdir()
    (base / "job-20200101-000000-1-0000").symlink_to(elsewhere)
    (base / "notes.txt").write_text("mine")
    for day in range(folders._MOST_KEPT + 1):
        _leave(base, 20210101 + day)
    make_job_folder()
    assert elsewhere.exists()
    assert (base / "notes.txt").exists()


class TestBases:
    """Where job folders are when nobody says where."""

    @pytest.fixture(autouse=True)
    def places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
        monkeypatch.delenv("PHALANX_FOLDER")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("TMPDIR", raising=False)
        places = Places(tmp_path / "tmp", tmp_path / "var", tmp_path / "home")
        for place in places:
            place.mkdir(mode=0o700)
        monkeypatch.setenv("HOME", str(places.home))
        monkeypatch.setattr(bases, "_temporary_folders", lambda: [places.tmp, places.var])
        return places

    def test_it_is_made_once_and_is_this_users(self, places: Places) -> None:
        made = [make_job_folder(), make_job_folder()]
        assert [folder.parent for folder in made if folder] == [places.tmp / NAME] * 2
        assert _mode(places.tmp / NAME) == 0o700

    def test_one_of_ours_that_others_can_enter_is_closed(self, places: Places) -> None:
        (places.tmp / NAME).mkdir()
        (places.tmp / NAME).chmod(0o755)
        assert _made().parent == places.tmp / NAME
        assert _mode(places.tmp / NAME) == 0o700

    def test_the_working_folder_may_change(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PHALANX_FOLDER", "boxes")
        assert _made().parent == tmp_path / "boxes"

    def test_a_link_is_not_followed(self, places: Places, tmp_path: Path) -> None:
        (tmp_path / "target").mkdir(mode=0o700)
        (places.tmp / NAME).symlink_to(tmp_path / "target")
        assert _made().parent == places.var / NAME
        assert not any((tmp_path / "target").iterdir())

    def test_it_is_never_in_shared_memory(self, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
        (places.tmp / "link").symlink_to("/dev/shm")
        for name in ("/dev/shm", str(places.tmp / "link")):
            monkeypatch.setenv("TMPDIR", name)
            assert _made().parent == places.tmp / NAME

    def test_jobs_and_reports_find_the_same_one_where_others_have_taken_the_names(self, places: Places) -> None:
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

    def test_reports_make_no_folders(self, places: Places, capsys: pytest.CaptureFixture[str]) -> None:
        _take(places.tmp / NAME)
        for _ in range(2):
            assert main(["report"]) == 2
        wanted = [places.tmp / NAME, places.var / NAME, places.home / ".cache" / "phalanx" / "jobs"]
        assert f"there is no job folder in {', '.join(map(str, wanted))};" in capsys.readouterr().err
        assert [path for place in places for path in place.iterdir()] == [places.tmp / NAME]

    @pytest.mark.parametrize("problem", ["foreign", "file", "full", "missing", "circle", "dangling", "fifo"])
    def test_the_next_place_is_taken(self, places: Places, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
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
    def test_a_tmpdir_that_leads_nowhere(self, places: Places, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
        (places.tmp / "loop").symlink_to(target)
        monkeypatch.setenv("TMPDIR", str(places.tmp / "loop"))
        assert _made().parent == places.tmp / NAME

    def test_without_any_place(
        self, places: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As where HOME is missing, too: the box is in memory."""
        for place in places:
            place.rmdir()
        with caplog.at_level(logging.INFO, "phalanx"):
            assert make_job_folder() is None
        assert "there is no place for the folder of a job" in caplog.text
        assert find_jobs() == []

    def test_a_chosen_place_that_can_t_be_used_is_told(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("PHALANX_FOLDER", "/proc/none")
        with caplog.at_level(logging.WARNING, "phalanx"):
            assert make_job_folder() is None
        assert caplog.messages == [
            "PHALANX_FOLDER can't have job folders: [Errno 2] No such file or directory: '/proc/none'; "
            "the black box is in memory"
        ]

    @pytest.mark.parametrize("home", [None, "", "/none", "relative"])
    def test_a_home_that_is_none(self, places: Places, monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
        if home is None:
            monkeypatch.delenv("HOME")
        else:
            monkeypatch.setenv("HOME", home)
        assert _made().parent == places.tmp / NAME
        assert not Path("relative").exists()

    def test_a_home_of_another_user_is_left_alone(self, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
        """As under sudo."""
        _take(places.tmp / NAME)
        _take(places.var / NAME)
        seem_given_away(monkeypatch, places.home)
        assert make_job_folder() is None
        assert list(places.home.iterdir()) == []

    def test_a_job_with_a_tmpdir_of_its_own_is_found_without_it(
        self, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    def test_links_to_jobs_go_with_them(self, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_what_is_no_link_stays_where_links_are(
        self, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file may have the name of a job."""
        (tmp_path / "scratch").mkdir()
        (places.tmp / NAME).mkdir(mode=0o700)
        file = places.tmp / NAME / "job-20300101-000000-1-abcd"
        file.write_text("mine")
        monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
        job = _made()
        assert {path.name for path in file.parent.iterdir()} == {file.name, job.name}

    def test_links_lead_to_job_folders_of_this_user_only(self, places: Places, tmp_path: Path) -> None:
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
