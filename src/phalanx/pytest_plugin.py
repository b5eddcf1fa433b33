"""The pytest plugin: tests that run as several ranks.

    @pytest.mark.ranks([2, 4], seeds=20)
    def test_step(rank, world): ...

Loaded by every pytest in an environment that has Phalanx, so nothing of torch is imported before a test asks for it.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import pickle
import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

_SIZE = "_phalanx_ranks"
_OWN = ("rank", "world")
# What is wrong with marks of tests in a file or class, by mark.
_PROBLEMS = pytest.StashKey[dict[int, str]]()
# The least numbers that the mark requires takes.
_LEAST = {"min_ranks": 1, "max_ranks": 1, "multiple_of": 1, "cpus": 0, "gpus": 0}
_OUTCOMES = (pytest.skip.Exception, pytest.fail.Exception, pytest.xfail.Exception)
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
    _require_mark(item)
    if item.get_closest_marker("ranks") is not None and _size(item) is None:
        pytest.fail(
            "expected the mark ranks on a function or on a method of a plain class, got it on one of unittest's",
            pytrace=False,
        )
    for mark in item.iter_markers("requires"):
        try:
            reason = _lacking(item, **_read_requires(mark.args, mark.kwargs))
        except ValueError as error:
            # Tests of unittest are not seen when they are collected.
            pytest.fail(f"mark requires: {error}", pytrace=False)
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
    definition = metafunc.definition
    for requirement in definition.iter_markers("requires"):
        _read_mark(definition, requirement, _read_requires)
    mark = definition.get_closest_marker("ranks")
    if mark is None:
        return
    from phalanx.testing.marks import read_ranks

    sizes = _read_mark(definition, mark, read_ranks)
    if sizes is not None:
        metafunc.fixturenames.append(_SIZE)
        metafunc.parametrize(_SIZE, sizes, ids=[f"{size} ranks" if size != 1 else "1 rank" for size in sizes])


def _read_mark(test: pytest.Item, mark: pytest.Mark, read: Callable[..., Any]) -> Any:
    """What the mark says; None where it is wrong, which is told when all tests of the file or class are collected."""
    try:
        return read(mark.args, mark.kwargs)
    except ValueError as error:
        assert test.parent is not None
        # Once for a mark of many tests.
        test.parent.stash.setdefault(_PROBLEMS, {}).setdefault(id(mark), f"{test.nodeid}: mark {mark.name}: {error}")
        return None


def _read_requires(args: tuple[Any, ...], given: Mapping[str, Any]) -> Mapping[str, Any]:
    got = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in given.items())])
    if args or not set(given) <= {"backend", *_LEAST}:
        raise ValueError(f"expected some of {', '.join(['backend', *_LEAST])}, got requires({got})")
    for name, least in _LEAST.items():
        value = given.get(name, least)
        # The one number that may be missing.
        if (type(value) is not int or value < least) and (name, value) != ("max_ranks", None):
            raise ValueError(f"expected {name} as a number from {least} on, got {value!r}")
    return given


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    problems = collector.stash.get(_PROBLEMS, {})
    if problems and report.passed:
        # An exception would be told with frames of pytest, and alone.
        report.outcome, report.result, report.longrepr = "failed", [], "\n".join(problems.values())
    return report


class _Each:
    """Stands for a value that each rank has of its own, where the arguments of a test are shown."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<each rank's {self._name}>"


# Of the session: what they give has no state, and Hypothesis refuses fixtures that are made once per test.
@pytest.fixture(scope="session")
def rank() -> _Each:
    """In a test with the mark `ranks`: which rank this is."""
    return _Each("number")


@pytest.fixture(scope="session")
def world() -> _Each:
    """In a test with the mark `ranks`: the world of its ranks."""
    return _Each("world")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    options, seeds = _options(pyfuncitem, mark)
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    own = [name for name in _OWN if name in names]
    run = partial(_run, pyfuncitem, options, seeds, own)
    test = pyfuncitem.obj
    if getattr(test, "is_hypothesis_test", False):
        from phalanx.testing.examples import for_each_example

        with for_each_example(test, pyfuncitem.nodeid, run, options.get("processes", False)):
            _call_trimmed(pyfuncitem, partial(test, **given))
    else:
        _call_trimmed(pyfuncitem, partial(run, test, given))
    return True


def _run(
    item: pytest.Function,
    options: dict[str, Any],
    seeds: list[int | None],
    own: list[str],
    test: Callable[..., Any],
    given: dict[str, Any],
) -> None:
    """Runs the test function as all ranks, under each of the schedules."""
    __tracebackhide__ = True
    from phalanx.testing.options import Options
    from phalanx.testing.runner import execute

    given = {name: value for name, value in given.items() if name not in own}
    function = _function(test, given, own, options.get("processes", False))
    size: Any = _size(item)
    try:
        for seed in seeds:
            with _output_by_rank(item) as tell:
                execute(Options(function, size, **(options | {"seed": seed})), partial(_command, item), tell)
    except _OutcomeError as outcome:
        outcome.repeat()
    except pytest.skip.Exception as skipped:
        # Which rank it was does not matter.
        skipped.__notes__ = []
        raise


def _call_trimmed(item: pytest.Function, call: Callable[[], Any]) -> None:
    """Calls it. Errors of Phalanx lose the frames of torch and of Phalanx."""
    __tracebackhide__ = True
    try:
        call()
    except Exception as error:
        if not item.config.getoption("fulltrace", False):
            from phalanx.testing.tracebacks import trim

            trim(error)
        raise


def _options(item: pytest.Item, mark: pytest.Mark) -> tuple[dict[str, Any], list[int | None]]:
    """The options of each run, and their seeds."""
    given = {name: value for name, value in mark.kwargs.items() if name != "sizes"}
    num_seeds = given.pop("seeds", 1)
    replay = item.config.getoption("--ranks-replay")
    if replay is not None:
        return given | {"schedule": None, "replay": replay, "check": False}, [None]
    return given, list(range(num_seeds)) if num_seeds > 1 else [given.get("seed")]


def _command(item: pytest.Item, schedule: str) -> str:
    """To be given where pytest was started."""
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    test = "::".join([path, *item.nodeid.split("::")[1:]])
    return f"pytest {shlex.quote(test)} --ranks-replay={schedule}"


def _function(
    test: Callable[..., Any], given: dict[str, Any], own: list[str], processes: bool
) -> Callable[[int, Any], None]:
    """The test function as what `run` takes."""
    if processes:
        given = {name: _sendable(name, value) for name, value in given.items()}
    return partial(_call_in_process if processes else _call, test, given, own)


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
    result = function(**given, **{name: {"rank": rank, "world": world}[name] for name in own})
    if inspect.iscoroutine(result):
        # Each rank has a loop of its own.
        asyncio.run(result)


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


def _require_mark(item: pytest.Item) -> None:
    """For tests that take our fixtures; somebody else may have some of the same names."""
    info = getattr(item, "_fixtureinfo", None)
    if info is None or item.get_closest_marker("ranks") is not None:
        return
    for name in _OWN:
        found = info.name2fixturedefs.get(name)
        if found and getattr(found[-1].func, "__module__", "") == __name__:
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
