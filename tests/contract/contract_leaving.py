"""Ranks that leave a group while calls are in flight that every rank has made."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace

import torch.distributed as dist
from contract_cases import LARGE, LARGE_BLOCK, Flight, cases, problems_of
from contract_pool import Member

__all__ = ["leave_in_flight"]


class _Guest:
    """A member of the world, in another group of the same ranks."""

    def __init__(self, member: Member, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = member.rank
        self.size = member.size
        self.answers = member.answers


def leave_in_flight(member: Member, form: str, meets_first: bool) -> list[str]:
    """What went wrong. The last rank waits for its calls; the others leave the group instead.

    All must have the right data. With `meets_first` all ranks have made all calls before the first one leaves.
    """
    warnings.simplefilter("ignore")
    draw = random.Random(f"leaving, {form}")
    large = [case for case in cases(form, member.size) if case.count in (LARGE, LARGE_BLOCK)]
    small = [case for case in cases(form, member.size) if case.count == 1037]
    chosen = [*draw.sample(large, 3), *draw.sample(small, 5)]
    draw.shuffle(chosen)
    group = dist.new_group(group_desc="left early")
    member.note(f"leaving while {form} is in flight")
    flights = [Flight(_Guest(member, group), replace(case, async_op=True)) for case in chosen]  # type: ignore[arg-type]
    if meets_first:
        dist.barrier(member.group)
    if member.rank == member.size - 1:
        for flight in flights:
            flight.wait()
    dist.destroy_process_group(group)
    failures = problems_of(flights, member)
    dist.barrier(member.group)
    return failures
