"""The black box of this process: made with its first group, in the folder of its job, and left behind if it fails.

A process that has left all of its groups in order has left the folder, too, and the last process that does so removes
it: how the process ends is its own business, and nobody hears of `os._exit`. Where it makes another group, or fails
after all, its box comes back to the folder, with all that it had.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from pathlib import Path

from phalanx import _native
from phalanx.debug.box_reader import read_box
from phalanx.debug.folders import Membership, make_job_folder
from phalanx.debug.job_folder import describe_problem
from phalanx.debug.records import Box
from phalanx.log import logger
from phalanx.transports import limits
from phalanx.types import GroupInfo

__all__ = ["OwnBox", "num_calls", "own_box"]

_VARIABLE = "PHALANX_BLACK_BOX"
_NUM_CALLS = 2000
_MOST_CALLS = 10_000_000


class OwnBox:
    """One a process; a forked child begins with a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._membership: Membership | None = None
        # The folder that this process has left, and may come back to.
        self._left: Path | None = None
        self.box: _native.BlackBox | None = None
        self.failed = False
        self.rank = 0
        self._has_rank = False

    @property
    def path(self) -> str:
        """Of the box; empty where it is in memory, or there is none."""
        return "" if self._membership is None else str(self._membership.box)

    @property
    def folder(self) -> Path | None:
        return None if self._membership is None else self._membership.folder

    def offer_folder(self) -> str:
        """For the first rank of a group: where the others are to have their boxes, too."""
        with self._lock:
            self._come_back()
            if self._membership is None and self.box is None and num_calls() > 0:
                self._join("")
            return str(self.folder or "")

    def make(self, info: GroupInfo, folder: str) -> _native.BlackBox | None:
        """The box, made if there is none. `folder` is what the group's first rank offers."""
        if num_calls() == 0:
            return None
        with self._lock:
            self._come_back()
            if self.box is None:
                if self._membership is None:
                    self._join(folder)
                # In memory where it can't be a file.
                self.box = self._open(info) or self._open(info)
            return self.box

    def write(self, name: str, data: bytes) -> None:
        """A file in the job's folder."""
        if self._membership is None:
            return
        try:
            self._membership.write(name, data)
        except OSError as error:
            if limits.is_limit(error):
                limits.warn(f"writing {name} to {self.folder}", error, "it is missing there")
            else:
                # The user may have removed the folder.
                logger.info("%s can't be written to the job folder: %s", name, describe_problem(error))

    def _join(self, offered: str) -> None:
        """The folder that the group's first rank offers, else a new one."""
        _end_with_the_process()
        problem: Exception | None = None
        if offered:
            try:
                self._membership = Membership.join(offered)
                return
            except (OSError, ValueError) as error:
                problem = error
        made = make_job_folder()
        if made is not None:
            with contextlib.suppress(OSError, ValueError):
                self._membership = Membership.join(made)
        if problem is not None:
            # A folder that is not there is another host's, or was removed. What is there and not ours is worth a look.
            level = logging.WARNING if isinstance(problem, PermissionError) else logging.INFO
            where = f"in {self.folder}" if self.folder else "in memory"
            logger.log(
                level,
                "the job folder that rank 0 offers can't be used: %s; the black box of this process is %s",
                describe_problem(problem),
                where,
            )

    def _open(self, info: GroupInfo) -> _native.BlackBox | None:
        """In memory, where only this process can look at it, if there is no folder."""
        program = sys.argv[0] if sys.argv else ""
        try:
            if self._membership is None:
                return _native.BlackBox(-1, num_calls(), info.rank, info.size, program)
            with self._membership.made_box() as file:
                box = _native.BlackBox(file, num_calls(), info.rank, info.size, program)
            box.tell_exit_status()
            return box
        except (OSError, MemoryError) as error:
            if limits.is_limit(error):
                limits.warn("making the black box", error, "it is in memory, or missing")
            else:
                logger.info("the black box can't be a file: %s", error)
            membership, self._membership = self._membership, None
            if membership is not None:
                membership.end(False)
            return None

    def remove(self, name: str) -> None:
        """A file that this process has written to the job's folder."""
        membership = self._membership
        if membership is not None:
            with contextlib.suppress(OSError):
                membership.remove(name)

    def leave(self) -> None:
        """All groups were left in order."""
        with self._lock:
            if self._membership is not None and self.box is not None and not self.failed:
                membership, self._membership = self._membership, None
                self._left = membership.folder
                membership.end(False)
                if self.failed:
                    self._come_back()

    def fail(self) -> None:
        """A group has failed, or an exception ends the process: the box stays."""
        self.failed = True
        # The garbage collector may call this in a thread that holds the lock. Then `leave` comes back.
        if self._lock.acquire(blocking=False):
            try:
                self._come_back()
            finally:
                self._lock.release()

    def come_back(self) -> None:
        """To the folder that this process has left: it makes another group, or has failed."""
        with self._lock:
            self._come_back()

    def _come_back(self) -> None:
        folder, self._left = self._left, None
        if folder is None or self.box is None:
            return
        try:
            membership = Membership.rejoin(folder)
            try:
                membership.take_up(self.box.move_to)
            except BaseException:
                membership.end(False)
                raise
            self._membership = membership
        except OSError as error:
            logger.info("the black box can't come back to the job folder: %s", describe_problem(error))

    def set_rank(self, rank: int, world_size: int) -> None:
        """Of the groups that are made from now on.

        After a failure the rank stays: reports speak of the world that failed, whatever ranks the survivors have now.
        """
        if self.failed and self._has_rank:
            return
        self.rank, self._has_rank = rank, True
        if self.box is not None:
            self.box.set_rank(rank, world_size)

    def say_end(self, exception: str = "", *, is_consequence: bool = False, ns: int = 0) -> None:
        """The process is about to leave its groups, and why; `ns`: when it began to, on the monotonic clock.

        What is said first stays.
        """
        if self.box is not None:
            # What came before is written down before.
            _native.look_for_deaths()
            raised = _native.ENDING_CONSEQUENCE if is_consequence else _native.ENDING_EXCEPTION
            self.box.say_end(raised if exception else _native.ENDING_EXIT, exception, ns or time.monotonic_ns())

    def read(self, most: int | None = None) -> Box | None:
        """With its newest records only, where `most` says how many."""
        return None if self.box is None else read_box(self.box.contents(), most)

    def end(self) -> None:
        """The process ends. Its box stays where a group has failed or an exception ended it."""
        with self._lock:
            membership, self._membership = self._membership, None
            if membership is not None:
                membership.end(self.failed)


def num_calls() -> int:
    """How many calls a box keeps; 0: there is to be none."""
    asked = os.environ.get(_VARIABLE, "")
    try:
        return min(max(int(asked), 0), _MOST_CALLS) if asked else _NUM_CALLS
    except ValueError:
        logger.warning("expected %s to be a number of calls, got %r; it is %d", _VARIABLE, asked, _NUM_CALLS)
        return _NUM_CALLS


class _Holder:
    own = OwnBox()
    ends_with = 0  # the process for whose end it is registered


def _end_with_the_process() -> None:
    """Also where the group for which the folder was made never comes about."""
    if _holder.ends_with != os.getpid():
        _holder.ends_with = os.getpid()
        atexit.register(_end)
        # A child of multiprocessing may end without atexit; after the groups have been left.
        multiprocessing.util.Finalize(None, _end, exitpriority=-200)


def _end() -> None:
    _holder.own.end()


_holder = _Holder()


def own_box() -> OwnBox:
    return _holder.own


def _begin_anew() -> None:
    _holder.own = OwnBox()


os.register_at_fork(after_in_child=_begin_anew)
