"""Timeouts, as every entry point takes them: a `timedelta` above zero, as torch.distributed's own functions do.

30 years or more mean no limit, so `timedelta.max` does. Zero, negative values and everything that is no timedelta are
refused: where a group is made or its timeout is set with GroupError, in a call with InvalidCall. Two values are torch's
own words for "no timeout was given": `timedelta(milliseconds=-1)` in an options object (`spellings.timing_of`), and
zero in `Work.wait`.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

from phalanx.durations import read_timeout
from phalanx.errors import GroupError, InvalidCall, InvalidType
from phalanx.group.torch_compat.worlds import UNSET_TIMEOUT
from phalanx.transports import threads
from phalanx.types import GroupInfo

__all__ = ["DEFAULT_TIMEOUT", "check_timeout", "seconds_of", "seconds_to_join", "wait_seconds"]

DEFAULT_TIMEOUT = timedelta(minutes=30)
_ZERO = timedelta(0)


def seconds_of(timeout: timedelta | None, info: GroupInfo, op: str) -> float | None:
    """Of one call; None where no timeout was given."""
    if timeout is None:
        return None
    try:
        return read_timeout(timeout)
    except (TypeError, ValueError) as error:
        raise _invalid(error, timeout, op, info.name, info.rank) from None


def wait_seconds(timeout: timedelta | None) -> float | None:
    """Of a wait for a call that is under way; None where there is no limit."""
    if timeout is None or timeout == _ZERO:
        return None
    try:
        seconds = read_timeout(timeout)
    except (TypeError, ValueError) as error:
        raise _invalid(error, timeout, "wait") from None
    return None if seconds == math.inf else seconds


def check_timeout(timeout: timedelta, name: str) -> float:
    """Of a group, in seconds."""
    try:
        return read_timeout(timeout)
    except TypeError:
        text = f"expected a timeout above zero, as a datetime.timedelta, got {timeout!r}"
    except ValueError as error:
        text = str(error)
    raise GroupError(text, group=name, hint=_hint(timeout))


def seconds_to_join(timeout: timedelta, name: str) -> float:
    """Among threads nothing but a timeout that was asked for ends a wait: what else would is found as a deadlock."""
    seconds = check_timeout(timeout, name)
    unset = timeout is DEFAULT_TIMEOUT or timeout == UNSET_TIMEOUT
    return math.inf if unset and threads.this_thread.run is not None else seconds


def _invalid(error: Exception, timeout: Any, op: str, group: str | None = None, rank: int | None = None) -> InvalidCall:
    kind = InvalidType if isinstance(error, TypeError) else InvalidCall
    return kind(str(error), code="INVALID:TIMEOUT", group=group, rank=rank, op=op, hint=_hint(timeout))


def _hint(timeout: Any) -> str:
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0:
        try:
            if timedelta(seconds=timeout) > _ZERO:
                return f"pass datetime.timedelta(seconds={timeout!r})"
        except OverflowError:
            return "pass datetime.timedelta.max, which means no limit"
    return "pass a positive datetime.timedelta; timedelta.max means no limit"
