"""Limits of the system for a rank, and room up to them."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

MIB = 1024 * 1024
MOST_HANDLES = 256


def set_limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    set_limit(kind, value)
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def fill_handles(free: int) -> None:
    """Leaves so many numbers for open files."""
    set_limit(resource.RLIMIT_NOFILE, MOST_HANDLES)
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(2))
    for handle in held[len(held) - free :]:
        os.close(handle)
