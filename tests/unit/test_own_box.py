"""The black box of this process comes back to the job folder that it has left."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.debug import own_box
from phalanx.debug.folders import Membership
from phalanx.debug.own_box import OwnBox
from phalanx.types import GroupInfo


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnBox]:
    """That has its box in a folder, and nothing at the end of the process to do."""
    monkeypatch.setenv("PHALANX_FOLDER", str(tmp_path))
    monkeypatch.setattr(own_box, "_end_with_the_process", lambda: None)
    own = OwnBox()
    assert own.offer_folder()
    assert own.make(GroupInfo("g", 0, 2, []), "") is not None
    yield own
    own.end()


def test_a_failure_while_the_lock_is_held_does_not_wait_for_it(own: OwnBox) -> None:
    """The garbage collector may tell of a failed call in the middle of anything."""
    with own._lock:
        thread = threading.Thread(target=own.fail, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    assert own.failed


def test_a_failure_while_the_folder_is_left_keeps_the_box(own: OwnBox, monkeypatch: pytest.MonkeyPatch) -> None:
    end = Membership.end

    def fail_after(membership: Membership, box_failed: bool) -> None:
        end(membership, box_failed)
        own.fail()

    with monkeypatch.context() as patch:
        patch.setattr(Membership, "end", fail_after)
        own.leave()
    assert os.path.exists(own.path)


def test_a_box_that_does_not_fit_any_more_leaves_nothing_behind(
    own: OwnBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(membership: Membership, move: Callable[[int], None]) -> None:
        raise OSError(errno.ENOSPC, "no room")

    own.leave()
    handles = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(Membership, "take_up", no_room)
    own.come_back()
    assert own.folder is None
    assert sorted(os.listdir("/proc/self/fd")) == handles
    assert list(tmp_path.rglob("*.box")) == []
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_folder_in_a_place_of_another_rank(own: OwnBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 offered it, and has another PHALANX_FOLDER than this process."""
    folder = own.folder
    assert folder is not None
    other = Membership.join(folder)
    monkeypatch.setenv("PHALANX_FOLDER", str(tmp_path / "elsewhere"))
    own.leave()
    own.come_back()
    assert own.folder == folder
    other.end(False)
