"""The server from which the tests fork processes that have torch loaded.

A fresh interpreter takes two seconds to import torch, a forked process has it at once. multiprocessing has one such
server per process: rank processes of ranks.py and contract_pool.py, programs of programs.py and the workers of
`phalanx.testing` come from the same one. conftest.py starts it before the first test if one of them may need it, so
that what is loaded does not depend on which one comes first.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
from typing import Any

__all__ = ["context", "share_server", "start_server"]

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
    # Last: what is loaded by then is never garbage.
    "freezing",
]

context = multiprocessing.get_context("forkserver")
_server: Any = multiprocessing.forkserver._forkserver


def start_server() -> None:
    context.set_forkserver_preload(_PRELOADED)
    _server.ensure_running()


def share_server() -> None:
    """Lets a process that was forked from the server fork others from it, instead of starting its own server."""
    # It was told the server's address, and that there is no process to look after.
    _server.ensure_running = lambda: None
