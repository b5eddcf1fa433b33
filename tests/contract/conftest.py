"""One pool of rank processes at a time: tests are ordered by group, and the next world size replaces the pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_pool import GROUPS, Pool, ThreadsPool

# What `make check` runs of this folder.
_SLICE = {"transport": "shm", "group": "world of 2"}


# What runs where ranks have the seats of others.
_WITH_OTHER_SEATS = ("world of 3", "world of 4", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = _is_in_slice if os.environ.get("PHALANX_CONTRACT") == "slice" else _is_chosen
    left_out = {id(item) for item in items if Path(__file__).parent in item.path.parents and not chosen(item)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def _is_chosen(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    params = {} if call is None else call.params
    return params.get("transport") != "seats" or params.get("group") in _WITH_OTHER_SEATS


def _is_in_slice(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    given = {} if call is None else {name: call.params.get(name) for name in _SLICE}
    return given == _SLICE and item.get_closest_marker("slow") is None


class Pools:
    def __init__(self, factory: pytest.TempPathFactory, transport: str) -> None:
        self._factory = factory
        self._transport = transport
        self._pool: Pool | ThreadsPool | None = None
        # One for all workers of a test run.
        base = factory.getbasetemp()
        self._answers = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "answers"
        self._answers.mkdir(exist_ok=True)

    def get(self, world_size: int) -> Pool | ThreadsPool:
        if self._pool is None or self._pool.world_size != world_size or not self._pool.usable:
            self.close()
            folder = self._factory.mktemp(f"world{world_size}-")
            if self._transport == "threads":
                self._pool = ThreadsPool(world_size, folder, self._answers)
            else:
                moves_seats = self._transport == "seats"
                self._pool = Pool(world_size, "phalanx", folder, self._answers, moves_seats=moves_seats)
        return self._pool

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


@pytest.fixture(scope="session", params=["shm", "threads", "seats"])
def transport(request: pytest.FixtureRequest) -> str:
    """`seats`: shm, with every rank in the seat of another one."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[Pools]:
    pools = Pools(tmp_path_factory, transport)
    yield pools
    pools.close()


@pytest.fixture(scope="session", params=GROUPS)
def group(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def run(pools: Pools, group: str) -> Callable[..., list[Any]]:
    """run(function, *args): what function(member, *args) returns on each rank of the group."""

    def run(function: Callable[..., Any], *args: object) -> list[Any]:
        return pools.get(GROUPS[group][0]).run(function, group, *args)

    return run


@pytest.fixture
def run_in_world(pools: Pools) -> Callable[..., list[Any]]:
    """run_in_world(size, function, *args): the same on each rank of a world of that size."""

    def run(size: int, function: Callable[..., Any], *args: object) -> list[Any]:
        return pools.get(size).run(function, f"world of {size}", *args)

    return run


@pytest.fixture
def passes(run: Callable[..., list[Any]]) -> Callable[..., None]:
    """passes(function, *args): runs one that returns how much it did and what went wrong, and fails with the latter."""

    def passes(function: Callable[..., tuple[int, list[str]]], *args: object) -> None:
        answers = run(function, *args)
        assert len({num_done for num_done, _ in answers}) == 1
        assert answers[0][0] > 0
        problems = [f"rank {rank}: {failure}" for rank, (_, failures) in enumerate(answers) for failure in failures]
        if problems:
            pytest.fail("\n".join([f"{len(problems)} or more of {answers[0][0]} failed", *problems]), pytrace=False)

    return passes
