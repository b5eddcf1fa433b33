"""A thread that tells peers where this process is, whatever its main thread does, and warns of what was noticed.

Peers ask through the segment (_core/listener.hpp). One thread a process, from the first group to the last; it sleeps
in the core, without the GIL, until somebody asks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from phalanx import _native
from phalanx.log import logger
from phalanx.phrases import short_path
from phalanx.printable import printable
from phalanx.transports import limits
from phalanx.transports.places import is_framework, is_ours

__all__ = ["Whereabouts", "describe_frame", "start", "start_without_signals", "stop"]

_NAME = "phalanx-answers"
_MOST_FRAMES = 12
_PATIENCE = 1.0

# Called when a group has something to tell.
OnNote = Callable[[], None]


class Whereabouts(NamedTuple):
    """Where a thread is."""

    in_call: bool  # in one of ours, which its program has made
    where: str  # the program's own line; empty where there is none
    stack: list[str]  # innermost last

    def pack(self) -> str:
        return "\n".join([str(int(self.in_call)), self.where, *self.stack])

    @classmethod
    def unpack(cls, text: str) -> Whereabouts:
        in_call, where, *stack = map(printable, text.split("\n"))
        return cls(in_call == "1", where, stack)


def describe_frame(frame: FrameType | None, in_core: bool = False) -> Whereabouts:
    """`in_core`: its thread waits in the native core, which may have no frame of ours."""
    entries: list[traceback.FrameSummary] = [] if frame is None else list(traceback.extract_stack(frame))
    own = [number for number in range(len(entries)) if _is_own(entries, number)]
    if not own:
        return Whereabouts(False, "", [_describe(entry) for entry in entries[-_MOST_FRAMES:]])
    below = list(itertools.takewhile(lambda entry: not is_ours(entry.filename), entries[own[-1] + 1 :]))
    in_call = in_core or own[-1] + 1 + len(below) < len(entries)
    # What we do in a call does not matter, nor torch's way to it, nor how the program was started.
    above = itertools.dropwhile(lambda entry: _is_start(entry.filename), entries[: own[-1] + 1])
    stack = [*above, *([] if in_call else below)]
    return Whereabouts(in_call, _describe(entries[own[-1]]), [_describe(entry) for entry in stack[-_MOST_FRAMES:]])


def _describe(entry: traceback.FrameSummary) -> str:
    return f"{short_path(entry.filename)}:{entry.lineno}, in {entry.name}"


def _is_own(entries: list[traceback.FrameSummary], number: int) -> bool:
    """Whether a frame is the program's. Code without a file, as dataclasses have it, is that of its caller."""
    name = entries[number].filename
    made = name.startswith("<") and number > 0 and is_framework(entries[number - 1].filename)
    return not is_framework(name) and not made


def _is_start(filename: str) -> bool:
    return is_framework(filename) or filename.startswith("<")


def start(on_note: OnNote) -> None:
    """Nothing to do where it runs already."""
    if _thread() is None:
        try:
            start_without_signals(threading.Thread(target=_run, args=(on_note,), name=_NAME, daemon=True))
        except RuntimeError as error:
            limits.warn("starting the thread that answers peers", error, "peers can't ask where this process is")


def start_without_signals(thread: threading.Thread) -> None:
    """A program may block a signal to wait for it later: a thread of ours that takes it would end the process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop() -> None:
    thread = _thread()
    if thread is None or thread is threading.current_thread():
        return
    _native.close_listener(True)
    # One that is about to start can't be joined yet.
    with contextlib.suppress(RuntimeError):
        thread.join(_PATIENCE)
    _native.close_listener(False)


def _thread() -> threading.Thread | None:
    return next((thread for thread in threading.enumerate() if thread.name == _NAME), None)


def _run(on_note: OnNote) -> None:
    while (question := _native.next_question()) is not None:
        asked, noted = question
        try:
            if noted:
                on_note()
            if asked:
                main = threading.main_thread().ident or 0
                in_core = _native.main_thread_in_call()
                _native.answer(describe_frame(sys._current_frames().get(main), in_core).pack())
        except Exception:
            # An observer that fails is silent from then on; the program is not to suffer.
            logger.info("the thread that answers peers has failed, process %d", os.getpid(), exc_info=True)
            return
