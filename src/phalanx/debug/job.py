"""A job as the black boxes of its processes show it: who is where in each group, who is behind, who disagrees.

Pure functions of boxes. Ranks are those of the job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.debug.records import DIED, ENDED_WELL, FAILED, Box, GroupName, Record

__all__ = [
    "Disagreement",
    "JobGroup",
    "JobMember",
    "Process",
    "find_disagreement",
    "groups_of",
    "newest_group",
    "newest_processes",
    "num_groups",
    "with_deaths",
]

# What tells groups apart: their identity, or what else is known where they have none.
_Key = tuple[str, tuple[int, ...]] | str

# Of all groups together: a damaged box may name any number of groups of any ranks.
_MOST_MEMBERS = 250_000

# Of records: Phalanx moves the bytes itself.
_OWN_ENGINES = ("", "shm", "threads")


@dataclass(slots=True, eq=False)
class Process:
    """A process and how it ended (`records.ending_of`)."""

    box: Box
    ending: str

    @property
    def has_broken_off(self) -> bool:
        return self.ending in (DIED, FAILED)


@dataclass(slots=True, eq=False)
class JobMember:
    """A rank of a group. Without a process nothing is known of it."""

    rank: int
    process: Process | None = None
    records: list[Record] = field(default_factory=list)
    # Of the collectives: the seq of the last that began, the first that began and did not complete, the first that came
    # when the group was broken already, the last that completed, and how many are queued.
    reached: int = 0
    current: Record | None = None
    refused: Record | None = None
    last: Record | None = None
    num_queued: int = 0
    # Of the messages: the first that did not complete, the last that did, and how many did not.
    message: Record | None = None
    last_message: Record | None = None
    num_open: int = 0

    @property
    def is_hidden(self) -> bool:
        """Whether the rank is in a call whose record was overwritten: how far it has come is not known."""
        return self.process is not None and bool(self.process.box.num_hidden) and not self.reached

    @property
    def has_broken_off(self) -> bool:
        return self.process is not None and self.process.has_broken_off

    def look(self) -> None:
        """Fills in where the rank is."""
        for record in self.records:
            if record.is_message:
                self._look_at_message(record)
            else:
                self._look_at_collective(record)

    def _look_at_collective(self, record: Record) -> None:
        if record.state == "completed":
            self.last = record
        elif record.has_begun:
            self.current = self.current or record
        elif record.state == "failed":
            self.refused = self.refused or record
        else:
            self.num_queued += 1
        if record.has_begun:
            self.reached = max(self.reached, record.seq)

    def _look_at_message(self, record: Record) -> None:
        if record.state == "completed":
            self.last_message = record
        else:
            self.message = self.message or record
            self.num_open += 1


@dataclass(slots=True, eq=False)
class JobGroup:
    """A group with all of its ranks, in their order."""

    name: str
    desc: str
    members: list[JobMember]
    identity: str = ""  # of one that is being made, the place where its ranks meet
    is_making: bool = False  # it has not been made: its records are those of its making
    # Of several groups of one name and the same ranks, which one this is, in the order of their first calls.
    number: int = 1

    @property
    def ranks(self) -> list[int]:
        return [member.rank for member in self.members]

    @property
    def reached(self) -> int:
        return max((member.reached for member in self.members), default=0)

    @property
    def first_ns(self) -> int:
        return min(record.created_ns for record in self._records())

    @property
    def last_ns(self) -> int:
        return max(record.last_ns for record in self._records())

    @property
    def has_records(self) -> bool:
        return any(member.records for member in self.members)

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way, nothing failed, and nobody is behind."""
        known = [member for member in self.members if member.process and not member.is_hidden]
        is_open = any(member.current or member.refused or member.num_queued or member.message for member in known)
        return not is_open and len({member.reached for member in known}) <= 1 and not self.is_hidden

    @property
    def is_hidden(self) -> bool:
        """Whether some of its ranks are in calls whose records were overwritten."""
        return any(member.is_hidden and member.records for member in self.members)

    @property
    def engine(self) -> str:
        """The backend that carries out the calls; empty: they are Phalanx' own."""
        return next((each.engine for each in self._records() if each.engine not in (None, *_OWN_ENGINES)), "") or ""

    def _records(self) -> list[Record]:
        return [record for member in self.members for record in member.records]


@dataclass(slots=True, eq=False)
class Disagreement:
    """Ranks made different calls of one seq."""

    group: JobGroup
    seq: int
    sides: list[tuple[Record, list[int]]]

    @property
    def ns(self) -> int:
        """When there were two sides."""
        return max(record.created_ns for record, _ in self.sides)


def newest_processes(processes: Iterable[Process]) -> list[Process]:
    """The last process of each rank, in their order, then those that have no rank."""
    ranked: dict[int, Process] = {}
    others = []
    for process in sorted(processes, key=lambda process: process.box.start):
        if process.box.rank < 0:
            others.append(process)
        else:
            ranked[process.box.rank] = process
    return [ranked[rank] for rank in sorted(ranked)] + others


def with_deaths(processes: Sequence[Process]) -> list[Process]:
    """The same, and those that died without a box.

    A process that has left its groups in order says so in its box, and may be killed afterwards: then it has died, as
    others have seen. Where it ended by itself, also by os._exit, it has ended well.
    """
    deaths = {(death.pid, death.start): death for process in processes for death in process.box.deaths}
    found = []
    for process in processes:
        death = deaths.get((process.box.pid, process.box.start))
        is_killed = death is not None and death.is_by_signal and process.box.ended_ns is None
        found.append(Process(process.box, DIED) if is_killed and process.ending == ENDED_WELL else process)
    ranks = {process.box.rank for process in processes}
    for death in sorted(deaths.values(), key=lambda death: death.seen_ns):
        if death.rank >= 0 and death.rank not in ranks and not death.is_replaced:
            ranks.add(death.rank)
            found.append(Process(Box.missing(death), DIED))
    return sorted(found, key=lambda process: (process.box.rank < 0, process.box.rank))


def groups_of(processes: Sequence[Process]) -> list[JobGroup]:
    """The groups in which there were calls, in the order of their first ones."""
    by_rank = {process.box.rank: process for process in processes if process.box.rank >= 0}
    found: dict[_Key, dict[int, JobMember]] = {}
    names: dict[_Key, GroupName] = {}
    num_members = 0
    makings = _open_makings(processes)
    for process in processes:
        for key, (name, records) in _records_by_group([*process.box.records, *makings[id(process)]]).items():
            names.setdefault(key, name)
            if key not in found:
                num_members += len(name.ranks)
                if num_members > _MOST_MEMBERS:
                    continue
                found[key] = {rank: JobMember(rank, by_rank.get(rank)) for rank in name.ranks}
            rank = name.rank_in_job(name.rank)
            member = found[key].setdefault(rank, JobMember(rank))
            member.process = process
            member.records = records
    groups = []
    for key, members in found.items():
        ordered = [members[rank] for rank in sorted(members)]
        if not names[key].key:
            _keep_newest(ordered)
        for member in ordered:
            member.look()
        is_making = any(record.is_making for member in ordered for record in member.records)
        groups.append(JobGroup(names[key].name, names[key].desc, ordered, names[key].key, is_making))
    groups = sorted((group for group in groups if group.has_records), key=lambda group: group.first_ns)
    seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for group in groups:
        seen[group.name, tuple(group.ranks)] += 1
        group.number = seen[group.name, tuple(group.ranks)]
    return groups


def num_groups(processes: Sequence[Process]) -> int:
    """How many groups there were calls in, also those that `groups_of` has no room for."""
    makings = _open_makings(processes)
    found = [_records_by_group([*process.box.records, *makings[id(process)]]) for process in processes]
    return len({key for groups in found for key in groups})


def _open_makings(processes: Sequence[Process]) -> dict[int, list[Record]]:
    """Of groups that were not made in the end, by process.

    Ranks that failed to meet may try again. Once they have met, each has come to that meeting after all that failed.
    """
    all_makings = [record for process in processes for record in process.box.makings]
    met: dict[str, int] = {}
    for record in all_makings:
        if record.state == "completed":
            venue = record.group.venue
            met[venue] = max(met.get(venue, 0), record.created_ns)
    return {
        id(process): [each for each in process.box.makings if each.created_ns > met.get(each.group.venue, 0)]
        for process in processes
    }


def _records_by_group(records: Sequence[Record]) -> dict[_Key, tuple[GroupName, list[Record]]]:
    """With the newest name of each. Records whose group found no room in the box are left out."""
    found: dict[_Key, tuple[GroupName, list[Record]]] = {}
    # A box has one object for each of its groups; comparing those would mean to compare all of their ranks.
    lists: dict[int, list[Record]] = {}
    for record in records:
        group = record.group
        if id(group) not in lists:
            if group.rank < 0:
                continue
            key = group.key or (group.name, group.ranks)
            lists[id(group)] = found.setdefault(key, (group, []))[1]
            found[key] = (group, lists[id(group)])
        lists[id(group)].append(record)
    return found


def newest_group(records: Sequence[Record]) -> int:
    """Where the calls of the last group begin, of the calls of groups that came one after another under one name.

    Each group numbers its collectives from 1, and so its messages to and from each peer.
    """
    begin = 0
    seen: set[tuple[str, int] | None] = set()
    for index, record in enumerate(records):
        numbering = (record.op, record.peer) if record.is_message else None
        if record.seq == 1 and numbering in seen:
            begin = index
            seen.clear()
        seen.add(numbering)
    return begin


def find_disagreement(group: JobGroup) -> Disagreement | None:
    """The first seq of which ranks made different calls. A call that completed everywhere had no two sides."""
    calls: dict[int, dict[int, Record]] = defaultdict(dict)
    for member in group.members:
        for record in member.records:
            if record.has_begun and not record.is_message:
                calls[record.seq][member.rank] = record
    for seq in sorted(calls):
        if all(record.state == "completed" for record in calls[seq].values()):
            continue
        sides: dict[tuple[object, ...], tuple[Record, list[int]]] = {}
        for rank, record in calls[seq].items():
            sides.setdefault(_signature(record), (record, []))[1].append(rank)
        if len(sides) > 1:
            return Disagreement(group, seq, list(sides.values()))
    return None


def _signature(record: Record) -> tuple[object, ...]:
    dtype = (record.dtype, record.unlisted_dtype)
    return record.op, record.reduce_op, record.root, dtype, record.count, _cut(record)


def _cut(record: Record) -> tuple[int, ...] | None:
    """How a list of tensors is cut, where all ranks must cut it alike: where elements of several ranks are combined, or
    copied to all."""
    if not record.is_list or record.is_making:
        return None
    op = record.traits
    is_alike = op.reduces or (op.rooted and op.shared_result)
    return record.sizes if is_alike else None


def _keep_newest(members: Sequence[JobMember]) -> None:
    """Leaves out what belongs to earlier groups of the same name and ranks.

    A group is made by all of its ranks, so none has a call in it before each has made its last one in the group before.
    """
    begins = {member.rank: newest_group(member.records) for member in members}
    before = max((member.records[at - 1].created_ns for member in members if (at := begins[member.rank])), default=0)
    firsts = [member.records[at].created_ns for member in members if (at := begins[member.rank])]
    begin = min((ns for ns in firsts if ns > before), default=0)
    for member in members:
        member.records = [record for record in member.records if record.created_ns >= begin]
