"""For all tests: the server that forks processes, and the folder in which jobs that fail leave their black boxes."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile

_OWN = os.getpid()


def _remove(folder: str) -> None:
    # Not in the end of a forked child.
    if os.getpid() == _OWN:
        shutil.rmtree(folder, ignore_errors=True)


if "PHALANX_FOLDER" not in os.environ:
    os.environ["PHALANX_FOLDER"] = tempfile.mkdtemp(prefix="phalanx-tests-")
    atexit.register(_remove, os.environ["PHALANX_FOLDER"])


def pytest_collection_finish() -> None:
    # Collecting tests has imported it if one of them may fork.
    if "forking" in sys.modules:
        sys.modules["forking"].start_server()
