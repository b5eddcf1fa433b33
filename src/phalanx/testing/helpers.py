"""Threads that ranks start, where ranks are threads: each belongs to the rank that has started it.

For a run `threading.Thread.start` and `ThreadPoolExecutor.submit` are replaced: both are called in the thread whose
rank is to be handed down. Context variables would not do: before Python 3.14 a new thread has none of its parent's,
and a thread of an executor serves tasks of any rank. Threads that are started in another way (`_thread`, C++) are not
seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

from phalanx.testing.scheduling import Errand

__all__ = ["Helpers", "RunAs", "Task"]

# Calls something as a rank.
RunAs = Callable[[Callable[[], Any], Errand], Any]


class _Life(Errand):
    """What a thread does that a rank has started."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def threads(self) -> list[int]:
        return _numbers_of([self._thread])


class Task(Errand):
    """What a rank has handed to an executor. What it raises goes to whoever waits for it."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__()
        self._executor = executor
        self.future: Future[Any] | None = None

    def is_over(self) -> bool:
        """It may have been cancelled."""
        return self.future is not None and self.future.done()

    def threads(self) -> list[int]:
        return _numbers_of(tuple(getattr(self._executor, "_threads", ())))


def _numbers_of(threads: Iterable[threading.Thread]) -> list[int]:
    return [thread.native_id for thread in threads if thread.native_id is not None]


class Helpers:
    """`heir` is called in the thread that starts another, and says as whom that one runs; None: it is no rank's.

    `starting` is entered there for the time of the start, or of the submission.
    """

    def __init__(
        self, heir: Callable[[], RunAs | None], starting: Callable[[Errand], AbstractContextManager[None]]
    ) -> None:
        self._heir = heir
        self._starting = starting
        self._here = threading.local()
        self._start = threading.Thread.start
        self._submit = ThreadPoolExecutor.submit

    def install(self) -> None:
        original: Callable[..., Any] = self._start
        original_submit: Callable[..., Any] = self._submit

        def start(thread: threading.Thread) -> None:
            # Those of executors belong to nobody, but their tasks do.
            run_as = None if getattr(self._here, "submits", False) else self._heir()
            if run_as is None:
                original(thread)
                return
            life = _Life(thread)
            _have_run_as(thread, run_as, life)
            try:
                with self._starting(life):
                    original(thread)
            except BaseException:
                # The system has no thread left. The program may try again.
                vars(thread).pop("run", None)
                raise

        def submit(executor: Any, function: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
            run_as = self._heir()
            self._here.submits = True
            try:
                if run_as is None:
                    return original_submit(executor, function, *args, **more)
                task = Task(executor)
                with self._starting(task):
                    task.future = original_submit(executor, run_as, partial(function, *args, **more), task)
                return task.future
            finally:
                self._here.submits = False

        threading.Thread.start = wraps(original)(start)  # type: ignore[method-assign, assignment]
        ThreadPoolExecutor.submit = wraps(original_submit)(submit)  # type: ignore[method-assign]

    def remove(self) -> None:
        threading.Thread.start = self._start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = self._submit  # type: ignore[method-assign]


def _have_run_as(thread: threading.Thread, run_as: RunAs, life: _Life) -> None:
    before = thread.run

    def run() -> None:
        # The thread and this function refer to each other.
        del thread.run
        run_as(before, life)

    thread.run = run  # type: ignore[method-assign]
