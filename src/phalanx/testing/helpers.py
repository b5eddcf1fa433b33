"""Threads that ranks start, where ranks are threads: each belongs to the rank that has started it.

For a run `threading.Thread.start` and `ThreadPoolExecutor.submit` are replaced: both are called in the thread whose
rank is to be handed down. Context variables would not do: before Python 3.14 a new thread has none of its parent's,
and a thread of an executor serves tasks of any rank. Threads that are started in another way (`_thread`, C++) are not
seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any

__all__ = ["Helpers", "RunAs"]

# Calls something as a rank. `is_task`: what it raises goes to whoever waits for the task.
RunAs = Callable[[Callable[[], Any], bool], Any]


class Helpers:
    """`heir` is called in the thread that starts another, and says as whom that one runs; None: it is no rank's."""

    def __init__(self, heir: Callable[[], RunAs | None]) -> None:
        self._heir = heir
        self._here = threading.local()
        self._start = threading.Thread.start
        self._submit = ThreadPoolExecutor.submit

    def install(self) -> None:
        original: Callable[..., Any] = self._start
        original_submit: Callable[..., Any] = self._submit

        def start(thread: threading.Thread) -> None:
            # Those of executors belong to nobody, but their tasks do.
            run_as = None if getattr(self._here, "submits", False) else self._heir()
            if run_as is not None:
                _have_run_as(thread, run_as)
            original(thread)

        def submit(executor: Any, function: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
            run_as = self._heir()
            self._here.submits = True
            try:
                if run_as is None:
                    return original_submit(executor, function, *args, **more)
                return original_submit(executor, run_as, partial(function, *args, **more), True)
            finally:
                self._here.submits = False

        threading.Thread.start = wraps(original)(start)  # type: ignore[method-assign, assignment]
        ThreadPoolExecutor.submit = wraps(original_submit)(submit)  # type: ignore[method-assign]

    def remove(self) -> None:
        threading.Thread.start = self._start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = self._submit  # type: ignore[method-assign]


def _have_run_as(thread: threading.Thread, run_as: RunAs) -> None:
    before = thread.run

    def run() -> None:
        # The thread and this function refer to each other.
        del thread.run
        run_as(before, False)

    thread.run = run  # type: ignore[method-assign]
