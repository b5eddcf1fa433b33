"""How the ranks of a group find each other through a store and come to share one segment.

1. Every rank arrives and says hello: who it is and which CPUs it may use. Arrivals are counted in the store, and every
   `size` of them are one meeting with keys of its own, so that the same store and name serve one group after another,
   also while a slow rank still reads the keys of the meeting before.
2. Rank 0 makes the segment, a memfd, and says where it is. Opening it through /proc is the probe whether two ranks
   share a host: no name or variable is trusted for that.
3. Every rank says whether it could open it. If one could not (another container, a hidden /proc), rank 0 tries once
   more with a file in /dev/shm, which is unlinked as soon as all have answered.
4. The last rank to leave removes the keys of the meeting.

Every wait here ends: by arrival, by the group's or the store's timeout, whichever is shorter, by the death of the rank
waited for, by the end of the store, or by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from phalanx import _native
from phalanx.errors import CallTimeout, GroupError, PeerLost
from phalanx.transports.failures import lost_while_joining
from phalanx.transports.hooks import observer
from phalanx.transports.levels import asked_level
from phalanx.transports.shm import ShmTransport
from phalanx.types import GroupInfo, Store

_SHM_FOLDER = Path("/dev/shm")
_FILE_PREFIX = "phalanx-"
# Seconds between two looks into the store.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


# Of a process: its number and start time; (0, 0) for one that can't be watched from here.
Identity = tuple[int, int]
_NOBODY: Identity = (0, 0)


def join(store: Store, info: GroupInfo, timeout: float, known: Mapping[int, Identity] | None = None) -> ShmTransport:
    """Meets the other ranks and returns this rank's end of their segment.

    `known` tells who some of the ranks are, so that the death of one that has not come yet is noticed, too.
    """
    if info.size > _native.MAX_RANKS:
        raise GroupError(
            f"expected at most {_native.MAX_RANKS} ranks, got {info.size}",
            group=info.name,
            rank=info.rank,
            hint="divide the ranks into smaller groups",
        )
    meeting = _Meeting(store, info, timeout, known or {})
    try:
        segment = meeting.open_segment()
    except BaseException:
        meeting.give_up()
        raise
    meeting.tidy()
    group = _native.Group(segment, info.rank)
    group.watch(meeting.identities)
    return ShmTransport(group, info, meeting.identities, meeting.folder, meeting.began_ns)


class _Meeting:
    """One rank's side of the exchange."""

    def __init__(self, store: Store, info: GroupInfo, timeout: float, known: Mapping[int, Identity]) -> None:
        self._store = store
        self._info = info
        self._limit = min(timeout, _timeout_of(store))
        self._deadline = time.monotonic() + self._limit
        # No rank makes a call in the group before this.
        self.began_ns = time.monotonic_ns()
        self._keys: set[str] = set()
        self._peers = {rank: _native.Peer.watch(*identity) for rank, identity in known.items() if rank != info.rank}
        self._arrivals = f"{info.name}/arrived"
        with self._asking():
            number = (store.add(self._arrivals, 1) - 1) // info.size
        self._prefix = f"{info.name}/{number}/"
        self.identities: list[Identity] = [_NOBODY] * info.size
        # A folder of the job's own, which rank 0 offers.
        self.folder = ""

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """While the store is asked: what it raises when it is gone, most likely with the rank that hosts it."""
        try:
            yield
        except RuntimeError as error:
            self._check_alive(range(self._info.size))
            raise self._error(
                "GROUP:STORE",
                f"the store failed while the group was being made: {error}",
                "look for an error on the rank that hosts the store, usually rank 0",
            ) from error

    def _check_alive(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is not None and peer.dead:
                raise lost_while_joining(self._info, rank, peer.status)

    def give_up(self) -> None:
        """Takes back the arrival, so that a later try of all ranks, if all live, finds each other."""
        # What was said stays: others may not have read it yet.
        with contextlib.suppress(RuntimeError):
            self._store.add(self._arrivals, -1)

    def open_segment(self) -> _native.Segment:
        hello = {
            "host": socket.gethostname(),
            "size": self._info.size,
            "cpus": _native.affinity(),
            "quota": _native.cpu_quota(),
            "identity": _native.own_identity(),
            "processes": _process_namespace(),
            "check": asked_level(),
            "folder": observer().offer_folder() if self._info.rank == 0 else "",
        }
        self._say("hello", hello)
        hellos = self._hear_all("hello")
        self._check_sizes(hellos)
        self.folder = hellos[0]["folder"]
        self._watch(hellos)
        nonce = os.urandom(16)
        with self._made_memfd(hellos, nonce) as (where, own):
            segment, problems = self._open("memfd", where, own)
        if not problems and segment is not None:
            return segment
        with self._made_file(hellos, nonce) as (where, own):
            segment, more_problems = self._open("file", where, own)
        if not more_problems and segment is not None:
            return segment
        raise self._cannot_share(hellos, problems, more_problems)

    def tidy(self) -> None:
        """Removes what the exchange left in the store, once nobody will read it any more."""
        left = f"{self._prefix}left"
        # The group is made: a store that has gone with its rank, or has no removal, does no harm any more.
        with contextlib.suppress(RuntimeError):
            if self._store.add(left, 1) == self._info.size:
                for key in [*self._keys, left]:
                    self._store.delete_key(key)

    def _watch(self, hellos: Sequence[dict[str, Any]]) -> None:
        here = _process_namespace()
        for rank, hello in enumerate(hellos):
            # Numbers of processes mean nothing in another container.
            if hello["processes"] == here:
                pid, start = hello["identity"]
                self.identities[rank] = (pid, start)
                if rank != self._info.rank:
                    self._peers[rank] = _native.Peer.watch(pid, start)

    def _open(
        self, way: str, where: dict[str, str] | None, own: _native.Segment | None
    ) -> tuple[_native.Segment | None, dict[int, str]]:
        """Opens the segment that rank 0 offers; also says which ranks could not, and why."""
        segment, problem = own, ""
        if self._info.rank == 0:
            self._set(f"{way}/where", where)
            problem = "" if own is not None else (where or {})["error"]
        else:
            offer = self._hear([f"{way}/where"])[0]
            try:
                if "error" in offer:
                    raise OSError(offer["error"])
                segment = _native.Segment.open(offer["path"], bytes.fromhex(offer["nonce"]))
            except (OSError, RuntimeError) as error:
                problem = str(error)
        self._say(f"{way}/opened", problem)
        answers = self._hear_all(f"{way}/opened")
        return segment, {rank: answer for rank, answer in enumerate(answers) if answer}

    @contextlib.contextmanager
    def _made_memfd(
        self, hellos: Sequence[dict[str, Any]], nonce: bytes
    ) -> Iterator[tuple[dict[str, str] | None, _native.Segment | None]]:
        if self._info.rank != 0:
            yield None, None
            return
        try:
            segment = _native.Segment.create_memfd(self._info.size, _tuning(hellos), nonce)
        except (OSError, RuntimeError) as error:
            yield {"error": str(error)}, None
            return
        try:
            yield {"path": f"/proc/{os.getpid()}/fd/{segment.fd}", "nonce": nonce.hex()}, segment
        finally:
            segment.close_fd()

    @contextlib.contextmanager
    def _made_file(
        self, hellos: Sequence[dict[str, Any]], nonce: bytes
    ) -> Iterator[tuple[dict[str, str] | None, _native.Segment | None]]:
        if self._info.rank != 0:
            yield None, None
            return
        _remove_orphans()
        path = _SHM_FOLDER / f"{_FILE_PREFIX}{nonce.hex()}"
        try:
            segment = self._make_file(path, hellos, nonce)
        except (OSError, RuntimeError) as error:
            yield {"error": str(error)}, None
            return
        try:
            yield {"path": str(path), "nonce": nonce.hex()}, segment
        finally:
            path.unlink(missing_ok=True)

    def _make_file(self, path: Path, hellos: Sequence[dict[str, Any]], nonce: bytes) -> _native.Segment:
        while True:
            segment = _native.Segment.create_file(str(path), self._info.size, _tuning(hellos), nonce)
            # Held until the file has no name any more: a file that nobody holds is an orphan, and may have been taken
            # for one before it was held.
            fcntl.flock(segment.fd, fcntl.LOCK_EX)
            if os.fstat(segment.fd).st_nlink > 0:
                return segment

    def _cannot_share(
        self, hellos: Sequence[dict[str, Any]], memfd: dict[int, str], file: dict[int, str]
    ) -> GroupError:
        hosts = {hello["host"] for hello in hellos}
        lines = ["the ranks do not share memory, and this version works between the processes of one host only"]
        for rank in sorted(memfd.keys() | file.keys()):
            lines.append(f"  rank {rank} (host {hellos[rank]['host']}):")
            lines += [f"    {problem}" for problem in (memfd.get(rank), file.get(rank)) if problem]
        if len(hosts) > 1:
            hint = f"start all ranks on one host; these are on {len(hosts)}: {', '.join(sorted(hosts))}"
        else:
            hint = (
                "start all ranks in one container and as one user, or let the containers share /dev/shm "
                "(--ipc=host) or their processes (--pid=host)"
            )
        return self._error("GROUP:NOT_SHARED", "\n".join(lines), hint)

    def _check_sizes(self, hellos: Sequence[dict[str, Any]]) -> None:
        sizes = [hello["size"] for hello in hellos]
        if len(set(sizes)) > 1:
            raise self._error(
                "GROUP:SIZE",
                f"expected the same number of ranks everywhere, got {sizes}, by rank",
                "pass the same world_size on every rank, and a store or a name of its own to every group",
            )

    def _error(self, code: str, text: str, hint: str) -> GroupError:
        return GroupError(text, code=code, group=self._info.name, rank=self._info.rank, hint=hint)

    def _say(self, topic: str, value: Any) -> None:
        self._set(f"{topic}/{self._info.rank}", value)

    def _set(self, key: str, value: Any) -> None:
        self._keys.add(self._prefix + key)
        with self._asking():
            self._store.set(self._prefix + key, json.dumps(value))

    def _hear_all(self, topic: str) -> list[Any]:
        keys = [f"{topic}/{rank}" for rank in range(self._info.size)]
        return self._hear(keys)

    def _hear(self, names: list[str]) -> list[Any]:
        keys = [self._prefix + name for name in names]
        self._keys.update(keys)
        # Looking again and again keeps Ctrl-C working, which a store's own wait does not.
        pause = _FIRST_PAUSE
        while not self._has(keys):
            self._check_dead(keys)
            if time.monotonic() > self._deadline:
                absent = [key for key in keys if not self._has([key])]
                if absent:
                    raise self._absent(absent)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        with self._asking():
            return [json.loads(value) for value in self._store.multi_get(keys)]

    def _has(self, keys: list[str]) -> bool:
        with self._asking():
            return self._store.check(keys)

    def _check_dead(self, keys: list[str]) -> None:
        """Raises where a rank that still has something to say is dead. Asks the store about dead ranks only."""
        for key in keys:
            try:
                self._check_alive([_rank_of(key)])
            except PeerLost:
                if not self._has([key]):
                    raise

    def _absent(self, keys: list[str]) -> CallTimeout:
        ranks = self._info.describe(*map(_rank_of, keys))
        return CallTimeout(
            f"gave up after a timeout of {self._limit:g} s: {ranks} did not come to make the group",
            group=self._info.name,
            rank=self._info.rank,
            op="new_group",
            hint="look whether these ranks were started, reach the same store and make the same groups in the same "
            "order",
        )


def _rank_of(key: str) -> int:
    """Whose word it is; where the segment is, rank 0 says."""
    return int(key.rpartition("/")[2].replace("where", "0"))


def _process_namespace() -> str:
    """Equal in processes that know each other by the same numbers."""
    try:
        # The first namespace has the same name on every host.
        return os.readlink("/proc/self/ns/pid") + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _timeout_of(store: Store) -> float:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    return timeout.total_seconds()


def _tuning(hellos: Sequence[dict[str, Any]]) -> _native.Tuning:
    cpus = len({cpu for hello in hellos for cpu in hello["cpus"]})
    quotas = [hello["quota"] for hello in hellos if hello["quota"]]
    tuning = _native.tuning_for(len(hellos), min([cpus, *quotas]))
    # Ranks must compare alike: they do what the strictest of them asks for.
    tuning.check = max(hello["check"] for hello in hellos)
    return tuning


def _remove_orphans() -> None:
    """Unlinks files whose maker was killed between making and unlinking: nobody holds their lock."""
    for path in _SHM_FOLDER.glob(f"{_FILE_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
