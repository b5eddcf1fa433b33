"""Lets a process end without the destructors of torch's libraries, which take 250 ms of CPU time.

Buffers of C's stdio are not flushed then.
"""

from __future__ import annotations

import ctypes

__all__ = ["skip_library_destructors"]


def skip_library_destructors() -> None:
    """Whatever is registered with `atexit` or `on_exit` from now on still runs. Forked processes inherit it."""
    libc = ctypes.CDLL(None)
    # Called with the exit status, in the reverse order of registering: before what the loaded libraries registered.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
