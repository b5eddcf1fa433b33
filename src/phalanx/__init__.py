"""Phalanx: process groups for PyTorch on one host.

Layout, from the top down; imports go downwards only (tests/unit/test_layers.py enforces it):

    commands/      the command `phalanx`, a verb a file
    reporters/     reports for people, made of records
    testing/       worlds of threads, for tests of distributed programs
    debug/         what outlives a job: black boxes, their folders, what they tell
    functional     differentiable forms of the collectives
    group/         the group itself, its Work, the adapter to torch.distributed
    collectives/   what each op means: arguments, signature, reference semantics
    transports/    how ranks meet
    _native, _core the C++ core: shared memory, waiting, kernels
    errors, types  shared by all

Importing the package registers the backend "phalanx" and nothing else: the rest is imported when it is first used, so
that `import torch`, which loads this module through its `torch.backends` entry point, stays as fast as it was.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from phalanx._autoload import register

if TYPE_CHECKING:
    from phalanx import functional
    from phalanx.debug.dumping import dump
    from phalanx.errors import (
        Aborted,
        CallTimeout,
        Deadlock,
        GroupError,
        InvalidCall,
        Mismatch,
        PeerLost,
        PhalanxError,
    )
    from phalanx.group.making import new_group
    from phalanx.group.process_group import ProcessGroup
    from phalanx.group.scope import current_process_group, process_group
    from phalanx.statistics import OpStatistics

__version__ = "0.1.0"

__all__ = [
    "Aborted",
    "CallTimeout",
    "Deadlock",
    "GroupError",
    "InvalidCall",
    "Mismatch",
    "OpStatistics",
    "PeerLost",
    "PhalanxError",
    "ProcessGroup",
    "current_process_group",
    "dump",
    "functional",
    "new_group",
    "process_group",
]


def __getattr__(name: str) -> Any:
    if name == "ProcessGroup":
        from phalanx.debug.observing import install
        from phalanx.group.process_group import ProcessGroup

        install()
        return ProcessGroup
    if name == "new_group":
        from phalanx.debug.observing import install
        from phalanx.group.making import new_group

        install()
        return new_group
    if name in ("current_process_group", "process_group"):
        import phalanx.group.scope

        return getattr(phalanx.group.scope, name)
    if name == "functional":
        # The import also sets the attribute, so this runs once.
        return importlib.import_module("phalanx.functional")
    if name == "dump":
        from phalanx.debug.dumping import dump

        return dump
    if name == "OpStatistics":
        from phalanx.statistics import OpStatistics

        return OpStatistics
    if name in __all__:
        import phalanx.errors

        return getattr(phalanx.errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# torch registers the backend when it is imported, unless that is switched off; the pytest plugin does not need torch.
if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    register()
