"""Each test's ranks are threads of this process, and then processes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
from run_ranks import RunRanks

import phalanx.testing as pt
from phalanx.testing import processes


@pytest.fixture(scope="module", autouse=True)
def _fresh_workers() -> None:
    """Workers stay, and torch keeps plans in them that name the groups of a mesh, for any mesh that is equal."""
    for workers in processes._idle.values():
        while workers:
            workers.pop().end()


@pytest.fixture(params=["threads", "processes"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    return partial(pt.run, processes=request.param == "processes", timeout=timedelta(seconds=60))
