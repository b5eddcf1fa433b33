"""For all tests: jobs that fail on purpose leave their black boxes in a folder that goes with the run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

_OWN = os.getpid()


def _remove(folder: str) -> None:
    # Not in the end of a forked child.
    if os.getpid() == _OWN:
        shutil.rmtree(folder, ignore_errors=True)


if "PHALANX_FOLDER" not in os.environ:
    os.environ["PHALANX_FOLDER"] = tempfile.mkdtemp(prefix="phalanx-tests-")
    atexit.register(_remove, os.environ["PHALANX_FOLDER"])
