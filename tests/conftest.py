"""For all tests: how they are spread, the server that forks processes, the folder in which jobs leave black boxes."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator

import pytest

from freezing import freeze_loaded
from spreading import Spreading, place

_OWN = os.getpid()


def _remove(folder: str) -> None:
    # Not in the end of a forked child.
    if os.getpid() == _OWN:
        shutil.rmtree(folder, ignore_errors=True)


if "PHALANX_FOLDER" not in os.environ:
    os.environ["PHALANX_FOLDER"] = tempfile.mkdtemp(prefix="phalanx-tests-")
    atexit.register(_remove, os.environ["PHALANX_FOLDER"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: place(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Spreading:
    return Spreading(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and collected tests stay: whenever the garbage collector looked at them, a worker would lose 300 ms."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_loaded()
        gc.enable()


def pytest_collection_finish() -> None:
    # Collecting tests has imported it if one of them may fork.
    if "forking" in sys.modules:
        sys.modules["forking"].start_server()
