"""How a backend is registered with torch. Loaded by every `import torch`, so it loads nothing else."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch.distributed import Backend, distributed_c10d

__all__ = ["before_first_group", "is_registered", "register_alone"]

# torch's experiment with groups as objects, which not every version has.
_ALONE = "torch.distributed._dist2"
# What makes every group of torch.distributed.
_HELPER = "_new_process_group_helper"


def is_registered(name: str) -> bool:
    """Whether torch knows a backend of this name."""
    return name.upper() in Backend._plugins


def before_first_group(prepare: Callable[[], None]) -> None:
    """Calls `prepare` just before torch makes its next group."""
    make = getattr(distributed_c10d, _HELPER)
    if hasattr(make, "prepares_phalanx"):
        return

    @functools.wraps(make)
    def prepare_and_make(*args: Any, **kwargs: Any) -> Any:
        if getattr(distributed_c10d, _HELPER) is prepare_and_make:
            setattr(distributed_c10d, _HELPER, make)
            prepare()
        return getattr(distributed_c10d, _HELPER)(*args, **kwargs)

    prepare_and_make.prepares_phalanx = True  # type: ignore[attr-defined]
    setattr(distributed_c10d, _HELPER, prepare_and_make)


def register_alone(name: str, create: Callable[..., Any]) -> None:
    """Has torch call `create` for groups without a world, if this version of torch has them."""
    if importlib.util.find_spec(_ALONE) is not None:
        importlib.import_module(_ALONE).register_backend(name, create)
