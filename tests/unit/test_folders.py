"""Job folders: whose they are, when they stay, and when they go."""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import Call, make_box
from nursery import Nursery, Process

from phalanx.debug import folders
from phalanx.debug.box_reader import read_header
from phalanx.debug.evidence import read_boxes
from phalanx.debug.folders import Membership, job_folders, make_job_folder
from phalanx.debug.job_folder import JobFolder
from phalanx.debug.records import DIED, ENDED_WELL, FAILED, RUNNING, ending_of

NAME = f"phalanx-{os.geteuid()}"


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
        patch.setattr(time, "sleep", lambda _: looked.set())
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
