"""The server from which the tests fork processes that have torch loaded.

A fresh interpreter takes two seconds to import torch, a forked process has it at once. multiprocessing has one such
server per process: rank processes of ranks.py and contract_pool.py, programs of programs.py and the workers of
`phalanx.testing` come from the same one. conftest.py starts it before the first test if one of them may need it, so
that what is loaded does not depend on which one comes first.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
from typing import Any

__all__ = ["context", "restore_environment", "share_server", "start_server"]

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


# What only the server needs. glibc asks for large pages: a fork of 200 MiB then copies a fraction of the page tables,
# in half the time. Python 3.11 starts a server without the paths of its parent: it would not find modules of the tests.
_OWN_ENVIRONMENT = {
    "GLIBC_TUNABLES": ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.hugetlb=1"])),
    "PYTHONPATH": os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")])),
}
# Holds what these variables had before.
_BEFORE = "TESTS_ENVIRONMENT_BEFORE"


def start_server() -> None:
    context.set_forkserver_preload(_PRELOADED)
    os.environ[_BEFORE] = json.dumps({name: os.environ.get(name) for name in _OWN_ENVIRONMENT})
    os.environ.update(_OWN_ENVIRONMENT)
    try:
        _server.ensure_running()
    finally:
        restore_environment()


def restore_environment() -> None:
    """In this process, and in the server: ranks and what they start do not inherit what only the server needs."""
    for name, value in json.loads(os.environ.pop(_BEFORE, "{}")).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def share_server() -> None:
    """Lets a process that was forked from the server fork others from it, instead of starting its own server."""
    # It was told the server's address, and that there is no process to look after.
    _server.ensure_running = lambda: None
