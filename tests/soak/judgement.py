"""What must come of a world in which a rank dies.

For every survivor:

- each call either finishes with the right data or raises `PeerLost`, which names the victim and how it died; making a
  group may raise any error of Phalanx but `Aborted`; nothing else is raised anywhere;
- a group without the victim goes on working;
- it reports within the limit after the death, and ends;
- it can destroy its groups, and then holds no thread, file descriptor or segment that it did not hold before.

A survivor that stopped is missed by others, who may then name it instead of the victim.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from calls import WrongDataError
from scenarios import Scenario, VictimError


@dataclass
class Error:
    """An exception that a survivor met. `ranks` are those of the group."""

    step: int
    stage: str
    ranks: tuple[int, ...]
    kind: str
    ours: bool
    text: str
    trace: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, {self.stage}: {self.kind}: {self.text}"


@dataclass
class Facts:
    """What the keeper has seen. Times are seconds after the death."""

    begun: int = 0
    statuses: dict[int, int | None] = field(default_factory=dict)
    reported: dict[int, float] = field(default_factory=dict)
    errors: dict[int, list[Error]] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    left: dict[int, list[str]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    stuck: dict[int, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    processes: bool = False


def judge(scenario: Scenario, facts: Facts) -> list[str]:
    """What went wrong, in words; nothing if all is well."""
    survivors = [rank for rank in range(scenario.size) if rank != scenario.victim]
    problems = [f"rank {rank} hung" for rank in sorted(facts.stuck)]
    status = facts.statuses.get(scenario.victim)
    if scenario.victim not in facts.stuck and status != scenario.status:
        problems.append(f"the victim, rank {scenario.victim}, ended with {status} instead of {scenario.status}")
    problems += [
        f"the victim met an error before its death: {error}" for error in facts.errors.get(scenario.victim, [])
    ]
    needed = facts.begun < len(scenario.steps) - 1
    for rank in survivors:
        if rank in facts.stuck:
            continue
        problems += _judge_end(rank, facts)
        problems += [f"rank {rank}: {text}" for text in _judge_errors(scenario, facts, rank)]
        if needed and rank in facts.done and not facts.errors.get(rank):
            problems.append(f"rank {rank} finished the last barrier, to which the victim never came")
    return problems + _judge_remains(facts)


def judge_peace(scenario: Scenario, facts: Facts) -> list[str]:
    """The same for a world in which nobody dies."""
    problems = [f"rank {rank} hung" for rank in sorted(facts.stuck)]
    for rank in range(scenario.size):
        problems += _judge_end(rank, facts)
        problems += [f"rank {rank}: {error}" for error in facts.errors.get(rank, [])]
    return problems + _judge_remains(facts)


def _judge_end(rank: int, facts: Facts) -> list[str]:
    problems = [f"rank {rank} still holds {what}" for what in facts.left.get(rank, [])]
    if rank not in facts.done:
        problems.append(f"rank {rank} did not come to the end")
    if facts.statuses.get(rank) != 0:
        problems.append(f"rank {rank} ended with {facts.statuses.get(rank)} instead of 0")
    if "Traceback (most recent call last)" in facts.texts.get(rank, ""):
        problems.append(f"rank {rank} printed a traceback")
    return problems


def _judge_remains(facts: Facts) -> list[str]:
    problems = [f"/dev/shm/{name} was left" for name in facts.files]
    return problems + (["a process was left"] if facts.processes else [])


def _judge_errors(scenario: Scenario, facts: Facts, rank: int) -> Iterable[str]:
    for error in facts.errors.get(rank, []):
        if error.kind == WrongDataError.__name__:
            yield f"wrong data: {error}"
        elif error.stage == "make":
            if not error.ours or error.kind == "Aborted":
                yield f"expected an error of Phalanx but Aborted, got {error}"
        elif error.kind != "PeerLost":
            yield f"expected PeerLost, got {error}"
        elif error.stage not in ("start", "wait"):
            yield f"expected no error, got {error}"
        elif not any(_names(error, gone) for gone in facts.stopped - {rank}):
            if scenario.victim not in error.ranks:
                yield f"all ranks of the group live, got {error}"
            elif not _names(error, scenario.victim):
                yield f"rank {scenario.victim} is not named: {error}"
            elif not _tells_how(scenario, error.text):
                yield f"how rank {scenario.victim} died is not told or wrong: {error}"


def _names(error: Error, rank: int) -> bool:
    """By its rank in the group or its global one, in the first line: those below name peers of its last calls, too."""
    first = error.text.partition("\n")[0]
    return rank in error.ranks and any(
        re.search(rf"\branks? {number}\b", first) for number in (rank, error.ranks.index(rank))
    )


def _tells_how(scenario: Scenario, text: str) -> bool:
    signals = {"outside": r"SIGKILL|signal 9\b", "SIGKILL": r"SIGKILL|signal 9\b", "SIGSEGV": r"SIGSEGV|signal 11\b"}
    if scenario.death == "sys.exit":
        return True  # it leaves in order, before anybody knows with which code
    if scenario.death == "exception":
        return VictimError.__name__ in text and scenario.words in text
    first = text.partition("\n")[0]
    if re.search(signals.get(scenario.death) or rf"(exit|code|status)\D*\b{scenario.code}\b", first):
        return True
    # The parent may have been faster than the peers, and older kernels do not keep the cause for them.
    return not scenario.reaped_late and bool(re.search("not visible|not known|unknown", first))


def detail(facts: Facts) -> str:
    """What the keeper knows, for the person who looks for the cause."""
    lines = []
    for rank in sorted(facts.statuses):
        lines.append(f"rank {rank}: exit status {facts.statuses[rank]}, reported after {facts.reported.get(rank)} s")
        lines += [f"  {error}\n{error.trace}".rstrip() for error in facts.errors.get(rank, [])]
        if facts.stuck.get(rank):
            lines.append(f"  stuck at:\n{facts.stuck[rank]}")
        if facts.texts.get(rank):
            lines.append(f"  printed:\n{facts.texts[rank]}")
    return "\n".join(lines)
