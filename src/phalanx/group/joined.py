"""The side of a group that torch sees beside the calls: how it is made, what it is called, and how it ends."""

# torch's stubs give every spelling of a method as an overload; one method here takes them all.
# mypy: disable-error-code="override"

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Self, cast

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup

from phalanx.collectives.numbers import index_of
from phalanx.errors import GroupError
from phalanx.group import names
from phalanx.group.group import Group
from phalanx.group.timeouts import DEFAULT_TIMEOUT, check_timeout, seconds_to_join
from phalanx.group.torch_compat.groups import GroupName
from phalanx.group.torch_compat.tracing import not_traced
from phalanx.statistics import OpStatistics
from phalanx.transports.identities import Identity
from phalanx.transports.lookout import Known
from phalanx.types import GroupInfo, Store

__all__ = ["JoinedGroup", "MeetingPoint", "check_store"]

_CPU = torch.device("cpu")


class MeetingPoint(NamedTuple):
    """Where and how the ranks of a group meet."""

    store: Store
    # Groups of one scope meet by their members, others by their name as well.
    scope: str = ""
    known: Known | None = None


class Options:
    """A group's options, under the names that torch uses."""

    backend = "phalanx"

    def __init__(self, group: JoinedGroup) -> None:
        self._group = group

    @property
    def _timeout(self) -> timedelta:
        return self._group.timeout

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    @property
    def group_name(self) -> str:
        return self._group.group_name

    @property
    def global_ranks_in_group(self) -> list[int]:
        return self._group.global_ranks


@not_traced
class JoinedGroup(TorchProcessGroup):
    """A group that this rank has joined."""

    # Whether torch has registered it, and whether errors name it as the program does.
    _is_torchs = False
    _keeps_name = False
    # The name that no other group of this process may have while this one is open.
    _taken: names.Key | None = None

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        name: str = "phalanx",
        global_ranks: Sequence[int] = (),
        point: MeetingPoint | None = None,
    ) -> None:
        rank, world_size = _number(name, "a rank", rank), _number(name, "a world size", world_size)
        if not 0 <= rank < world_size:
            raise GroupError(
                f"expected a rank in 0..{world_size - 1}, got {rank}",
                group=name,
                hint="give every process its own rank below world_size",
            )
        seconds = seconds_to_join(timeout, name)
        check_store(store, name)
        info = GroupInfo(name, rank, world_size, _numbers(name, global_ranks))
        point = point or MeetingPoint(store)
        self._prepare(Group.join(point.store, info, seconds, point.scope, point.known), store)

    @classmethod
    def around(cls, group: Group, store: Store) -> Self:
        """A group that was joined already."""
        self = cls.__new__(cls)
        self._prepare(group, store)
        return self

    def _prepare(self, group: Group, store: Store) -> None:
        """What a group needs before its first call."""
        super().__init__(group.info.rank, group.info.size)  # type: ignore[call-arg]
        self._store = store
        self._info = group.info
        self._group = group
        self._name = group.info.name
        self._desc = "undefined"

    # torch asks for these in nearly every call, and its own methods take longer than sending a message does.

    def rank(self) -> int:
        return self._info.rank

    def size(self) -> int:
        return self._info.size

    def getBackendName(self) -> str:
        return "phalanx"

    def name(self) -> str:
        return "phalanx"

    def _get_backend_name(self) -> str:
        return "phalanx"

    def _get_backend(self, device: torch.device) -> Self:
        """The group is its own backend: torch looks here for what a backend supports."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    @property
    def identities(self) -> Sequence[Identity]:
        """Who the ranks are: process number and start time."""
        return self._group.identities

    def words_of_left(self, rank: int) -> str | None:
        """The last words of a rank that has left the group; None: it has not left."""
        return self._group.words_of_left(rank)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks in the default group of this group's ranks; empty where torch did not make the group."""
        return list(self._info.global_ranks)

    def get_group_store(self) -> Store:
        return self._store

    # torch keeps a group's name in its C++ backends, of which this group has none.

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: GroupName) -> None:
        """torch calls it when it registers the group."""
        self._name = str(name)
        self._is_torchs = True

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        if not desc or desc == "undefined":
            return
        self._info.desc = desc
        # Errors name groups as people do; torch's names are numbers.
        if not self._keeps_name:
            self._info.name = desc
        self._group.tell_new_name()

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def hand_over(self, rank: int, size: int, global_ranks: Sequence[int]) -> Self:
        """The group for torch to register, instead of a new one. Errors keep the name that the program gave it.

        `global_ranks` are the group's ranks in the default group, empty for a default group.
        """
        name, own, own_size = self._info.name, self._info.rank, self._info.size
        if self._group.has_left:
            raise GroupError(
                "the group was shut down on this rank",
                code="GROUP:CLOSED",
                group=name,
                rank=own,
                hint="pass a group that is open",
            )
        if self._is_torchs:
            raise GroupError(
                f"torch.distributed has registered this group already, as {self._name!r}",
                group=name,
                rank=own,
                hint="pass a group to init_process_group or new_group once",
            )
        if (own, own_size) != (rank, size):
            raise GroupError(
                f"expected rank {rank} of {size}, got a group where this process is rank {own} of {own_size}",
                group=name,
                rank=own,
                hint="pass rank=group.rank() and world_size=group.size(), or the ranks that the group has",
            )
        self._keeps_name = True
        if global_ranks:
            self._info.global_ranks = list(global_ranks)
        return self

    @property
    def timeout(self) -> timedelta:
        """How long a call waits that has no timeout of its own; `timedelta.max` where there is no limit."""
        seconds = self._group.timeout
        return timedelta.max if seconds == math.inf else timedelta(seconds=seconds)

    @property
    def options(self) -> Options:
        """What torch reads of a backend."""
        return Options(self)

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.timeout = check_timeout(timeout, self._info.name)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers need no agreement: all ranks count from 1."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.seq

    def statistics(self) -> dict[str, OpStatistics]:
        """What this rank's calls in the group have taken so far, by op; only ops that it has called.

        Cheap, from any thread, also after `shutdown()`. Empty in a forked child.
        """
        return self._group.statistics()

    def abort(self) -> None:
        """Ends all calls of the group, on every rank, with Aborted."""
        self._group.abort("abort() was called")

    def shutdown(self) -> None:
        """Leaves the group, once the calls that all ranks have made are complete. Idempotent."""
        try:
            self._group.close()
        finally:
            if self._taken is not None:
                names.release(self._taken, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leaves the group. Peers are told of the exception that passes, if there is one."""
        self.shutdown()

    def __repr__(self) -> str:
        # The constructor may have raised.
        group = getattr(self, "_group", None)
        return f"<phalanx.{type(self).__name__} {'that was not made' if group is None else group.describe()}>"


def check_store(store: object, name: str) -> None:
    if not isinstance(store, Store):
        raise GroupError(
            f"expected a torch.distributed.Store, got {store!r}",
            group=name,
            hint="make a TCPStore or FileStore that all ranks reach",
        )


def _numbers(group: str, ranks: Sequence[object]) -> Sequence[int]:
    # Every rank of a world lists all of them. So this looks at each only where it is no int, as torch passes it.
    if isinstance(ranks, range):
        return ranks
    if set(map(type, ranks)) <= {int}:
        return list(cast(Sequence[int], ranks))
    return [_number(group, "ranks", one) for one in ranks]


def _number(group: str, what: str, value: object) -> int:
    number = index_of(value)
    if number is None:
        raise GroupError(f"expected {what} as an integer, got {value!r}", group=group, hint=f"pass {what} as an int")
    return number
