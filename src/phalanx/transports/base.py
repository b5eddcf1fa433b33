"""What a group asks of a transport. A factory makes transports (factory.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.futures import Future

from phalanx.errors import CallTimeout, PhalanxError
from phalanx.statistics import OpStatistics
from phalanx.transports.identities import Identity
from phalanx.transports.quick import Quick
from phalanx.transports.refusals import Refusal
from phalanx.types import Call, GroupInfo, Store

__all__ = ["BaseTransport", "Exchange", "Pending", "Scheduler", "Transport"]

# Gives every rank of a group the texts of all ranks.
Exchange = Callable[[str], list[str]]


class Pending(Protocol):
    """A call under way. It keeps the memory that the call uses."""

    @property
    def ended(self) -> bool:
        """Whether `deliver_or_raise` would return or raise at once."""

    def poll(self) -> bool:
        """`ended`, for a caller that may ask again and again: where ranks take turns, others go on for a while."""

    @property
    def source(self) -> int:
        """The sender of a message that was received."""

    def wait(self, timeout: float | None) -> bool:
        """Waits until the call has ended; False where the timeout came first. Raises KeyboardInterrupt and the like.

        Where the call has ended well this has delivered what it wrote, too.
        """

    def now(self) -> float:
        """Seconds, on the clock by which timeouts go."""

    def explain_waiting(self, seconds: float) -> CallTimeout:
        """The error for a wait that was given up while the call goes on."""

    def deliver(self) -> None:
        """Once the call has ended: has what it wrote in the caller's tensors, and finds out why it failed."""

    def deliver_or_raise(self) -> None:
        """`deliver`, and raises what made the call fail; the same each time."""

    def call_when_ended(self, callback: Callable[[], None]) -> None:
        """Has it called once the call has ended: at once if it has, else in a thread of which callbacks may make use.

        To be asked once. Keeps all that the callback refers to.
        """

    def drop(self) -> None:
        """Nobody waits for the call any more: what it uses is kept, and what it wrote comes back, all the same."""

    def make_future(self, wait: Callable[[], None]) -> Future[Any]:
        """A future that the caller completes when the call has ended. `wait` waits for the call."""


class Ending(Protocol):
    """What a process has to end before it ends itself: one rank's end of a group."""

    # Whether each rank is a process: the group is left when this process ends, and observers are told of the group.
    spans_processes: bool

    def say_last_words(self, text: str) -> None:
        """What peers are told of this rank when it has ended. The first words stay."""

    def complete(self, patience: float) -> None:
        """Before a rank leaves: waits for its calls in flight, to their end where all who take part have made them.

        A peer that has not made its side gets `patience` seconds for it, counted from the last call that ended.
        """

    def close(self, exiting: bool = False) -> None:
        """Leaves the group: peers that wait for a further call of this rank are told. Idempotent."""


class Transport(Ending, Protocol):
    """One rank's connection to the other ranks of a group.

    Calls are carried out one after another, messages side by side. Calls of one rank may come from any thread.
    """

    def run(self, call: Call, timeout: float) -> None:
        """Takes part in the op and returns when this rank's side is done.

        Raises Mismatch, CallTimeout, PeerLost or Aborted; after that the group is broken and every call says so.
        """

    def start(self, call: Call, timeout: float) -> Pending | None:
        """`run`, but returns at once. None: the call has finished already."""

    def start_message(self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float) -> Pending | None:
        """Sends the tensor to the peer, or receives it from the peer (ANY_SOURCE: from whoever comes first).

        None: it has finished already, which a receive from anybody never says.
        """

    def refuse(self, refusal: Refusal) -> None:
        """This rank did not make a call because its own arguments were wrong: peers that wait for it are told."""

    def catch_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Before the caller reads these tensors itself: waits for the collectives in flight that write to them."""

    def abort(self, reason: str) -> None:
        """Ends all waits of the group, on every rank, with Aborted. May be called from any thread."""

    @property
    def has_left(self) -> bool:
        """Whether this rank has left the group."""

    # How the ranks meet, in a word.
    kind: str

    @property
    def state(self) -> str:
        """Whether the group can be used, in a few words. Never waits."""

    def statistics(self) -> dict[str, OpStatistics]:
        """What the calls of this rank have taken, by op. Takes no lock. Empty in a forked child."""

    @property
    def level(self) -> int:
        """How much is compared between ranks."""

    @property
    def seq(self) -> int:
        """The seq of the last call of this rank; 0 before the first."""

    def split(
        self, info: GroupInfo | None, members: Sequence[int], propose: Exchange, exchange: Exchange
    ) -> Transport | None:
        """Makes smaller groups. None without `info`: this rank is in none of them.

        `members` are the ranks in this group of the new group that this rank is in. All ranks of this group take part.
        `propose` is called first and once; it raises where ranks do not agree about the groups.
        """

    # What only some transports have. `BaseTransport` has the neutral answers.

    @property
    def quick(self) -> Quick | None:
        """The native way of plain calls; None: all calls come to `run` and `start`."""

    @property
    def identities(self) -> Sequence[Identity]:
        """The processes of the ranks; empty where ranks are no processes that could be watched."""

    @property
    def folder(self) -> str:
        """The folder that the first rank offers to the job; empty: none."""

    def exclude_others(self) -> AbstractContextManager[object]:
        """Held during a call of several steps: the steps of two threads must not mix."""

    def check_whole(self, op: str) -> None:
        """Raises where the group is broken, or a rank is gone. For waits outside a call."""

    def words_of_left(self, rank: int) -> str | None:
        """The last words of a rank that has left; None: it has not left, or nobody knows."""

    def decline(self, store: Store, info: GroupInfo, timeout: float, error: PhalanxError) -> None:
        """Tells the ranks that make another group, of which this rank was to be one, that it does not come."""


class BaseTransport:
    """Neutral answers to what only some transports have."""

    __slots__ = ()

    spans_processes = False
    identities: Sequence[Identity] = ()
    folder: str = ""

    @property
    def quick(self) -> Quick | None:
        return None

    def exclude_others(self) -> AbstractContextManager[object]:
        return nullcontext()

    def check_whole(self, op: str) -> None:
        """A wait outside a call finds nothing wrong."""

    def words_of_left(self, rank: int) -> str | None:
        return None

    def decline(self, store: Store, info: GroupInfo, timeout: float, error: PhalanxError) -> None:
        """The other ranks find out by themselves."""


class Scheduler(Protocol):
    """Who runs when, where ranks are threads. What a rank waits for says when it has `ended`."""

    def now(self) -> float:
        """Seconds, on the run's own clock."""

    def point(self, *what: Any) -> None:
        """The caller is about to make a call, as described: others may go first, and faults happen here."""

    def pause(self) -> None:
        """Others may go on for a while."""

    def wait(self, awaited: Any, timeout: float | None) -> bool:
        """Lets others go on until it has ended; False: the time was up first. Raises what ends the run."""

    def wake(self, awaited: Any) -> None:
        """It has ended: the rank that waits for it can go on."""

    def at(self, seconds: float, expire: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Calls `expire` when so much time has gone by, unless it is over by then."""

    def call_as(self, rank: int, callback: Callable[[], None]) -> None:
        """Has it called in that rank's thread, when it waits or communicates next."""

    def interrupt(self, rank: int, error: BaseException) -> None:
        """That rank goes on with an exception where it waits or communicates next."""
