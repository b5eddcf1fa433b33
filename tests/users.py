"""Another user of the host, for tests of what users can do to each other.

Root can give files away and become another user, but not as root of a user namespace that has no other users, as in a
rootless container. Tests try it, and else take the way that is there for everybody.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ANOTHER = 54321

_TRY = """
import os, sys
user = int(sys.argv[2])
os.chown(sys.argv[1], user, user)
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
"""


_TRY_LIMIT = """
import resource, threading
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    threading.Thread(target=int).start()
except RuntimeError:
    raise SystemExit(0)
raise SystemExit(1)
"""


@functools.cache
def can_be_another() -> bool:
    """Whether this process can give files away and become another user."""
    with tempfile.NamedTemporaryFile() as file:
        return _succeeds(_TRY, file.name, str(ANOTHER))


@functools.cache
def can_limit_threads() -> bool:
    """Threads of root itself have no limit; it must become another user to get one."""
    return can_be_another() or _succeeds(_TRY_LIMIT)


def _succeeds(program: str, *args: str) -> bool:
    command = [sys.executable, "-I", "-S", "-c", program, *args]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def give_away(*paths: Path) -> None:
    """Links themselves, where they are links. Only where `can_be_another`."""
    for path in paths:
        os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)


def seem_given_away(patch: pytest.MonkeyPatch, *paths: Path) -> None:
    """They belong to another user; where that can't be done, they seem to, for this process."""
    if can_be_another():
        give_away(*paths)
        return
    numbers = {path.lstat().st_ino for path in paths}

    def pretend(status: os.stat_result) -> os.stat_result:
        if status.st_ino not in numbers:
            return status
        return os.stat_result((*status[:4], ANOTHER, *status[5:10]))

    def patched(real: Any) -> Any:
        return lambda *args, **kwargs: pretend(real(*args, **kwargs))

    patch.setattr(os, "fstat", patched(os.fstat))
    patch.setattr(os, "stat", patched(os.stat))
