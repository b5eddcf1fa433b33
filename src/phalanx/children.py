"""Shows the exception that ends a child of multiprocessing, from Python 3.13 on.

Before 3.13, Python calls the child's finalizers while the exception is in flight. From 3.13 on it calls them after it
has handled the exception, and it calls no hook before that. So the child's `run` is wrapped before it begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["show_exceptions_to", "watch"]

_is_watched = False
_show: Callable[[BaseException], object] | None = None


def watch() -> None:
    """For parents, whose forked children inherit it, and for spawned children, before their `run`."""
    global _is_watched
    if not _is_watched:
        _is_watched = True
        # It runs in the child, whatever its start method is, and calls `run`, which subclasses replace.
        kind: Any = BaseProcess
        kind._bootstrap = _watching(kind._bootstrap)


def show_exceptions_to(function: Callable[[BaseException], object]) -> None:
    """Has the function called with the exception that ends this process, if it is a child whose `run` is watched."""
    global _show
    _show = function


def _watching(bootstrap: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(bootstrap)
    def bootstrap_watched(process: BaseProcess, *args: Any, **kwargs: Any) -> int:
        run = process.run

        def run_watched() -> None:
            try:
                run()
            except BaseException as exception:
                if _show is not None:
                    _show(exception)
                raise

        process.run = run_watched  # type: ignore[method-assign]
        return bootstrap(process, *args, **kwargs)

    return bootstrap_watched
