"""Shows the exception that ends a child of multiprocessing, from Python 3.13 on.

Before, Python calls the child's finalizers while the exception is on its way. From 3.13 on it calls them when the
exception is gone, and calls no hook before: so the child's `run` is watched, from before it begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["show_exceptions_to", "watch"]

_is_watched = False
# The functions that are shown an exception: none or one.
_shown: list[Callable[[BaseException], object]] = []


def watch() -> None:
    """Called in parents, for children that are forked, and in children that are spawned, before their `run`."""
    global _is_watched
    if not _is_watched:
        _is_watched = True
        # It runs in the child, whatever its start method is, and calls `run`, which subclasses replace.
        kind: Any = BaseProcess
        kind._bootstrap = _watching(kind._bootstrap)


def show_exceptions_to(function: Callable[[BaseException], object]) -> None:
    """Of a child whose `run` was watched; others end as before."""
    _shown[:] = [function]


def _watching(bootstrap: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(bootstrap)
    def bootstrap_watched(process: BaseProcess, *args: Any, **kwargs: Any) -> int:
        run = process.run

        def run_watched() -> None:
            try:
                run()
            except BaseException as exception:
                for function in _shown:
                    function(exception)
                raise

        process.run = run_watched  # type: ignore[method-assign]
        return bootstrap(process, *args, **kwargs)

    return bootstrap_watched
