"""How the ranks of a group agree about smaller groups before they make them.

Each rank proposes the group that it wants to be in, or one that others want to be in. The proposals of all
ranks are compared on every rank, so all of them raise the same Mismatch, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx import _native
from phalanx.collectives.checks import fail
from phalanx.collectives.numbers import whole_list
from phalanx.group import names
from phalanx.group.agreeing import check_problems, mismatch
from phalanx.group.group import Group
from phalanx.transports.hello import Proposal, key_of_ranks
from phalanx.types import GroupInfo

__all__ = ["check_name", "check_ranks", "split"]

_OP = "split_group"


def check_ranks(info: GroupInfo, ranks: Any) -> list[int]:
    """The ranks of a smaller group, in their order there."""
    numbers = whole_list(info, _OP, "ranks", ranks)
    if not numbers:
        fail(info, _OP, "RANKS", "expected at least one rank, got none", "pass the ranks of the group to be made")
    wrong = [rank for rank in numbers if not 0 <= rank < info.size]
    if wrong:
        fail(
            info,
            _OP,
            "RANKS",
            f"expected ranks of the group, in 0..{info.size - 1}, got {wrong[0]} in {numbers}",
            "pass ranks of the group that is split, not of the default group",
        )
    if len(set(numbers)) != len(numbers):
        twice = next(rank for rank in numbers if numbers.count(rank) > 1)
        fail(info, _OP, "RANKS", f"expected every rank once, got {twice} twice in {numbers}", "name every rank once")
    return numbers


def check_name(info: GroupInfo, op: str, name: Any) -> str:
    """A name that the caller has given; empty: it has given none."""
    if name is None:
        return ""
    if problem := names.problem_of(name):
        fail(info, op, "NAME", problem, "pass a name, or leave it out")
    return str(name)


def split(group: Group, ranks: list[int], timeout: float, name: str, *, named: bool) -> Group | None:
    """The smaller group that this rank is in, if it is in one. `named`: the caller has chosen the name."""
    info = group.info
    where, _ = _native.origin()
    problem = names.describe_taken(name) if named and info.rank in ranks else ""

    def propose(offer: str) -> list[str]:
        own = Proposal(ranks, name, where, problem, offer)
        proposals = Proposal.read_all(group.exchange(_OP, own.text(), timeout))
        _check_agreement(info, group.seq, proposals)
        hint = "shut down the other group of that name first, or choose another name"
        check_problems(info, _OP, group.seq, [one.problem for one in proposals], "GROUP:NAME", hint)
        return [proposal.offer for proposal in proposals]

    made = None
    if info.rank in ranks:
        within = [info.global_ranks[rank] for rank in ranks] if info.global_ranks else []
        label = name or f"{info.name}[{key_of_ranks(ranks)}]"
        made = GroupInfo(label, ranks.index(info.rank), len(ranks), within)
    with group.steps(_OP):
        return group.split(made, ranks, propose, timeout)


def _check_agreement(info: GroupInfo, seq: int, proposals: Sequence[Proposal]) -> None:
    hint = "pass the same list and name on every rank of a list"
    for rank, proposal in enumerate(proposals):
        for member in proposal.ranks:
            other = proposals[member]
            # Most ranks propose the same, and share what was read.
            if other is proposal:
                continue
            # Ranks that are not in a group may name its ranks in any order.
            is_same = other.ranks == proposal.ranks or (
                rank not in proposal.ranks and sorted(other.ranks) == sorted(proposal.ranks)
            )
            if not is_same:
                verdict = f"rank {rank} passed {proposal.ranks}, but its member rank {member} passed {other.ranks}"
                passed = [(str(one.ranks), one.where) for one in proposals]
                raise mismatch(info, _OP, seq, "MISMATCH:RANKS", verdict, passed, hint)
            if rank in proposal.ranks and other.name != proposal.name:
                verdict = f"rank {rank} named the group {proposal.name!r}, but rank {member} named it {other.name!r}"
                passed = [(f"{one.ranks}, {one.name!r}", one.where) for one in proposals]
                raise mismatch(info, _OP, seq, "MISMATCH:NAME", verdict, passed, hint)
