"""The pytest plugin: tests that run as several ranks.

    @pytest.mark.ranks([2, 4], seeds=20)
    def test_step(rank, world): ...

Loaded by every pytest in an environment that has Phalanx, so nothing of torch is imported before a test asks for it.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

_SIZE = "_phalanx_ranks"
_OWN = ("rank", "world")
_OPTIONS = ("seed", "schedule", "replay", "check", "faults", "init", "timeout", "stuck_after", "processes")
_OUTCOMES = (pytest.skip.Exception, pytest.fail.Exception, pytest.xfail.Exception)
_REQUIREMENTS = {"min_ranks", "max_ranks", "multiple_of", "cpus", "gpus", "backend"}
_CAPTURING = {"capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("phalanx").addoption(
        "--ranks-replay",
        metavar="SCHEDULE",
        help="run tests with the mark ranks under this schedule, which a failure has printed",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(sizes, *, seeds=1, seed=None, schedule=None, replay=None, check=False, faults=(), init=True, "
        "timeout=None, stuck_after=60, processes=False): run the test function as so many ranks, which are threads of "
        "one process; it takes `rank` and `world`. Several sizes make several tests; with `seeds` each runs under so "
        "many random schedules. The other options are those of phalanx.testing.run.",
    )
    config.addinivalue_line(
        "markers",
        "requires(*, min_ranks=1, max_ranks=None, multiple_of=1, cpus=0, gpus=0, backend=None): skip the test where "
        "the number of its ranks, the machine or torch does not have it.",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("ranks") is not None and _size(item) is None:
        pytest.fail(
            "expected the mark ranks on a function or on a method of a plain class, got it on one of unittest's",
            pytrace=False,
        )
    for mark in item.iter_markers("requires"):
        if mark.args or not set(mark.kwargs) <= _REQUIREMENTS:
            got = ", ".join([*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())])
            raise pytest.UsageError(
                f"expected the mark requires with some of {', '.join(sorted(_REQUIREMENTS))}, got requires({got})"
            )
        reason = _lacking(item, **mark.kwargs)
        if reason:
            pytest.skip(reason)


def _size(item: pytest.Item) -> int | None:
    """The number of ranks of a test that has some."""
    callspec = getattr(item, "callspec", None)
    size: int | None = None if callspec is None else callspec.params.get(_SIZE)
    return size


def _lacking(
    item: pytest.Item,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    multiple_of: int = 1,
    cpus: int = 0,
    gpus: int = 0,
    backend: str | None = None,
) -> str | None:
    """Why the test can't be run here, if it can't."""
    size = _size(item)
    if size is not None and size < min_ranks:
        return f"needs at least {min_ranks} ranks, has {size}"
    if size is not None and max_ranks is not None and size > max_ranks:
        return f"needs at most {max_ranks} ranks, has {size}"
    if size is not None and size % multiple_of:
        return f"needs a multiple of {multiple_of} ranks, has {size}"
    if cpus > (found := len(os.sched_getaffinity(0))):
        return f"needs {cpus} CPUs, has {found}"
    if not gpus and backend is None:
        return None
    import torch

    if gpus > (found := torch.cuda.device_count()):
        return f"needs {gpus} GPUs, has {found}"
    if backend is not None and not torch.distributed.is_backend_available(backend):
        return f"needs the backend {backend!r}, which this torch does not have"
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        sizes = _sizes(mark, metafunc.definition.nodeid)
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
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        pytest.fail("expected a plain function with the mark ranks, got one that is async", pytrace=False)
    from phalanx.testing.options import Options
    from phalanx.testing.runner import execute

    options, seeds = _options(pyfuncitem, mark)
    function = _function(pyfuncitem, options.get("processes", False))
    size: Any = _size(pyfuncitem)
    command = partial(_command, pyfuncitem)
    try:
        for seed in seeds:
            with _output_by_rank(pyfuncitem) as tell:
                execute(Options(function, size, **(options | {"seed": seed})), command, tell)
    except _OutcomeError as outcome:
        outcome.repeat()
    except pytest.skip.Exception as skipped:
        # Which rank it was does not matter.
        skipped.__notes__ = []
        raise
    return True


def _options(item: pytest.Item, mark: pytest.Mark) -> tuple[dict[str, Any], list[int | None]]:
    """The options of each run, and their seeds."""
    given = dict(mark.kwargs)
    num_seeds = given.pop("seeds", 1)
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise pytest.UsageError(f"expected options of the mark ranks among seeds, {', '.join(_OPTIONS)}, got {unknown}")
    if type(num_seeds) is not int or num_seeds < 1:
        raise pytest.UsageError(f"expected a number of seeds from 1 on in the mark ranks, got {num_seeds!r}")
    replay = item.config.getoption("--ranks-replay")
    if replay is not None:
        return given | {"schedule": None, "replay": replay, "check": False}, [None]
    if num_seeds > 1 and given.get("seed") is not None:
        raise pytest.UsageError("expected seeds or a seed in the mark ranks, got both")
    return given, list(range(num_seeds)) if num_seeds > 1 else [given.get("seed")]


def _command(item: pytest.Item, schedule: str) -> str:
    """To be given where pytest was started."""
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    test = "::".join([path, *item.nodeid.split("::")[1:]])
    return f"pytest {shlex.quote(test)} --ranks-replay={schedule}"


def _function(item: pytest.Function, processes: bool) -> Callable[[int, Any], None]:
    """The test function as what `run` takes."""
    names = item._fixtureinfo.argnames
    given = {name: item.funcargs[name] for name in names if name not in _OWN}
    if processes:
        given = {name: _sendable(name, value) for name, value in given.items()}
    return partial(_call_in_process if processes else _call, item.obj, given, [name for name in _OWN if name in names])


class _OwnMonkeyPatch:
    """Stands for the fixture monkeypatch in processes: each rank has one, which undoes what was done there."""


def _sendable(name: str, value: Any) -> Any:
    if isinstance(value, pytest.MonkeyPatch):
        return _OwnMonkeyPatch()
    try:
        pickle.dumps(value)
    except Exception as error:
        pytest.fail(
            f"expected fixtures that processes can be sent, got {name!r} ({error}): make what it gives inside the "
            "test, or run the ranks as threads",
            pytrace=False,
        )
    return value


def _call(function: Callable[..., Any], given: dict[str, Any], own: list[str], rank: int, world: Any) -> None:
    """The test function as a rank; at the top of the module, so that processes can be sent it."""
    __tracebackhide__ = True
    function(**given, **{name: {"rank": rank, "world": world}[name] for name in own})


def _call_in_process(
    function: Callable[..., Any], given: dict[str, Any], own: list[str], rank: int, world: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        given = {name: patch if isinstance(value, _OwnMonkeyPatch) else value for name, value in given.items()}
        try:
            _call(function, given, own, rank, world)
        except _OUTCOMES as outcome:
            raise _OutcomeError(type(outcome).__name__, str(outcome)) from None


class _OutcomeError(Exception):
    """What pytest.skip and its like raise, in a form that goes from process to process."""

    def repeat(self) -> None:
        kind, text = self.args
        again: Any = {"Skipped": pytest.skip, "Failed": pytest.fail, "XFailed": pytest.xfail}[kind]
        again("\n".join([text, *getattr(self, "__notes__", [])]) if kind == "Failed" else text)


def _sizes(mark: pytest.Mark, test: str) -> list[int]:
    if len(mark.args) != 1 or not isinstance(mark.args[0], (int, list, tuple)):
        raise pytest.UsageError(
            f"{test}: expected the mark ranks(number) or ranks([number, ...]), got ranks{mark.args}"
        )
    sizes = mark.args[0]
    return [sizes] if isinstance(sizes, int) else list(sizes)


def _require_mark(request: pytest.FixtureRequest, name: str) -> None:
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"expected the mark ranks on a test that takes {name!r}: @pytest.mark.ranks(2)", pytrace=False)


@contextmanager
def _output_by_rank(item: pytest.Item) -> Iterator[Callable[[int, str, str], None]]:
    """What ranks print becomes a section of the report for each of them. Gives a function that takes more of it."""
    routes = item.config.getoption("capture") != "no" and not _CAPTURING & set(getattr(item, "fixturenames", ()))
    routers = {"stdout": _Router(sys.stdout, routes), "stderr": _Router(sys.stderr, routes)}
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = routers.values()
    try:
        yield lambda rank, stream, text: routers[stream].add(rank, text)
    except BaseException:
        for name, router in routers.items():
            for number, text in sorted(router.texts.items()):
                item.add_report_section("call", name, f"rank {number}:\n{text.getvalue()}")
        raise
    finally:
        sys.stdout, sys.stderr = before


class _Router(io.TextIOBase):
    """Goes to the text of the rank that writes; what others write goes where it always went."""

    def __init__(self, others: Any, routes: bool) -> None:
        self.texts: dict[int, io.StringIO] = {}
        self._others = others
        # A test that captures what it prints looks where it always is.
        self._routes = routes

    def add(self, rank: int, text: str) -> None:
        """What a rank printed elsewhere."""
        if self._routes:
            self.texts.setdefault(rank, io.StringIO()).write(text)
        else:
            self._others.write(text)

    def write(self, text: str) -> int:
        from phalanx.testing.world import rank_here

        rank = rank_here() if self._routes else None
        self._others.write(text) if rank is None else self.add(rank, text)
        return len(text)

    def flush(self) -> None:
        self._others.flush()

    @property
    def encoding(self) -> Any:  # type: ignore[override]
        return self._others.encoding

    @property
    def buffer(self) -> Any:
        return self._others.buffer

    def fileno(self) -> int:
        return int(self._others.fileno())

    def isatty(self) -> bool:
        return bool(self._others.isatty())
