"""The server from which the tests fork processes that have torch loaded.

A fresh interpreter takes two seconds to import torch, a forked process has it at once. multiprocessing has one such
server per process: rank processes of ranks.py and contract_pool.py, programs of programs.py and the workers of
`phalanx.testing` come from the same one. conftest.py starts it before the first test if one of them may need it, so
that what is loaded does not depend on which one comes first.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
from typing import Any

__all__ = ["context", "restore_tunables", "share_server", "start_server"]

_PRELOADED = [
    "pytest",
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "phalanx",
    "phalanx.debug.observing",
    "phalanx.group.process_group",
    "phalanx.group.registry",
    "phalanx.testing.worker",
    # Last.
    "forked_from",
]

context = multiprocessing.get_context("forkserver")
_server: Any = multiprocessing.forkserver._forkserver


# glibc asks for large pages: a fork of 200 MiB then copies a fraction of the page tables, in half the time.
_TUNABLES = "glibc.malloc.hugetlb=1"


def start_server() -> None:
    context.set_forkserver_preload(_PRELOADED)
    given = os.environ.get("GLIBC_TUNABLES")
    os.environ["GLIBC_TUNABLES"] = f"{given}:{_TUNABLES}" if given else _TUNABLES
    try:
        _server.ensure_running()
    finally:
        restore_tunables()


def restore_tunables() -> None:
    """In this process, and in the server: programs that the tests start do not inherit what only the server needs."""
    given = os.environ.get("GLIBC_TUNABLES", "").removesuffix(_TUNABLES).removesuffix(":")
    if given:
        os.environ["GLIBC_TUNABLES"] = given
    else:
        os.environ.pop("GLIBC_TUNABLES", None)


def share_server() -> None:
    """Lets a process that was forked from the server fork others from it, instead of starting its own server."""
    # It was told the server's address, and that there is no process to look after.
    _server.ensure_running = lambda: None
