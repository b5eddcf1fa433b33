"""Tests of Hypothesis that run as several ranks: each example is a run of all ranks, with the same values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

__all__ = ["for_each_example"]


@contextmanager
def for_each_example(
    test: Any, name: str, run: Callable[[Callable[..., Any], dict[str, Any]], None], processes: bool
) -> Iterator[None]:
    """Has Hypothesis call `run(function, arguments)` for each example, in place of the function below `@given`.

    `name` tells the test from all others, also from itself with another number of ranks.
    """
    from hypothesis import Phase, settings

    default: Any = settings.default
    function = getattr(test, "__func__", test)
    inner = function.hypothesis.inner_test
    given_settings = getattr(function, "_hypothesis_internal_use_settings", None)

    # Named as the inner function where a failing example is shown.
    @wraps(inner)
    def run_example(*args: Any, **arguments: Any) -> None:
        __tracebackhide__ = True
        run(partial(_InnerTest(inner) if processes else inner, *args), arguments)

    # Hypothesis finds the failing examples of a test by the source of the inner function, and by this.
    run_example._hypothesis_internal_add_digest = name.encode()  # type: ignore[attr-defined]
    used = given_settings or default
    # It names the lines that only failing examples reach: they are ours, as it does not trace the threads of ranks.
    options: dict[str, Any] = {"phases": [phase for phase in used.phases if phase is not Phase.explain]}
    if used.deadline == default.deadline:
        # The deadline of an example suits no run of several ranks, which takes longer the busier the machine is.
        options["deadline"] = None
    function.hypothesis.inner_test = run_example
    function._hypothesis_internal_use_settings = settings(used, **options)
    try:
        yield
    finally:
        function.hypothesis.inner_test = inner
        function._hypothesis_internal_use_settings = given_settings


class _InnerTest:
    """The function below `@given` as processes can be sent it: its name leads to the one above."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.__module__ = inner.__module__

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return self._inner(*args, **arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, (self._inner.__module__, self._inner.__qualname__)


def _find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found.hypothesis.inner_test
