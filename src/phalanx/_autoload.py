"""Registers the backend.

Loaded by every `import torch` in an environment that has Phalanx, so it must be quick and must never fail: whatever
goes wrong is logged, and the error comes when the backend is asked for.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_logger = logging.getLogger("phalanx")


def register() -> None:
    """Makes `init_process_group("phalanx")` work. Calling it again changes nothing."""
    try:
        import torch.distributed as dist

        if not dist.is_available() or "PHALANX" in dist.Backend._plugins:
            return
        dist.Backend.register_backend("phalanx", _create, extended_api=True, devices=["cpu"])
    except Exception:
        if "torch" in sys.modules:
            _logger.warning('the backend "phalanx" could not be registered', exc_info=True)


def _create(options: Any, backend_options: Any) -> Any:
    # Imported here: what a group needs is not loaded by programs that make none.
    from phalanx.debug.observing import install
    from phalanx.group.registry import create

    install()
    return create(options, backend_options)
