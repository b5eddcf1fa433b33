"""The group: an identity, a transport and a timeout. Plain Python; torch's spellings live in process_group.py."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from phalanx import _native
from phalanx.collectives import texts
from phalanx.errors import InvalidCall, Mismatch, PhalanxError
from phalanx.group import endings
from phalanx.group.sparse import all_reduce_sparse, entries_of
from phalanx.statistics import OpStatistics
from phalanx.transports import splitting, threads
from phalanx.transports.base import Pending, Transport
from phalanx.transports.hooks import observer
from phalanx.transports.identities import Identity
from phalanx.transports.refusals import Refusal
from phalanx.transports.rendezvous import Known, decline
from phalanx.transports.shm import ShmTransport, join
from phalanx.types import Call, GroupInfo, Store

# What stands for the transport of a group of processes that is made from now on: tests watch calls with it.
on_join: Callable[[ShmTransport], ShmTransport] | None = None


class Group:
    """One rank's view of a group. Calls may come from any thread; they are carried out one after another."""

    __slots__ = ("_looks_closely", "_timeout", "_transport", "identities", "info", "quick")

    def __init__(
        self, transport: Transport, info: GroupInfo, timeout: float, identities: Sequence[Identity] = ()
    ) -> None:
        self._transport = transport
        self._looks_closely = transport.check == _native.CHECK_FULL
        self.info = info
        # The transport whose native front may carry out calls.
        self.quick: ShmTransport | None = None
        self.timeout = timeout
        # Who the ranks are, where they are processes.
        self.identities = identities

    @staticmethod
    def join(store: Store, info: GroupInfo, timeout: float, scope: str = "", known: Known | None = None) -> Group:
        """Meets the other ranks of the group through the store.

        Groups of one scope meet by their members, others by their name as well. `known` is what is known of the ranks.
        """
        run = threads.this_thread.run
        if run is not None:
            return Group(run.join(store, info, timeout, scope), info, timeout)
        return _ProcessesGroup.around(join(store, info, timeout, scope, known), info, timeout)

    @property
    def timeout(self) -> float:
        """Of calls that have none of their own, in seconds."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds
        if self.quick is not None:
            self.quick.front.timeout = seconds

    @property
    def seq(self) -> int:
        return self._transport.seq

    @property
    def has_left(self) -> bool:
        """Whether this rank has left the group."""
        return self._transport.has_left

    def describe(self) -> str:
        """Who this is and how it is, on one line."""
        info, transport = self.info, self._transport
        who = f"{info.name!r} rank {info.rank} of {info.size}"
        return f"{who}, {transport.kind}, seq {transport.seq}, {transport.state}"

    def statistics(self) -> dict[str, OpStatistics]:
        return self._transport.statistics()

    def run(self, call: Call, timeout: float | None = None) -> None:
        """Carries out one call and returns when this rank's side is done."""
        if self._looks_closely:
            self._look_at(call)
        self._transport.run(call, self.timeout if timeout is None else timeout)

    def start(self, call: Call, timeout: float | None = None) -> Pending | None:
        """Begins one call. None: it has finished already."""
        if self._looks_closely:
            self._look_at(call)
        return self._transport.start(call, self.timeout if timeout is None else timeout)

    def all_reduce_sparse(self, tensor: torch.Tensor, reduce_op: int, timeout: float | None = None) -> None:
        if tensor.layout is torch.sparse_coo:
            # Its entries are read before the first of the dense calls is made.
            self._transport.catch_up(entries_of(tensor))
        try:
            all_reduce_sparse(self.info, lambda call: self.run(call, timeout), tensor, reduce_op)
        except Mismatch:
            # The dense calls agreed, so the transport does not know of it.
            self.abort("ranks disagreed about a sparse tensor")
            raise

    def start_message(
        self, sends: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float | None
    ) -> Pending | None:
        """Begins to send to the peer, or to receive from it. None: it has finished already."""
        if timeout is None:
            timeout = self.timeout
        if self._looks_closely and sends:
            observer().started(self.info, "send", 0, [tensor])
        return self._transport.start_message(sends, tensor, peer, tag, timeout)

    def exchange(self, op: str, text: str, timeout: float | None = None) -> list[str]:
        """The texts of all ranks, by a call of that name."""
        return texts.exchange(self.info, op, lambda call: self.run(call, timeout), text)

    def split(
        self, info: GroupInfo | None, members: Sequence[int], propose: Callable[[str], list[str]], timeout: float
    ) -> Group | None:
        """Makes smaller groups. None without `info`: this rank is in none of them.

        `members` are the ranks in this group of the new group that this rank is in. `propose` gives every rank every
        rank's text, and raises where they do not agree about the groups.
        """
        # The first rank of each new group chooses a key that no other group has.
        keys = propose(os.urandom(8).hex())
        if info is None:
            return None
        assert isinstance(self._transport, threads.ThreadsTransport)
        return Group(self._transport.split(info, members, keys[members[0]]), info, timeout)

    def check_whole(self, op: str) -> None:
        """Raises where the group is broken, or a rank is gone. For waits outside a call."""

    def decline(self, store: Store, info: GroupInfo, timeout: float, error: PhalanxError) -> None:
        """Tells the ranks that make a group that this one, which they wait for, does not come."""

    @contextlib.contextmanager
    def steps(self, op: str) -> Iterator[None]:
        """For a call of several steps: a rank that is interrupted between two of them, as by Ctrl-C, ends the group.

        The other ranks are in the next step, and wait for this rank.
        """
        try:
            yield
        except PhalanxError:
            # All ranks raise it, or the group has ended already.
            raise
        except BaseException as error:
            self.abort(f"{op} was interrupted by {endings.last_words(error).partition(chr(10))[0]}")
            raise

    def refuse_call(self, error: InvalidCall) -> None:
        """This rank's arguments were wrong: peers that make the same call wait for it."""
        if self.info.size > 1:
            self._transport.refuse(Refusal.of_call(error, error.op or "call", self.seq + 1))

    def refuse_message(self, error: InvalidCall, op: str, peer: int | None, tag: int | None) -> None:
        """Likewise. A peer or tag that was wrong itself is None."""
        self._transport.refuse(Refusal.of_message(error, op, peer, tag))

    def _look_at(self, call: Call) -> None:
        if call.inputs is not None:
            observer().started(self.info, call.op, self.seq + 1, call.inputs.tensors)

    def words_of_left(self, rank: int) -> str | None:
        """The last words of a rank that has left; None: it has not left, or nobody knows."""
        return None

    def renamed(self) -> None:
        """The group's info has the name that people know."""

    def abort(self, reason: str = "") -> None:
        self._transport.abort(reason)

    def close(self) -> None:
        """Leaves the group, once the calls in flight that all ranks have made are over."""
        endings.tell_exception(self._transport)
        try:
            self._transport.complete(endings.patience())
        finally:
            self._transport.close()


class _ProcessesGroup(Group):
    """A group of processes: it ends with this one. Plain calls go straight to the core, unless they are looked at."""

    __slots__ = ("_lock", "_process", "_shm")

    def __init__(self, transport: ShmTransport, info: GroupInfo, timeout: float) -> None:
        super().__init__(transport, info, timeout, transport.identities)
        self._shm = transport
        if type(transport) is ShmTransport and not self._looks_closely:
            self.quick = transport
            self.timeout = timeout
        # Held during a call of several steps: those of two threads must not mix.
        self._lock, self._process = threading.Lock(), os.getpid()
        try:
            observer().joined(transport, info, transport.folder)
        finally:
            # Last: what is registered for the end of the process last is called first, while all else is there.
            endings.enter(transport)

    @staticmethod
    def around(transport: ShmTransport, info: GroupInfo, timeout: float) -> Group:
        return _ProcessesGroup(transport if on_join is None else on_join(transport), info, timeout)

    def split(
        self, info: GroupInfo | None, members: Sequence[int], propose: Callable[[str], list[str]], timeout: float
    ) -> Group | None:
        exchange = partial(self.exchange, "split_group", timeout=timeout)
        transport = splitting.split(self._shm, self.info, info, members, propose, exchange)
        return None if info is None or transport is None else self.around(transport, info, timeout)

    @contextlib.contextmanager
    def steps(self, op: str) -> Iterator[None]:
        if self._process != os.getpid():
            # A thread of the parent may hold it.
            self._lock, self._process = threading.Lock(), os.getpid()
        with self._lock, super().steps(op):
            yield

    def check_whole(self, op: str) -> None:
        self._shm.check_whole(op)

    def decline(self, store: Store, info: GroupInfo, timeout: float, error: PhalanxError) -> None:
        decline(store, info, timeout, error)

    def words_of_left(self, rank: int) -> str | None:
        return self._shm.words_of_left(rank)

    def renamed(self) -> None:
        observer().renamed(self._shm, self.info)

    def close(self) -> None:
        endings.leave(self._transport)
