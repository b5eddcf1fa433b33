"""The exception tree.

PhalanxError (torch.distributed.DistBackendError)
├── InvalidCall (ValueError)    this rank's arguments are wrong; nobody waited
│   └── InvalidType (TypeError) … of a class that the call does not take
├── Mismatch                    ranks disagree about a call
├── CallTimeout (TimeoutError)  a peer did not come in time
│   └── Deadlock                … and can't come any more: ranks wait for each other
├── PeerLost                    a peer left, died or raised
├── Aborted                     the group was aborted, here or on a peer
└── GroupError                  the group itself can't be made or used

Every error has a stable `code`, names group, rank, op and seq as far as they are known, says what was expected and
what came, and ends with the next thing to try.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import DistBackendError

from phalanx.printable import printable_lines

__all__ = [
    "REPORT_NOTE",
    "Aborted",
    "CallTimeout",
    "Deadlock",
    "GroupError",
    "InvalidCall",
    "InvalidType",
    "Mismatch",
    "PeerLost",
    "PhalanxError",
    "kind_of",
]

# What a note on an exception begins with that says where to read more; a folder follows.
REPORT_NOTE = "phalanx: all ranks: phalanx report "


class PhalanxError(DistBackendError):
    """Base of every error that Phalanx raises on purpose."""

    code: str = "PHALANX"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        group: str | None = None,
        rank: int | None = None,
        op: str | None = None,
        seq: int | None = None,
        hint: str | None = None,
    ) -> None:
        if code is not None:
            self.code = code
        self.group = group
        self.rank = rank
        self.op = op
        self.seq = seq
        self.hint = hint
        self.message = message
        super().__init__(self._render())

    def add_evidence(self, *lines: str) -> None:
        """Adds lines before the hint."""
        self.message = "\n".join([self.message, *lines])
        self.args = (self._render(),)

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes it stays as it is: made anew it would be rendered anew.
        return restored, (type(self), self.args, self.__dict__)

    def _render(self) -> str:
        where = []
        if self.op is not None:
            where.append(self.op)
        if self.seq is not None:
            where.append(f"seq {self.seq}")
        if self.group is not None:
            where.append(f"group {self.group!r}")
        if self.rank is not None:
            where.append(f"rank {self.rank}")
        head = f"[{self.code}]" + (f" {', '.join(where)}:" if where else "")
        text = f"{head} {self.message}"
        # Peers have their say in messages, and names may hold anything.
        return printable_lines(f"{text}\n  Next: {self.hint}" if self.hint else text)


def kind_of(name: str) -> type[PhalanxError]:
    """The class of an error that another rank has told of, by its name."""
    kinds = {kind.__name__: kind for kind in (*PhalanxError.__subclasses__(), Deadlock)}
    return kinds.get(name, GroupError)


def restored(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """An exception made of its parts: its class may take other arguments than it keeps."""
    # A class of several bases has the memory of the one that needs most.
    make = OSError.__new__ if issubclass(kind, OSError) else kind.__new__
    error = make(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidCall(PhalanxError, ValueError):
    """This rank's arguments are wrong. Raised before any peer waits, so the group stays usable."""

    code = "INVALID"


class InvalidType(InvalidCall, TypeError):
    """An argument is of a class that the call does not take."""


class Mismatch(PhalanxError):
    """Ranks disagree about a call of the same seq."""

    code = "MISMATCH"


class CallTimeout(PhalanxError, TimeoutError):
    """A peer did not come in time."""

    code = "MISSING"


class Deadlock(CallTimeout):
    """Ranks wait for each other, and none of them can go on.

    Between processes it is raised at the timeout of a call; in a run of threads at once, as time is virtual there.
    """

    code = "DEADLOCK"


class PeerLost(PhalanxError):
    """A peer that a call still needs has left the group or died.

    `peer` is its rank, `exception` the first exception that nobody caught there, where it is known, and `frames` its
    traceback, a line for each frame of the program, innermost last.
    """

    code = "PEER_LOST"
    peer: int | None = None
    exception: str | None = None
    frames: tuple[str, ...] = ()


class Aborted(PhalanxError):
    """The group was aborted, on this rank or on a peer."""

    code = "ABORTED"


class GroupError(PhalanxError):
    """The group can't be made, or can't be used any more in this process."""

    code = "GROUP"
