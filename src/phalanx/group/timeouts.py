"""Timeouts of groups: which make sense, and which were not asked for."""

from __future__ import annotations

import math
from datetime import timedelta

from phalanx.errors import GroupError
from phalanx.group.torch_compat import UNSET_TIMEOUT
from phalanx.transports import threads

__all__ = ["DEFAULT_TIMEOUT", "check_timeout", "seconds_to_join"]

DEFAULT_TIMEOUT = timedelta(minutes=30)


def seconds_to_join(timeout: timedelta) -> float:
    """Among threads nothing but a timeout that was asked for ends a wait: what else would is found as a deadlock."""
    unset = timeout is DEFAULT_TIMEOUT or timeout == UNSET_TIMEOUT
    return math.inf if unset and threads.place.world is not None else timeout.total_seconds()


def check_timeout(timeout: timedelta, name: str) -> None:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise GroupError(
            f"expected a timeout above zero, got {timeout!r}", group=name, hint="pass a positive datetime.timedelta"
        )
