"""What Phalanx sees of its own groups: every call is recorded, whoever waits long says for whom, and a failure leaves
its report behind."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from phalanx import _native
from phalanx.debug import answers, flight
from phalanx.debug.absence import MOST_RECORDS, Asker, describe_absent, last_calls
from phalanx.debug.finite import describe_not_finite
from phalanx.debug.own_box import own_box
from phalanx.errors import PhalanxError
from phalanx.transports.hooks import Observer, observe
from phalanx.transports.levels import logs_creation
from phalanx.transports.recording import group_text
from phalanx.transports.reports import describe_shapes
from phalanx.transports.shm import ShmTransport
from phalanx.types import GroupInfo

__all__ = ["install"]

_logger = logging.getLogger("phalanx")
_VARIABLE = "PHALANX_SLOW"
_SLOW = 10.0
# Texts that a process leaves in its job's folder.
_MOST_REPORTS = 20
# Seconds after a failure.
_DUMP_AFTER = 1.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


def install() -> None:
    """From now on. Calling it again changes nothing."""
    if not _watching:
        _watching.append(_Watching())
        observe(_watching[0])


def slow_seconds() -> float:
    """How long a call may wait before it says so; 0: for ever."""
    asked = os.environ.get(_VARIABLE, "")
    try:
        return max(float(asked), 0.0) if asked else _SLOW
    except ValueError:
        _logger.warning("expected %s to be a number of seconds, got %r; it is %g", _VARIABLE, asked, _SLOW)
        return _SLOW


def _harmless(default: Callable[[], _T]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Logs what is raised and returns the default instead: an observer never breaks a run."""

    def guard(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return function(*args, **kwargs)
            except Exception:
                _logger.info("%s has failed", function.__qualname__, exc_info=True)
                return default()

        return guarded

    return guard


def _nothing() -> None:
    return None


def _no_lines() -> list[str]:
    return []


class _Seen:
    """A group that this process is in. It is not kept: one that nobody refers to any more leaves by itself."""

    def __init__(self, transport: ShmTransport, info: GroupInfo, on_end: Callable[[Any], object]) -> None:
        self.transport = weakref.ref(transport, on_end)
        self.info = info
        self.identities = transport.identities
        self.began_ns = transport.began_ns
        self.is_recorded = False
        # What was said of its failure.
        self.said: list[str] | None = None

    @property
    def group(self) -> _native.Group | None:
        transport = self.transport()
        return None if transport is None else transport.native


class _Watching(Observer):
    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._told: list[str] = []
        self._dump_timer: threading.Timer | None = None
        # Groups in whose inputs something was found already.
        self._not_finite: weakref.WeakSet[GroupInfo] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._seen = {}
        self._lock = threading.Lock()
        self._told = []
        self._dump_timer = None

    @_harmless(str)
    def offer_folder(self) -> str:
        return own_box().offer_folder()

    @_harmless(_nothing)
    def joined(self, transport: ShmTransport, info: GroupInfo, folder: str) -> None:
        group = transport.native
        if group is None:
            return
        own = own_box()
        box = own.make(info, folder)
        if box is not None:
            group.keep_records(box, group_text(info), own.path)
        # As of now: tests change it.
        _native.set_slow(slow_seconds(), self.tell_slow)
        if box is not None and not self._seen:
            own.set_rank(_world_rank(info), info.size)
        token = next(self._tokens)
        group.token = token
        self._seen[token] = _Seen(transport, info, lambda _: self._seen.pop(token, None))
        self._seen[token].is_recorded = box is not None
        answers.start(self._tell_notes)
        if logs_creation():
            _log_creation(info, group, own.path)

    def _asker(self, token: int) -> Asker | None:
        """None where the group is no more."""
        seen = self._seen.get(token)
        group = None if seen is None else seen.group
        if seen is None or group is None:
            return None
        began = min(each.began_ns for each in list(self._seen.values()))
        return Asker(group, seen.info, seen.identities, own_box().read(MOST_RECORDS), self._path_of, {}, began)

    def _path_of(self, rank: int) -> str:
        """The black box of a rank of the job, where this one shares a group with it."""
        for seen in list(self._seen.values()):
            ranks = list(seen.info.global_ranks or range(seen.info.size))
            group = seen.group
            if rank in ranks and group is not None:
                return group.box_of(ranks.index(rank))
        return ""

    @_harmless(_nothing)
    def renamed(self, transport: ShmTransport, info: GroupInfo) -> None:
        group, own = transport.native, own_box()
        # One that was made without a black box stays without.
        recorded = any(seen.is_recorded and seen.transport() is transport for seen in list(self._seen.values()))
        if group is not None and own.box is not None and recorded:
            group.keep_records(own.box, group_text(info), own.path)

    @_harmless(_nothing)
    def leaving(self, transport: ShmTransport) -> None:
        self._tell_notes()
        for token, seen in list(self._seen.items()):
            if seen.transport() is transport:
                self._seen.pop(token, None)
        if not self._seen:
            answers.stop()

    @_harmless(_nothing)
    def raised(self, exception: BaseException) -> None:
        own_box().failed = True

    @_harmless(_nothing)
    def exiting(self) -> None:
        answers.stop()
        self._dump()
        own_box().end()

    @_harmless(_nothing)
    def started(self, info: GroupInfo, op: str, seq: int, inputs: Sequence[torch.Tensor]) -> None:
        if info in self._not_finite:
            return
        text = describe_not_finite(inputs)
        if text:
            self._not_finite.add(info)
            number = f", seq {seq}" if seq else ""
            where = _native.origin()[0]
            _logger.warning(
                "%s%s, group %r, rank %d: %s%s. Said once a group.",
                op,
                number,
                info.name,
                info.rank,
                text,
                f", at {where}" if where else "",
            )

    @_harmless(_no_lines)
    def absent(self, group: Any, info: GroupInfo, op: str, seq: int, missing: Sequence[int]) -> list[str]:
        if not isinstance(group, _native.Group):
            lines: list[str] = group.failure()["absent"]
            return lines
        ask = not group.failure()["asked"]
        return self._say_once(group, lambda asker: describe_absent(asker, op, seq, missing, stacks=True, ask=ask))

    @_harmless(_no_lines)
    def lost(self, group: Any, info: GroupInfo, peer: int) -> list[str]:
        if not isinstance(group, _native.Group):
            lines: list[str] = group.lost(peer)
            return lines
        return self._say_once(group, lambda asker: last_calls(asker, peer))

    def _say_once(self, group: _native.Group, describe: Callable[[Asker], list[str]]) -> list[str]:
        """A group fails once, and says the same at every further call."""
        seen = self._seen.get(group.token)
        if seen is None:
            return []
        if seen.said is None:
            asker = self._asker(group.token)
            seen.said = [] if asker is None else describe(asker)
        return seen.said

    @_harmless(_nothing)
    def failed(self, error: PhalanxError) -> None:
        own = own_box()
        own.failed = True
        folder = own.folder
        if folder is None or error.rank is None:
            return
        text = f"{type(error).__name__}: {error}\n"
        with self._lock:
            # A broken group says the same at every further call.
            if text in self._told or len(self._told) >= _MOST_REPORTS:
                return
            self._told.append(text)
            number = len(self._told)
        (folder / f"rank{own.rank}-{number}.txt").write_text(text)
        self._dump_soon()

    def _dump_soon(self) -> None:
        """The trace takes longer than the error may: it comes when the program has dealt with that, or when it ends."""
        with self._lock:
            if self._dump_timer is None:
                self._dump_timer = threading.Timer(_DUMP_AFTER, self._dump)
                self._dump_timer.daemon = True
                self._dump_timer.start()

    @_harmless(_nothing)
    def _dump(self) -> None:
        with self._lock:
            timer, self._dump_timer = self._dump_timer, None
        if timer is None:
            return
        timer.cancel()
        own = own_box()
        folder, box = own.folder, own.read()
        if folder is not None and box is not None:
            flight.dump(box, folder / flight.file_name(box.rank))

    def tell_slow(self, token: int, op: int, seq: int, missing: list[int]) -> None:
        """A thread of this process waits in a call for long. Called by the core; Ctrl-C may come out of it."""
        with contextlib.suppress(Exception):
            asker = self._asker(token)
            if asker is None:
                return
            info = asker.info
            lines = describe_absent(asker, _native.OPS[op], seq, missing, stacks=False)
            head = f"{_native.OPS[op]}, seq {seq}, group {info.name!r}, rank {info.rank}"
            _logger.warning("%s", "\n".join([f"{head}: has waited for {slow_seconds():g} s", *lines]))

    def _tell_notes(self) -> None:
        for seen in list(self._seen.values()):
            group = seen.group
            note = None if group is None else group.take_note()
            if note is not None:
                seq, op, sides = note
                _logger.warning("%s", describe_shapes(seen.info, _native.OPS[op], seq, sides))


_watching: list[_Watching] = []


def _world_rank(info: GroupInfo) -> int:
    return info.global_ranks[info.rank] if info.global_ranks else info.rank


def _log_creation(info: GroupInfo, group: _native.Group, path: str) -> None:
    if not _logger.hasHandlers():
        _logger.addHandler(logging.StreamHandler())
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    level = ("off", "on", "full")[group.check]
    _logger.info(
        "group %r was made: rank %d of %d, checks %s, black box %s",
        info.name,
        info.rank,
        info.size,
        level,
        path or "none",
    )
