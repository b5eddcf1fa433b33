"""What Phalanx sees of its own groups: every call is recorded, whoever waits long says for whom, and a failure leaves
its report behind."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

from phalanx import _native
from phalanx.debug import answers, flight
from phalanx.debug.absence import describe_absent
from phalanx.debug.advising import Advising
from phalanx.debug.finite import describe_not_finite
from phalanx.debug.makings import Makings
from phalanx.debug.own_box import own_box
from phalanx.debug.seen import SeenGroups, WatchedTransport, native_of
from phalanx.debug.wait_watch import WaitWatch
from phalanx.errors import REPORT_NOTE, InvalidCall, PhalanxError
from phalanx.log import logger
from phalanx.printable import printable
from phalanx.transports import levels, limits, waits
from phalanx.transports.advisers import take_advice_of
from phalanx.transports.identities import NOBODY, Identity
from phalanx.transports.observers import Observer, observe
from phalanx.transports.posting import PostedCalls
from phalanx.transports.recording import remember_group
from phalanx.transports.refusals import awaited_refusals
from phalanx.transports.reports import describe_awaited_refusals, describe_shapes
from phalanx.transports.slowness import slow_seconds
from phalanx.types import GroupInfo

__all__ = ["install", "wait_watch"]

# Texts that a process leaves in its job's folder.
_MOST_REPORTS = 20
# Seconds after a failure.
_DUMP_AFTER = 1.0
_DUMP = "dump"
_MOST_LEFT_WITH = 100


def install() -> None:
    """From now on. Calling it again changes nothing."""
    if not _watching:
        _watching.append(_Watching())
        observe(_watching[0])
        take_advice_of(Advising(_watching[0].groups, _watching[0].waits))


def wait_watch() -> WaitWatch:
    """What looks for deadlocks in this process."""
    return _watching[0].waits


class _Watching(Observer):
    """Records, warns and reports."""

    def __init__(self) -> None:
        self.groups = SeenGroups()
        self.waits = WaitWatch(self.groups)
        waits.on_enter(self.waits.begin)
        # Groups that only post.
        self._posted: weakref.WeakSet[PostedCalls] = weakref.WeakSet()
        # The garbage collector may call `failed` in the middle of `failed`: no locks, and every step is atomic.
        self._told: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._makings = Makings()
        # The ranks of processes in the job.
        self._job_ranks: dict[Identity, int] = {}
        # The timer that is to write the trace, if there is one.
        self._dump_timers: dict[str, threading.Timer] = {}
        # Exceptions that were on their way when groups were left or not made, and when: peers know since then.
        self._left_with: list[tuple[int, int]] = []
        # Groups in whose inputs something was found already.
        self._not_finite: weakref.WeakSet[GroupInfo] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self.groups.forget_all()
        self._posted = weakref.WeakSet()
        self._told = {}
        self._makings = Makings()
        self._numbers = itertools.count(1)
        self._dump_timers = {}

    def coming(self, info: GroupInfo, venue: str, number: int, timeout: float) -> None:
        self._makings.begin(own_box(), info, venue, number, timeout)

    def expecting(self, info: GroupInfo, rank: int, identity: Identity) -> None:
        self._makings.expect(own_box(), info, rank, identity)

    def not_made(self, info: GroupInfo, folder: str, error: BaseException) -> None:
        self._keep_time_of(error)
        self._makings.fail(own_box(), info, folder, error)
        if isinstance(error, PhalanxError):
            self.failed(error)

    def joined(self, transport: WatchedTransport | PostedCalls, info: GroupInfo, folder: str) -> None:
        try:
            if isinstance(transport, PostedCalls):
                self._join_posted(transport, info, folder)
            else:
                self._join(transport, info, folder)
        finally:
            # Its deaths are watched from now on as those of a group.
            self._makings.end(own_box(), info)

    def _join(self, transport: WatchedTransport, info: GroupInfo, folder: str) -> None:
        group = native_of(transport)
        if group is None:
            return
        own = own_box()
        box = own.make(info, folder)
        self._number(transport, info)
        if box is not None:
            group.keep_records(box, remember_group(box, info, identity=group.identity), own.path)
        # As of now: tests change both.
        _native.set_slow(slow_seconds(), self.tell_slow, self.tell_refused)
        _native.set_long(self.waits.begin)
        if box is not None and self._is_in_no_group:
            own.set_rank(info.job_ranks[info.rank], info.size)
        if box is not None:
            group.watch_deaths(box, list(info.job_ranks), str(own.folder or ""))
        self.groups.add(transport, info, group).is_recorded = box is not None
        answers.start(self._tell_notes)
        if levels.logs_creation():
            _log_creation(info, group, own.path)

    @property
    def _is_in_no_group(self) -> bool:
        return not self.groups and not self._posted

    def _join_posted(self, posted: PostedCalls, info: GroupInfo, folder: str) -> None:
        own = own_box()
        box = own.make(info, folder)
        self._number(posted, info)
        if box is not None:
            posted.keep_records(box, remember_group(box, info, identity=posted.identity), own.path)
            if self._is_in_no_group:
                own.set_rank(info.job_ranks[info.rank], info.size)
        self._posted.add(posted)
        answers.start(self._tell_notes)

    def _number(self, transport: WatchedTransport | PostedCalls, info: GroupInfo) -> None:
        """Finds the ranks of a group in the job. The first group numbers the job, and so does torch's default group.

        Other groups have ranks of their own; their processes are known from the groups before. A process that was never
        met before has its rank in the group.
        """
        if self._is_in_no_group:
            self._job_ranks.clear()
        if info.global_ranks or self._is_in_no_group:
            self._job_ranks.update(zip(transport.identities, info.members, strict=False))
            self._job_ranks.pop(NOBODY, None)
        else:
            known = [self._job_ranks.get(identity, rank) for rank, identity in enumerate(transport.identities)]
            info.job_ranks = known if len(set(known)) == info.size else ()

    def renamed(self, transport: WatchedTransport, info: GroupInfo) -> None:
        group, own = native_of(transport), own_box()
        # One that was made without a black box stays without.
        recorded = any(seen.is_recorded and seen.transport() is transport for seen in self.groups.all())
        if group is not None and own.box is not None and recorded:
            known = remember_group(own.box, info, identity=group.identity)
            group.keep_records(own.box, known, own.path)

    def leaving(self, transport: WatchedTransport | PostedCalls) -> None:
        self._tell_notes()
        self._keep_time_of(sys.exception())
        if isinstance(transport, PostedCalls):
            self._posted.discard(transport)
        else:
            self.groups.remove(transport)
        if self._is_in_no_group:
            answers.stop()
            self.waits.end()

    def _keep_time_of(self, exception: BaseException | None) -> None:
        if exception is not None:
            self._left_with = [*self._left_with[-_MOST_LEFT_WITH:], (id(exception), time.monotonic_ns())]

    def raised(self, exception: BaseException, words: str) -> None:
        own = own_box()
        # Nobody failed who exits with code 0.
        if isinstance(exception, SystemExit) and not exception.code:
            return
        own.fail()
        if words:
            chain = list(_chain(exception))
            is_consequence = any(isinstance(each, PhalanxError) and not isinstance(each, InvalidCall) for each in chain)
            left_ns = min((ns for each, ns in self._left_with if each in map(id, chain)), default=0)
            own.say_end(words, is_consequence=is_consequence, ns=left_ns)
            _point_to_report(exception)

    def ending(self) -> None:
        own_box().say_end()

    def left(self) -> None:
        # A rank that is making a group needs the folder.
        if sys.exception() is None and not self._makings.are_under_way:
            self._dump()
            own_box().leave()

    def exiting(self) -> None:
        answers.stop()
        self.waits.end()
        self._dump()
        own_box().end()

    def switched_off(self) -> None:
        answers.stop()
        _native.set_long(None)
        self.waits.end()

    def started(self, info: GroupInfo, op: str, seq: int, inputs: Sequence[torch.Tensor]) -> None:
        if info in self._not_finite:
            return
        text = describe_not_finite(inputs)
        if text:
            self._not_finite.add(info)
            number = f", seq {seq}" if seq else ""
            where = _native.origin()[0]
            logger.warning(
                "%s%s, group %r, rank %d: %s%s. Logged once per group.",
                op,
                number,
                info.name,
                info.rank,
                text,
                f", at {where}" if where else "",
            )

    def failed(self, error: PhalanxError) -> None:
        own = own_box()
        own.fail()
        if own.folder is None or error.rank is None:
            return
        _point_to_report(error)
        text = f"{type(error).__name__}: {error}\n"
        # A broken group says the same at every further call.
        if text in self._told or len(self._told) >= _MOST_REPORTS:
            return
        number = next(self._numbers)
        if self._told.setdefault(text, number) != number:
            return
        own.write(f"rank{own.rank}-{number}.txt", text.encode(errors="replace"))
        self._dump_soon()

    def _dump_soon(self) -> None:
        """The trace takes longer than the error may: it comes when the program has dealt with that, or when it ends."""
        if self._dump_timers:
            return
        timer = threading.Timer(_DUMP_AFTER, self._dump)
        timer.daemon = True
        if self._dump_timers.setdefault(_DUMP, timer) is not timer:
            return
        try:
            timer.start()
        except RuntimeError as error:
            limits.warn("starting the thread that writes the trace", error, "it is written at the end")

    def _dump(self) -> None:
        """In a thread of its own, or while groups are left: never raises."""
        timer = self._dump_timers.pop(_DUMP, None)
        if timer is None:
            return
        timer.cancel()
        try:
            own = own_box()
            box = own.read() if own.folder is not None else None
            if box is not None:
                own.write(flight.file_name(box.rank), flight.encode(flight.trace_of(box)))
        except Exception as error:
            logger.warning("the trace could not be written: %r", error, exc_info=True)

    def tell_slow(self, token: int, op: int, seq: int, missing: list[int]) -> None:
        """A thread of this process waits in a call for long. Called by the core; Ctrl-C may come out of it."""
        with contextlib.suppress(Exception):
            asker = self.groups.asker(token)
            if asker is None:
                return
            info = asker.info
            lines = describe_absent(asker, _native.OPS[op].name, seq, missing, stacks=False)
            head = f"{_native.OPS[op].name}, seq {seq}, group {info.name!r}, rank {info.rank}"
            logger.warning("%s", "\n".join([f"{head}: has waited for {slow_seconds():g} s", *lines]))

    def tell_refused(self, token: int, op: int, seq: int, tag: int, missing: list[int]) -> None:
        """A thread of this process waits in a call of a group in which a rank has refused one. Called by the core."""
        with contextlib.suppress(Exception):
            seen = self.groups.find(token)
            group = None if seen is None else seen.group
            if seen is None or group is None:
                return
            found = awaited_refusals(group, seen.info.rank, _native.OPS[op].name, seq, tag, missing)
            new = {rank: refusal for rank, refusal in found.items() if (rank, refusal) not in seen.refusals_told}
            if new:
                seen.refusals_told |= set(new.items())
                text = describe_awaited_refusals(seen.info, seen.info.rank, _native.OPS[op].name, seq, new)
                logger.warning("%s", text)

    def _tell_notes(self) -> None:
        for seen in self.groups.all():
            group = seen.group
            note = None if group is None else group.take_note()
            if note is not None:
                logger.warning("%s", describe_shapes(seen.info, note))
        for posted in list(self._posted):
            note = posted.take_note()
            if note is not None:
                logger.warning("%s", describe_shapes(posted.info, note))


_watching: list[_Watching] = []


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """The exception and those it came of."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        seen.add(id(exception))
        yield exception
        exception = exception.__cause__ or exception.__context__


def _point_to_report(exception: BaseException) -> None:
    """A note, which Python prints below the traceback."""
    folder = own_box().folder
    note = printable(f"{REPORT_NOTE}{folder}")
    if folder is not None and note not in getattr(exception, "__notes__", ()):
        exception.add_note(note)


def _log_creation(info: GroupInfo, group: _native.GroupEnd, path: str) -> None:
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    level = levels.NAMES[group.level]
    logger.info(
        "group %r was made: rank %d of %d, checks %s, black box %s",
        info.name,
        info.rank,
        info.size,
        level,
        path or "none",
    )
