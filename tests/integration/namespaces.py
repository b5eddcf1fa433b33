"""Forks processes into namespaces of their own, as containers have them. They begin at once: torch is loaded."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import traceback
from collections.abc import Callable

import pytest

__all__ = ["Forked", "hide_mounts", "mount_shm", "need_namespaces"]

_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def need_namespaces() -> None:
    """Skips the test where the system does not let this user make namespaces."""
    command = [
        "unshare",
        *([] if os.geteuid() == 0 else ["--map-root-user"]),
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
    ]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"this system does not let the tests run {' '.join(command)}")


def hide_mounts() -> None:
    """From now on, what this process and its children mount is seen by nobody else."""
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWNS | (0 if user == 0 else _CLONE_NEWUSER)), "unshare")
    if user != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount(b"/", b"", _MS_REC | _MS_PRIVATE)


def mount_shm(size: str) -> None:
    """An empty /dev/shm of this size. After `hide_mounts`."""
    _mount(b"/dev/shm", b"tmpfs", 0, f"size={size}".encode())


class Forked:
    """A child that runs a function, whose text `result` gives. With `own_processes` it sees no others in /proc."""

    def __init__(self, function: Callable[[], str], *, own_processes: bool = False) -> None:
        self._read, write = os.pipe()
        self._pid = _fork()
        if self._pid == 0:
            try:
                if own_processes:
                    _enter_own_processes()
                text = function()
            except BaseException:
                text = traceback.format_exc()
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)

    def result(self) -> str:
        with open(self._read, closefd=True) as pipe:
            text = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        return text if status == 0 else f"{text}ended with exit code {os.waitstatus_to_exitcode(status)}"


def _enter_own_processes() -> None:
    """Goes on in a child of this process, the first one of a namespace of processes."""
    hide_mounts()
    _check(_libc.unshare(_CLONE_NEWPID), "unshare")
    child = _fork()
    if child != 0:
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    _mount(b"/proc", b"proc", 0)


def _fork() -> int:
    pid = os.fork()
    if pid == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return pid


def _mount(target: bytes, kind: bytes, flags: int, options: bytes = b"") -> None:
    _check(_libc.mount(b"none", target, kind, ctypes.c_ulong(flags), options), f"mount {target.decode()}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
