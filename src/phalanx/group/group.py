"""The group: an identity, a transport and a timeout. Plain Python; torch's spellings live in process_group.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from phalanx.collectives import texts
from phalanx.errors import InvalidCall, Mismatch, PhalanxError
from phalanx.group import endings
from phalanx.group.sparse import all_reduce_sparse
from phalanx.group.torch_compat.sparse import entries_of
from phalanx.statistics import OpStatistics
from phalanx.transports import factory, levels
from phalanx.transports.base import Pending, Transport
from phalanx.transports.factory import Request
from phalanx.transports.identities import Identity
from phalanx.transports.lookout import Known
from phalanx.transports.observers import tell
from phalanx.transports.quick import Quick
from phalanx.transports.refusals import Refusal
from phalanx.types import Call, GroupInfo, Store


class Group:
    """One rank's view of a group. Calls may come from any thread; they are carried out one after another."""

    __slots__ = ("_looks_closely", "_timeout", "_transport", "info", "quick")

    def __init__(self, transport: Transport, info: GroupInfo, timeout: float) -> None:
        self._transport = transport
        self._looks_closely = transport.level == levels.FULL
        self.info = info
        # The native way of plain calls, unless they are looked at.
        self.quick: Quick | None = None if self._looks_closely else transport.quick
        self.timeout = timeout
        if transport.spans_processes:
            try:
                tell.joined(transport, info, transport.folder)
            finally:
                # Last: what is registered for the end of the process last is called first, while all else is there.
                endings.enter(transport)

    @staticmethod
    def join(store: Store, info: GroupInfo, timeout: float, scope: str = "", known: Known | None = None) -> Group:
        """Meets the other ranks of the group through the store.

        Groups of one scope meet by their members, others by their name as well. `known` is what is known of the ranks.
        """
        return Group(factory.join(Request(store, info, timeout, scope, known)), info, timeout)

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
    def identities(self) -> Sequence[Identity]:
        """Who the ranks are, where they are processes."""
        return self._transport.identities

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
            tell.started(self.info, "send", 0, [tensor])
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
        exchange = partial(self.exchange, "split_group", timeout=timeout)
        made = factory.split(self._transport, info, members, propose, exchange)
        return None if made is None or info is None else Group(made, info, timeout)

    def check_whole(self, op: str) -> None:
        """Raises where the group is broken, or a rank is gone. For waits outside a call."""
        self._transport.check_whole(op)

    def decline(self, store: Store, info: GroupInfo, timeout: float, error: PhalanxError) -> None:
        """Tells the ranks that make a group that this one, which they wait for, does not come."""
        self._transport.decline(store, info, timeout, error)

    @contextlib.contextmanager
    def steps(self, op: str) -> Iterator[None]:
        """For a call of several steps: a rank that is interrupted between two of them, as by Ctrl-C, ends the group.

        The other ranks are in the next step, and wait for this rank. Other threads of this rank wait for their turn.
        """
        with self._transport.exclude_others():
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
        """The same for a message. A peer or tag that was wrong itself is None."""
        self._transport.refuse(Refusal.of_message(error, op, peer, tag))

    def _look_at(self, call: Call) -> None:
        if call.inputs is not None:
            tell.started(self.info, call.op, self.seq + 1, call.inputs.tensors)

    def words_of_left(self, rank: int) -> str | None:
        """The last words of a rank that has left; None: it has not left, or nobody knows."""
        return self._transport.words_of_left(rank)

    def tell_new_name(self) -> None:
        """The group's info has the name that people know."""
        if self._transport.spans_processes:
            tell.renamed(self._transport, self.info)

    def abort(self, reason: str = "") -> None:
        self._transport.abort(reason)

    def close(self) -> None:
        """Leaves the group, once the calls in flight that all ranks have made are over."""
        endings.leave(self._transport)
