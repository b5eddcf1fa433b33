"""Each test's ranks are threads of this process, and then processes."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
from run_ranks import RunRanks

import phalanx.testing as pt


@pytest.fixture(params=["threads", "processes"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    return partial(pt.run, processes=request.param == "processes", timeout=timedelta(seconds=60))
