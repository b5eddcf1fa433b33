"""What must be found of a fault, and what must be said of it.

op, dtype, count, root, reduce_op   Mismatch on every rank of the group. The rank is on a side of its own, at its line,
                                    and it alone is marked; with two ranks both sides are.
message dtype, message count        Mismatch, with sender and receiver, each at its line.
exception                           The exception itself, and PeerLost with it and its line wherever the rank is missed.
return                              PeerLost, with the rank.
left out, extra                     Anything, with the rank: as the odd side, as the one that is missed or that waits
                                    for others, or within the circle of a deadlock.

Where that can't be known:
- A rank that left a call out, or made one too many, is only out of step: its next calls may fit those of the others by
  chance. So the line is not known, and the report is about a later call.
- Where calls give up, the first to do so may have waited for ranks that waited for others, and so on to the one to
  blame. Then it is enough that one of the reports names it.
- Whoever receives from anybody can't know who did not send. Where such a receive has a part in it the rank need not be
  named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from random_faults import DISAGREEMENTS, INJECTED, Fault, FaultyProgram
from telling import Outcome

import phalanx
import phalanx.testing as pt

__all__ = ["Judge"]

_SIDE = re.compile(r"  ranks? ([^:]+): \w+\(.*?\)(  <-- .*)?")
_PLACE = re.compile(r"rank(\d+)\.py:(\d+), in ")
_WAITED = re.compile(r"while rank (\d+)(?: \(global rank (\d+)\))? waited for it in .*? at rank(\d+)")
_RANK = re.compile(r"\branks? (\d+)\b")
_WAITS = re.compile(r"  rank (\d+) waits ")
_CODES = {"op": "OP", "dtype": "DTYPE", "count": "COUNT", "root": "ROOT", "reduce_op": "REDUCE_OP"}


@dataclass
class _Side:
    """Of a report: the ranks as they are described, whether they are marked, and where they made the call."""

    ranks: str
    marked: bool
    places: list[tuple[int, int]]


class Judge:
    """Of one outcome of a faulty program."""

    def __init__(self, program: FaultyProgram, outcome: Outcome, *, processes: bool = False) -> None:
        assert program.fault is not None
        self._program = program
        self._fault: Fault = program.fault
        self._processes = processes
        self._first = outcome.first
        self._raised = {rank: each.error for rank, each in outcome.raised.items()}
        self._step = program.steps[self._fault.step]
        self._groups = {self._group_name(number): members for number, members in enumerate(program.groups)}

    def complaints(self) -> Iterator[str]:
        """What is not as it must be."""
        if self._first is None:
            yield "the fault was not found"
            return
        for rank, error in self._raised.items():
            if not isinstance(error, phalanx.PhalanxError) and not self._is_injected(rank, error):
                yield f"rank {rank} raised {error!r}"
        yield from self._same_reports()
        yield from self._places_of_waits()
        if self._fault.kind in DISAGREEMENTS:
            yield from self._disagreement()
        elif self._fault.kind.startswith("message "):
            yield from self._message()
        elif self._fault.kind in ("exception", "return"):
            yield from self._ending()
        else:
            yield from self._out_of_step()

    # What holds for all.

    def _is_injected(self, rank: int, error: BaseException) -> bool:
        at_fault = (self._fault.kind, self._fault.rank) == ("exception", rank)
        return at_fault and f"{type(error).__name__}: {error}" == INJECTED

    def _same_reports(self) -> Iterator[str]:
        """All ranks say the same of a group."""
        said: dict[str, set[str]] = {}
        for error in self._raised.values():
            if isinstance(error, (phalanx.Mismatch, phalanx.PeerLost)):
                said.setdefault(str(error.group), set()).add(_body(error))
            elif isinstance(error, phalanx.CallTimeout) and not self._processes:
                # Processes look for themselves where the others are.
                said.setdefault(str(error.group), set()).add("\n".join(str(error).splitlines()[1:]))
        for group, bodies in said.items():
            if len(bodies) > 1:
                yield f"ranks say different things of group {group!r}"

    def _places_of_waits(self) -> Iterator[str]:
        """Whoever waited for a rank that is gone did so in its own program."""
        for error in self._raised.values():
            waited = _WAITED.search(str(error))
            if waited and int(waited[2] or waited[1]) != int(waited[3]):
                yield f"a wait is in another rank's program: {waited[0]}"

    # What depends on the fault.

    def _disagreement(self) -> Iterator[str]:
        fault, step, program = self._fault, self._step, self._program
        members = program.groups[step.group]
        first = self._first
        if not isinstance(first, phalanx.Mismatch):
            yield f"expected a Mismatch, got {type(first).__name__}"
            return
        code = _CODES[fault.kind]
        if code == "COUNT" and step.kind.startswith("all_to_all"):
            code = "SPLITS"
        if first.code != f"MISMATCH:{code}":
            yield f"expected MISMATCH:{code}, got {first.code}"
        if first.group != self._group_name(step.group):
            yield f"expected a report about group {self._group_name(step.group)!r}"
        if not set(members) <= set(self._raised):
            yield f"ranks {sorted(set(members) - set(self._raised))} did not raise"
        me, place = self._describe(fault.rank, step.group), (fault.rank, program.fault_line)
        sides = _sides(first)
        if not any(side.ranks == me and side.places == [place] for side in sides):
            yield f"expected 'rank {me}' on a side of its own, at line {program.fault_line}"
        marked = [side.ranks for side in sides if side.marked]
        if code != "SPLITS" and len(members) > 2 and marked != [me]:
            yield f"expected 'rank {me}' to be marked, got {marked}"
        if code != "SPLITS" and len(members) == 2 and (len(marked) != 2 or "no majority" not in str(first)):
            yield "expected both sides to be marked"

    def _message(self) -> Iterator[str]:
        first, program = self._first, self._program
        if not isinstance(first, phalanx.Mismatch):
            yield f"expected a Mismatch, got {type(first).__name__}"
            return
        code = f"MISMATCH:{_CODES[self._fault.kind.removeprefix('message ')]}"
        if first.code != code:
            yield f"expected {code}, got {first.code}"
        both = [number for number, step in enumerate(program.steps) if step.params is self._step.params]
        lines = {(rank, line) for (step, rank), line in program.lines.items() if step in both}
        places = [place for side in _sides(first) for place in side.places]
        if len(places) != 2 or not set(places) <= lines or (self._fault.rank, program.fault_line) not in places:
            yield f"expected two of {sorted(lines)}, one of them {self._fault.rank, program.fault_line}, got {places}"

    def _ending(self) -> Iterator[str]:
        fault, raises = self._fault, self._fault.kind == "exception"
        if (fault.rank in self._raised) != raises:
            yield f"rank {fault.rank} {'did not raise' if raises else 'raised'}"
        about = [error for error in self._raised.values() if fault.rank in self._peers_of(error)]
        if not about and not self._is_from_anybody():
            yield "nobody says which rank has ended"
        for error in about:
            words = getattr(error, "exception", None) or ""
            if raises and (INJECTED not in words or (fault.rank, self._program.fault_line) not in _places(words)):
                yield f"the exception of rank {fault.rank} is not told"
        if raises and not self._is_injected(fault.rank, self._first or Exception()):
            yield f"expected the exception itself to be raised, got {self._first!r}"

    def _out_of_step(self) -> Iterator[str]:
        fault, first = self._fault, self._first
        assert first is not None
        # A report says whom the missing ranks wait for, and those may wait themselves; they, too, are told something.
        told = self._raised.values() if isinstance(first, phalanx.CallTimeout) else [first]
        named = {rank for error in told for rank in self._named_by(error)}
        if fault.rank not in named and not self._is_from_anybody():
            yield f"rank {fault.rank} is not named, but {sorted(named)}"

    # What errors say.

    def _named_by(self, error: BaseException) -> set[int]:
        """The ranks, of all, that somebody who reads it would look at."""
        if isinstance(error, pt.Deadlock):
            return {int(waits[1]) for waits in map(_WAITS.match, str(error).splitlines()) if waits}
        sides = _sides(error)
        marked = [side for side in sides if side.marked] or sides
        if marked:
            return {rank for side in marked for rank, _ in side.places}
        if isinstance(error, phalanx.CallTimeout):
            return self._mentioned_by(error)
        waiting = {rank for rank, _ in _places(str(error).splitlines()[0])}
        return self._peers_of(error) | waiting

    def _mentioned_by(self, error: phalanx.PhalanxError) -> set[int]:
        members = self._groups[str(error.group)]
        ranks = [members[int(rank)] for rank in _RANK.findall(str(error)) if int(rank) < len(members)]
        return {*ranks, *(rank for rank, _ in _places(str(error)))}

    def _peers_of(self, error: BaseException) -> set[int]:
        peer, name = getattr(error, "peer", None), getattr(error, "group", None)
        return set() if peer is None else {self._groups[str(name)][peer]}

    def _is_from_anybody(self) -> bool:
        """Whether a receive from anybody has a part in it: it can't know who did not send."""
        lines = {(rank, line) for (step, rank), line in self._program.lines.items() if self._receives(step, rank)}
        places = {place for error in self._raised.values() for place in _places(str(error))}
        return self._step.kind == "fan_in" or not lines.isdisjoint(places)

    def _receives(self, number: int, rank: int) -> bool:
        step = self._program.steps[number]
        return step.kind == "fan_in" and step.params["to"] == rank

    def _group_name(self, number: int) -> str:
        return f"g{number}" if number else "default_pg"

    def _describe(self, rank: int, group: int) -> str:
        within = self._program.groups[group].index(rank)
        return str(rank) if within == rank else f"{within} (global rank {rank})"


def _body(error: BaseException) -> str:
    """Without what differs between the ranks that are told."""
    head, *lines = str(error).splitlines()
    return "\n".join([re.sub(r"^.*?, rank \d+: (the group is broken: )?", "", head), *lines])


def _places(text: str) -> list[tuple[int, int]]:
    return [(int(rank), int(line)) for rank, line in _PLACE.findall(text)]


def _sides(error: BaseException) -> list[_Side]:
    sides: list[_Side] = []
    for line in str(error).splitlines()[1:]:
        side = _SIDE.fullmatch(line)
        if side:
            sides.append(_Side(side[1], side[2] is not None, []))
        elif line.startswith("    at ") and sides:
            sides[-1].places += _places(line)
    return sides
