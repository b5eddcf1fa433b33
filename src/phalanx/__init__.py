"""Phalanx: process groups for PyTorch on one host.

Layout, from the top down; imports go downwards only (tests/unit/test_layers.py enforces it):

    commands/      the command `phalanx`, a verb a file
    reporters/     reports for people, made of records
    testing/       worlds of threads, for tests of distributed programs
    debug/         what outlives a job: black boxes, their folders, what they tell
    guards/        checks around groups of other backends
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
    from phalanx.guards.guarding import guard
    from phalanx.statistics import OpStatistics

__version__ = "0.2.0"

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
    "guard",
    "new_group",
    "process_group",
]


# Where the names are that are not errors.
_MODULES = {
    "OpStatistics": "phalanx.statistics",
    "ProcessGroup": "phalanx.group.process_group",
    "current_process_group": "phalanx.group.scope",
    "dump": "phalanx.debug.dumping",
    "guard": "phalanx.guards.guarding",
    "new_group": "phalanx.group.making",
    "process_group": "phalanx.group.scope",
}
_MAKES_GROUPS = ("ProcessGroup", "guard", "new_group")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "functional":
        # The import also sets the attribute, so this runs once.
        return importlib.import_module("phalanx.functional")
    if name in _MAKES_GROUPS:
        importlib.import_module("phalanx.debug.observing").install()
    return getattr(importlib.import_module(_MODULES.get(name, "phalanx.errors")), name)


# torch registers the backend when it is imported, unless that is switched off; the pytest plugin does not need torch.
if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    register()
