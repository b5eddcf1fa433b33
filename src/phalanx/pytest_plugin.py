"""The pytest plugin: tests that run as several ranks.

    @pytest.mark.ranks([2, 4], seeds=20)
    def test_step(rank, world): ...

Loaded by every pytest in an environment that has Phalanx, so nothing of torch is imported before a test asks for it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

_SIZE = "_phalanx_ranks"
_OWN = ("rank", "world")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(sizes, *, seeds=1, schedule=None, faults=(), init=True, timeout=None, stuck_after=60): run the test "
        "function as so many ranks, which are threads of one process; it takes `rank` and `world`. Several sizes make "
        "several tests; with `seeds` each runs under so many random schedules.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        sizes = _sizes(mark)
        metafunc.fixturenames.append(_SIZE)
        metafunc.parametrize(_SIZE, sizes, ids=[f"{size} ranks" if size != 1 else "1 rank" for size in sizes])


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> None:
    """In a test with the mark `ranks`: which rank this is."""
    _require_mark(request, "rank")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> None:
    """In a test with the mark `ranks`: the world of its ranks."""
    _require_mark(request, "world")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    from phalanx.testing import run

    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names if name not in _OWN}

    function = partial(_call, pyfuncitem.obj, given, [name for name in _OWN if name in names])
    options = dict(mark.kwargs)
    num_seeds, seed = options.pop("seeds", 1), options.pop("seed", None)
    if num_seeds > 1 and seed is not None:
        raise pytest.UsageError("expected seeds or a seed in the mark ranks, got both")
    seeds = range(num_seeds) if num_seeds > 1 else [seed]
    size: Any = pyfuncitem.callspec.params[_SIZE]
    with _output_by_rank(pyfuncitem):
        for seed in seeds:
            run(function, size, seed=seed, **options)
    return True


def _call(function: Callable[..., Any], given: dict[str, Any], own: list[str], rank: int, world: Any) -> None:
    """The test function as a rank; at the top of the module, so that processes can be sent it."""
    function(**given, **{name: {"rank": rank, "world": world}[name] for name in own})


def _sizes(mark: pytest.Mark) -> list[int]:
    if len(mark.args) != 1 or not isinstance(mark.args[0], (int, list, tuple)):
        raise pytest.UsageError(f"expected the mark ranks(number) or ranks([number, ...]), got ranks{mark.args}")
    sizes = mark.args[0]
    return [sizes] if isinstance(sizes, int) else list(sizes)


def _require_mark(request: pytest.FixtureRequest, name: str) -> None:
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"expected the mark ranks on a test that takes {name!r}: @pytest.mark.ranks(2)", pytrace=False)


@contextmanager
def _output_by_rank(item: pytest.Item) -> Iterator[None]:
    """What ranks print becomes a section of the report for each of them."""
    routers = [_Router(sys.stdout), _Router(sys.stderr)]
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = routers
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for name, router in zip(("stdout", "stderr"), routers, strict=True):
            for number, text in sorted(router.texts.items()):
                item.add_report_section("call", name, f"rank {number}:\n{text.getvalue()}")


class _Router(io.TextIOBase):
    """Goes to the text of the rank that writes; what others write goes where it always went."""

    def __init__(self, others: Any) -> None:
        self.texts: dict[int, io.StringIO] = {}
        self._others = others

    def write(self, text: str) -> int:
        self._target().write(text)
        return len(text)

    def flush(self) -> None:
        self._others.flush()

    def _target(self) -> Any:
        from phalanx.testing.world import rank_here

        number = rank_here()
        return self._others if number is None else self.texts.setdefault(number, io.StringIO())
