"""Shows the exception that ends a child of multiprocessing, from Python 3.13 on.

Before, Python calls the child's finalizers while the exception is on its way. From 3.13 on it calls them when the
exception is gone, and calls no hook before: so the child's `run` is watched, from before it begins.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
from collections.abc import Callable

__all__ = ["show_exceptions_to", "watch"]

_is_watched = False
# The functions that are shown an exception: none or one.
_shown: list[Callable[[BaseException], object]] = []


def watch() -> None:
    """Called in parents, for children that are forked, and in other children before their `run`."""
    global _is_watched
    if not _is_watched:
        _is_watched = True
        # multiprocessing keeps no reference to its first argument, and calls the second in each child.
        multiprocessing.util.register_after_fork(_watch_run, _watch_run)


def show_exceptions_to(function: Callable[[BaseException], object]) -> None:
    """Of a child whose `run` was watched; others end as before."""
    _shown[:] = [function]


def _watch_run(_: object) -> None:
    process = multiprocessing.current_process()
    run = process.run

    def run_watched() -> None:
        try:
            run()
        except BaseException as exception:
            for function in _shown:
                function(exception)
            raise

    process.run = run_watched  # type: ignore[method-assign]
