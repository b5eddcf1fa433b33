"""What another user of the host can see of a job, and can't: docs/security.md says so.

Where this process can become another user (`users.py`), it tries. Else the owners and modes that decide are looked at.
"""

from __future__ import annotations

import ctypes
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Here, World

from phalanx.debug.own_box import own_box
from users import ANOTHER, can_be_another

_ATTACH = 16


def _stay(here: Here) -> None:
    os.environ["PHALANX_FOLDER"] = os.fspath(here.folder / "jobs")
    here.init()
    dist.all_reduce(torch.ones(1))
    here.tell((os.getpid(), own_box().path))
    here.hear()


def _attach(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(_ATTACH, pid, None, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _as_another_user(attempts: dict[str, Callable[[], Any]]) -> dict[str, bool]:
    """Which attempts succeed in a process of another user."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on: the child makes system calls only.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(ANOTHER, ANOTHER, ANOTHER)
        os.setresuid(ANOTHER, ANOTHER, ANOTHER)
        for attempt in attempts.values():
            try:
                attempt()
                os.write(theirs, b"1")
            except PermissionError:
                os.write(theirs, b"0")
            except BaseException:
                os.write(theirs, b"?")
        os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with open(ours) as file:
        answers = file.read()
    assert "?" not in answers
    return {name: answer == "1" for name, answer in zip(attempts, answers, strict=True)}


def test_another_user(tmp_path: Path) -> None:
    world = World(_stay, 2, tmp_path)
    (pid, path), _ = world.told(0), world.told(1)
    box = Path(path)
    process = Path(f"/proc/{pid}")
    # The segment has no name, and no number of an open file: only the mapping is left.
    links = [os.readlink(link) for link in (process / "fd").iterdir()]
    assert not any("memfd:phalanx" in link for link in links)
    assert "memfd:phalanx" in (process / "maps").read_text()
    for made, mode in ((box.parents[1], 0o700), (box.parent, 0o700), (box, 0o600), (box.parent / "lock", 0o600)):
        status = made.stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), mode)
    if can_be_another():
        # The folder of the tests must not be what keeps others out.
        for folder in list(box.parents)[2:-2]:
            folder.chmod(0o755)
        attempts: dict[str, Callable[[], Any]] = {
            "open files": lambda: os.listdir(process / "fd"),
            "memory map": lambda: (process / "maps").read_text(),
            "memory": lambda: os.open(process / "mem", os.O_RDONLY),
            "environment": lambda: (process / "environ").read_bytes(),
            "debugger": lambda: _attach(pid),
            "signal": lambda: os.kill(pid, 0),
            "jobs": lambda: os.listdir(box.parents[1]),
            "box": lambda: box.read_bytes(),
            "program": lambda: (process / "cmdline").read_bytes(),
            "state": lambda: (process / "stat").read_text(),
            "pidfd": lambda: os.pidfd_open(pid),
        }
        allowed = {name for name, succeeded in _as_another_user(attempts).items() if succeeded}
        assert allowed == {"program", "state", "pidfd"}
    world.tell_all(0, 1)
    assert [end.error for end in world.ends()] == [None, None]
