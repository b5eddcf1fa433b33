"""How a process ends, for the groups it is in: they are left in order, and peers are told of the exception that ended
the process.

The first exception that nobody caught becomes the rank's last words: seen in sys.excepthook and threading.excepthook,
in a group that is closed while an exception is on its way (`finally: destroy_process_group()`), and in a child of
multiprocessing, which calls neither hook: in its finalizers or, from Python 3.13 on, as it leaves its function.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from phalanx import children
from phalanx.errors import REPORT_NOTE
from phalanx.phrases import short_path
from phalanx.transports import keeper
from phalanx.transports.base import Ending
from phalanx.transports.observers import tell
from phalanx.transports.places import is_framework

__all__ = ["enter", "last_words", "leave", "patience"]

_PATIENCE = 1.0
_MOST_CHARACTERS = 900
_MOST_FRAMES = 10

# The groups this process is in.
_transports: weakref.WeakSet[Ending] = weakref.WeakSet()
_hooked = False
# The exception that nobody caught. Kept, as Python keeps sys.last_exc: a group that its frames hold is left when the
# process ends, not when the exception goes.
_raised: BaseException | None = None
_process_with_finalizer = 0


def enter(transport: Ending) -> None:
    """This process is in a group."""
    _transports.add(transport)
    keeper.begin()
    _install()


def leave(transport: Ending) -> None:
    """The group is closed on this rank. With the last one of processes, the process has no thread of ours any more."""
    _tell_exception(transport)
    try:
        transport.complete(patience())
    finally:
        if transport.spans_processes:
            tell.leaving(transport)
        transport.close()
        if transport.spans_processes:
            _transports.discard(transport)
            if not _transports:
                keeper.stop()
                tell.left()


def _tell_exception(transport: Ending) -> None:
    """If an exception is in flight while a group is left, it becomes the rank's last words there."""
    exception = sys.exception()
    if exception is not None:
        _tell(exception, [transport])


def patience() -> float:
    """Seconds that a rank which leaves now gives its peers to make their side of the calls that it has in flight.

    Peers that make the same calls a little later need no more, and those that wait for this rank elsewhere hear soon
    that it left. A rank that has an exception to tell does not wait.
    """
    return 0.0 if sys.exception() is not None else _PATIENCE


def last_words(exception: BaseException) -> str:
    """Class, message and place of the exception that began it all; below, its traceback, innermost last."""
    # A process that exits because of an exception, as those of torch.multiprocessing do, has both.
    while isinstance(exception, SystemExit) and exception.__context__ is not None:
        exception = exception.__context__
    lines = "".join(traceback.format_exception_only(exception)).strip().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(REPORT_NOTE))
    frames = traceback.extract_tb(exception.__traceback__)
    own = [frame for frame in frames if not is_framework(frame.filename)] or frames
    where = f" ({short_path(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    told = [f"{short_path(frame.filename)}:{frame.lineno}, in {frame.name}: {frame.line}" for frame in own]
    words = "\n".join(["; ".join(map(str.strip, text[:_MOST_CHARACTERS].splitlines())) + where, *told[-_MOST_FRAMES:]])
    return words.encode("utf-8", "backslashreplace").decode()


def _tell(exception: BaseException, transports: Iterable[Ending], *, is_last: bool = False) -> None:
    """Never raises: the program has an exception of its own to report. `is_last`: it ends the process."""
    with contextlib.suppress(Exception):
        is_plain_exit = isinstance(exception, SystemExit) and (exception.__context__ is None or not exception.code)
        words = "" if is_plain_exit else last_words(exception)
        # First: peers that are told may end before this rank has written it down.
        if is_last:
            tell.raised(exception, words.partition("\n")[0])
        for transport in transports if words else ():
            transport.say_last_words(words)


def _exit() -> None:
    """The process ends: leaves what is left."""
    exception = sys.exception()
    transports = list(_transports)
    if exception is not None:
        _tell(exception, transports, is_last=True)
    until = time.monotonic() + (0.0 if _raised is not None else patience())
    for transport in transports:
        with contextlib.suppress(Exception):
            transport.complete(max(0.0, until - time.monotonic()))
    tell.ending()
    for transport in transports:
        # Whatever there is to tell, the group is left.
        with contextlib.suppress(Exception):
            tell.leaving(transport)
            transport.close(exiting=True)
    keeper.stop(exiting=True)
    tell.exiting()


def _exit_child() -> None:
    """A child of multiprocessing ends. Threads of the program that still run may make calls: Python waits for them."""
    if sys.exception() is not None or not _has_threads():
        _exit()


def _exit_child_with_threads() -> None:
    """Once the children of this process have ended, which these threads may wait for."""
    if _has_threads():
        # multiprocessing calls it next, and the second time it does nothing.
        threading._shutdown()  # type: ignore[attr-defined]
    _exit()


def _has_threads() -> bool:
    """That are not daemons, and that the program has started."""
    here = threading.current_thread(), threading.main_thread()
    return bool(_transports) and any(not thread.daemon and thread not in here for thread in threading.enumerate())


def _install() -> None:
    global _hooked, _process_with_finalizer
    if not _hooked:
        _hooked = True
        sys.excepthook = _telling(sys.excepthook)
        threading.excepthook = _telling_of_threads(threading.excepthook)
        children.show_exceptions_to(_see)
    if _process_with_finalizer != os.getpid():
        # Forgotten in children of multiprocessing: finalizers always, and from Python 3.13 on what atexit has. Before
        # 3.13 they end without atexit.
        _process_with_finalizer = os.getpid()
        atexit.unregister(_exit)
        atexit.register(_exit)
        multiprocessing.util.Finalize(None, _exit_child, exitpriority=100)
        multiprocessing.util.Finalize(None, _exit_child_with_threads, exitpriority=-100)


# A forked child is in no group.
os.register_at_fork(after_in_child=_transports.clear)


def _see(exception: BaseException) -> None:
    """An exception that nobody caught ends the process."""
    global _raised
    _raised = exception
    _tell(exception, list(_transports), is_last=True)


def _telling(before: Callable[..., Any]) -> Callable[..., Any]:
    def excepthook(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> Any:
        _see(exception)
        return before(kind, exception, trace)

    return excepthook


def _telling_of_threads(before: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def excepthook(arguments: threading.ExceptHookArgs) -> Any:
        if arguments.exc_value is not None:
            _tell(arguments.exc_value, list(_transports))
        return before(arguments)

    return excepthook
