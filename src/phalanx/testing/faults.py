"""Faults that a run is given: what happens to a rank when it comes to one of its calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

__all__ = [
    "Delay",
    "Fail",
    "Fault",
    "Kill",
    "check_all_happened",
    "check_faults",
    "delay",
    "fail",
    "kill",
    "let_happen",
]


@dataclass(frozen=True)
class Fault:
    """Happens to `rank` instead of, or before, its call number `at_call`, counted from 1 over all its groups."""

    rank: int
    at_call: int


@dataclass(frozen=True, repr=False)
class Kill(Fault):
    """The rank is gone, as after a SIGKILL: it says nothing, and nothing of it runs while others are observed."""

    def __repr__(self) -> str:
        return f"pt.kill({self.rank}, at_call={self.at_call})"


@dataclass(frozen=True, repr=False)
class Delay(Fault):
    """The rank comes later, by so many seconds of the run's own time."""

    seconds: float

    def __repr__(self) -> str:
        return f"pt.delay({self.rank}, at_call={self.at_call}, seconds={self.seconds!r})"


@dataclass(frozen=True, repr=False)
class Fail(Fault):
    """The rank raises the error, or one of that class."""

    error: BaseException | type[BaseException]

    def __repr__(self) -> str:
        error = self.error.__name__ if isinstance(self.error, type) else repr(self.error)
        return f"pt.fail({self.rank}, at_call={self.at_call}, error={error})"

    def make(self) -> BaseException:
        """One for each time: exceptions gather what happens to them."""
        if isinstance(self.error, type):
            return self.error()
        try:
            return copy(self.error)
        except Exception:
            return self.error


def kill(rank: int, at_call: int = 1) -> Kill:
    return Kill(rank, at_call)


def delay(rank: int, at_call: int, seconds: float) -> Delay:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ValueError(f"expected a delay as a number of seconds, got {seconds!r}")
    return Delay(rank, at_call, seconds)


def fail(rank: int, at_call: int, error: BaseException | type[BaseException]) -> Fail:
    if not isinstance(error, BaseException) and not (isinstance(error, type) and issubclass(error, BaseException)):
        raise TypeError(f"expected an exception for a rank to raise, got {error!r}")
    return Fail(rank, at_call, error)


def check_faults(faults: Iterable[Fault], ranks: int) -> dict[tuple[int, int], list[Fault]]:
    """By rank and call."""
    found: dict[tuple[int, int], list[Fault]] = {}
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"expected faults made by kill, delay or fail, got {fault!r}")
        if not 0 <= fault.rank < ranks:
            raise ValueError(f"expected a fault of a rank between 0 and {ranks - 1}, got {fault!r}")
        if type(fault.at_call) is not int or fault.at_call < 1:
            raise ValueError(f"expected a fault at a call from 1 on, got {fault!r}")
        found.setdefault((fault.rank, fault.at_call), []).append(fault)
    return found


def let_happen(faults: Iterable[Fault], sleep: Callable[[float], None], die: Callable[[], None]) -> None:
    """At a call, one after another."""
    for fault in faults:
        if isinstance(fault, Fail):
            raise fault.make()
        if isinstance(fault, Delay):
            sleep(fault.seconds)
        else:
            die()


def check_all_happened(faults: Mapping[tuple[int, int], list[Fault]], num_calls: Sequence[int]) -> None:
    """Of a run that ended well: a test of a fault that never happened tests nothing."""
    for (rank, call), planned in faults.items():
        if call > num_calls[rank]:
            raise ValueError(
                f"expected rank {rank} to come to its call {call}, where {planned[0]!r} was to happen; it made "
                f"{num_calls[rank]}"
            )
