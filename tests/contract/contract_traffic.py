"""Collectives and messages in flight at once, on all groups of a world, which overlap.

All processes draw the same traffic, and each starts its part in an order of its own: only collectives of one group, and
messages of one sender, receiver and tag, keep theirs. Nothing is waited for before all has been started, so that a call
that kept another group's call or another message waiting would never end.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Hashable
from dataclasses import replace

from contract_cases import SHOWN, Flight, cases, draw_case, problems_of, wait_for
from contract_forms import FORMS, Case
from contract_messages import COUNTS, DTYPES, Message, Side, draw_message, in_own_order, pairs
from contract_pool import Member, groups_of

__all__ = ["run_traffic"]

# (group, call, the spelling of this rank's side of a message)
Part = tuple[str, Case | Message, str]
LARGE = 1_200_007
NUM_TAGS = 3
DROPPED = 0.1


def run_traffic(member: Member, num_rounds: int, num_collectives: int, num_messages: int) -> tuple[int, list[str]]:
    """Both numbers are for each round, in all groups together. `member` is one of the whole world."""
    warnings.simplefilter("ignore")
    draw = random.Random(f"traffic of {num_collectives} and {num_messages}")
    groups = groups_of(member.size)
    choices = {
        name: {form: cases(form, len(ranks)) for form in FORMS} if num_collectives else {}
        for name, ranks in groups.items()
    }
    failures: list[str] = []
    for number in range(num_rounds):
        parts: list[Part] = []
        for _ in range(num_collectives):
            name = draw.choice(list(groups))
            case = replace(draw_case(draw, choices[name], len(groups[name])), async_op=True)
            if name in member.memberships:
                parts.append((name, case, ""))
        for seed in range(num_messages):
            name = draw.choice(list(groups))
            message = _message(draw, len(groups[name]), seed)
            if name in member.memberships:
                rank = member.memberships[name].rank
                parts += [(name, message, message.send)] * (rank == message.source)
                parts += [(name, message, message.receive)] * (rank == message.target)
        member.note(f"round {number} of the traffic, {len(parts)} parts")
        problems = _fly(member, parts, random.Random(f"{number} {member.rank}"))
        failures += [f"round {number}: {problem}" for problem in problems]
    return num_rounds * (num_collectives + num_messages), failures[:SHOWN]


def _message(draw: random.Random, size: int, seed: int) -> Message:
    source, target = draw.choice(pairs(size))
    dtype = draw.choice(DTYPES)
    count = LARGE if draw.random() < 0.02 else draw.choice(COUNTS)
    return replace(draw_message(draw, source, target, dtype, count, seed), tag=draw.randrange(NUM_TAGS))


def _fly(member: Member, parts: list[Part], draw: random.Random) -> list[str]:
    collectives: list[Flight] = []
    sides: list[Side] = []
    for name, call, spelling in in_own_order(draw, parts, _kept_order):
        here = member.memberships[name]
        if isinstance(call, Case):
            collectives.append(Flight(here, call))
            continue
        side = Side(here, call, spelling).start()
        # A send whose work and tensor nobody keeps arrives all the same.
        if not side.sends or side.raised is not None or draw.random() >= DROPPED:
            sides.append(side)
    wait_for([*collectives, *sides], draw)
    problems = problems_of(collectives, member)
    return problems + [problem for side in sides if (problem := side.problem()) is not None]


def _kept_order(part: Part) -> Hashable:
    name, call, spelling = part
    return name if isinstance(call, Case) else (name, call.source, call.target, call.tag, spelling.endswith("send"))
