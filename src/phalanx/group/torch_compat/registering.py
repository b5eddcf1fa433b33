"""How a backend is registered with torch. Loaded by every `import torch`, so it loads nothing else."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch.distributed import Backend

__all__ = ["is_registered", "register_alone"]

# torch's experiment with groups as objects, which not every version has.
_ALONE = "torch.distributed._dist2"


def is_registered(name: str) -> bool:
    """Whether torch knows a backend of this name."""
    return name.upper() in Backend._plugins


def register_alone(name: str, create: Callable[..., Any]) -> None:
    """Has torch call `create` for groups without a world, if this version of torch has them."""
    if importlib.util.find_spec(_ALONE) is not None:
        importlib.import_module(_ALONE).register_backend(name, create)
