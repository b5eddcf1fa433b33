"""Registers the backend.

Loaded by every `import torch` in an environment that has Phalanx, so it must be quick and must never fail: whatever
goes wrong is logged, and the error comes when the backend is asked for.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

# The versions of torch that the suite runs on: from the first up to, and without, the second.
TORCH_VERSIONS = ((2, 13), (2, 16))

# Whether every group is guarded (guards/settings.py): without it nothing of guards is loaded.
_GUARD = "PHALANX_GUARD"
_logger = logging.getLogger("phalanx")


def register() -> None:
    """Makes `init_process_group("phalanx")` work. Calling it again changes nothing.

    Raises ValueError for an unknown word in PHALANX_GUARD: a program that asks for checks must not run without them.
    """
    _register()
    if os.environ.get(_GUARD) and "torch" in sys.modules:
        _guard_if_asked()


def _register() -> None:
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            return
        from phalanx.group.torch_compat import registering

        if registering.is_registered("phalanx"):
            return
        _check_version(torch.__version__)
        if sys.version_info >= (3, 13):
            from phalanx import children

            children.watch()
        dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu"])
        registering.register_alone("phalanx", _create_alone)
    except Exception:
        if "torch" in sys.modules:
            _logger.warning('the backend "phalanx" could not be registered', exc_info=True)


def _guard_if_asked() -> None:
    import torch.distributed as dist

    from phalanx.guards import settings

    if not settings.is_asked() or not dist.is_available():
        return
    from phalanx.group.torch_compat import registering

    def prepare() -> None:
        from phalanx.debug.observing import install
        from phalanx.guards.guarding import guard_all

        install()
        guard_all()

    registering.before_first_group(prepare)


def _check_version(version: str) -> None:
    # Logged, not warned: with `-W error` a warning would keep the backend from being registered.
    numbers = re.match(r"(\d+)\.(\d+)", version)
    first, end = TORCH_VERSIONS
    if numbers and not first <= (int(numbers[1]), int(numbers[2])) < end:
        supported = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
        _logger.warning("phalanx supports torch %s, not torch %s: its groups may fail", supported, version)


def _create(options: Any, backend_options: Any) -> Any:
    # Imported here: what a group needs is not loaded by programs that make none.
    from phalanx.debug.observing import install
    from phalanx.group.registry import create

    install()
    return create(options, backend_options)


def _create_alone(store: Any, rank: int, world_size: int, timeout: Any, device: Any, **options: Any) -> Any:
    from phalanx.debug.observing import install
    from phalanx.group.registry import create_alone

    install()
    return create_alone(store, rank, world_size, timeout, device, options)
