"""What a run is given: the arguments of `run` and of the pytest mark, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from phalanx.durations import read_timeout
from phalanx.testing.faults import Fault, check_faults
from phalanx.testing.schedules import Policy, RandomChoice, Replay, RoundRobin, decode
from phalanx.transports import threads

__all__ = ["STUCK_AFTER", "Options"]

STUCK_AFTER = 60.0

_SCHEDULES = ("round robin", "random", "free")


@dataclass
class Options:
    """`run` says what they mean."""

    function: Callable[..., Any]
    ranks: int
    seed: int | None = None
    schedule: str | None = None
    replay: str | None = None
    check: bool = False
    faults: Fault | Iterable[Fault] = ()
    init: bool = True
    timeout: timedelta | None = None
    stuck_after: float = STUCK_AFTER
    processes: bool = False

    def __post_init__(self) -> None:
        if threads.this_thread.run is not None:
            raise RuntimeError(
                "expected to be outside of a run, got a call from one of its ranks; runs can't be nested"
            )
        if type(self.ranks) is not int or self.ranks < 1:
            raise ValueError(f"expected at least one rank, got {self.ranks!r}")
        try:
            inspect.signature(self.function).bind(0, None)
        except TypeError as error:
            raise TypeError(f"expected a function that takes (rank, world), got {self.function!r}: {error}") from None
        if self.timeout is not None:
            try:
                read_timeout(self.timeout)
            except TypeError:
                raise ValueError(
                    f"expected a timeout as a datetime.timedelta above zero, got {self.timeout!r}"
                ) from None
        stuck_after: Any = self.stuck_after
        if isinstance(stuck_after, bool) or not isinstance(stuck_after, (int, float)) or not stuck_after > 0:
            raise ValueError(f"expected stuck_after as a number of seconds above zero, got {self.stuck_after!r}")
        # Anything but a fault is refused below.
        several = isinstance(self.faults, Iterable) and not isinstance(self.faults, Fault)
        self.faults = list(self.faults) if several else [self.faults]  # type: ignore[arg-type, list-item]
        self.faults_by_call = check_faults(self.faults, self.ranks)
        self._check_schedule()
        self.recorded = None if self.replay is None else decode(self.replay)
        if self.recorded is not None and self.recorded.ranks != self.ranks:
            raise ValueError(f"expected a schedule of {self.ranks} ranks, got one of {self.recorded.ranks}")

    def _check_schedule(self) -> None:
        if self.schedule not in (None, *_SCHEDULES):
            raise ValueError(f"expected a schedule of {', '.join(map(repr, _SCHEDULES))}, got {self.schedule!r}")
        if self.processes and (self.check or (self.seed, self.schedule, self.replay) != (None, None, None)):
            raise ValueError(
                "expected no schedule, seed, replay or check for ranks that are processes: they run freely"
            )
        if self.replay is not None and (self.seed is not None or self.schedule is not None):
            raise ValueError("expected a schedule to replay or a way to choose one, got both")
        if self.schedule == "free" and (self.check or self.seed is not None):
            raise ValueError("expected no seed or check for ranks that run freely")
        if self.schedule == "round robin" and self.seed is not None:
            raise ValueError("expected no seed for ranks that take turns one after another")

    def policy(self) -> Policy | None:
        """Who chooses; None: nobody, the ranks run freely."""
        if self.recorded is not None:
            return Replay(self.recorded.choices, self.recorded.at_calls)
        if self.schedule == "free":
            return None
        if self.schedule == "random" or self.seed is not None:
            return RandomChoice(0 if self.seed is None else self.seed)
        return RoundRobin()

    def call_to_replay(self, schedule: str) -> str:
        """What to call for the same run again."""
        name = getattr(self.function, "__qualname__", repr(self.function)).rpartition("<locals>.")[2]
        more = "" if self.init else ", init=False"
        more += f", faults={self.faults}" if self.faults else ""
        more += f", stuck_after={self.stuck_after:g}" if self.stuck_after != STUCK_AFTER else ""
        more += f", timeout={self.timeout!r}" if self.timeout is not None else ""
        return f"pt.run({name}, ranks={self.ranks}{more}, replay={schedule!r})"
