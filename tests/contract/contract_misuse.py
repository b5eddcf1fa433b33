"""Calls that are refused on the rank that makes them, through torch.distributed; and barriers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contract_pool import Member

from phalanx.errors import InvalidCall

__all__ = ["MISUSES", "misuse", "pass_barriers"]

# name -> (code, the call)
MISUSES: dict[str, tuple[str, Callable[[Member], Any]]] = {
    "a device that is not the CPU": (
        "INVALID:DEVICE",
        lambda m: dist.all_reduce(torch.zeros(3, device="meta"), group=m.group),
    ),
    "a reduce op that the dtype does not have": (
        "INVALID:REDUCE_OP",
        lambda m: dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.BAND, group=m.group),
    ),
    "a dtype that can't be reduced": (
        "INVALID:DTYPE",
        lambda m: dist.all_reduce(torch.zeros(3, dtype=torch.float8_e8m0fnu), group=m.group),
    ),
    "an output that overlaps itself": (
        "INVALID:OVERLAP",
        lambda m: dist.all_reduce(torch.zeros(1).expand(3), group=m.group),
    ),
    "an output of the wrong size": (
        "INVALID:SIZE",
        lambda m: dist.all_gather_single(torch.zeros(3 * m.size + 1), torch.zeros(3), group=m.group),
    ),
    "an output of the wrong dtype": (
        "INVALID:DTYPE",
        lambda m: dist.all_gather_single(torch.zeros(3 * m.size).int(), torch.zeros(3), group=m.group),
    ),
    "a list that is too long": (
        "INVALID:LIST",
        lambda m: dist.all_gather([torch.zeros(3)] * (m.size + 1), torch.zeros(3), group=m.group),
    ),
    "a sparse tensor": (
        "INVALID:LAYOUT",
        lambda m: dist.all_gather([torch.zeros(3)] * m.size, torch.eye(3).to_sparse(), group=m.group),
    ),
    "splits that do not add up": (
        "INVALID:SIZE",
        lambda m: dist.all_to_all_single(torch.zeros(m.size), torch.zeros(m.size), None, [2] * m.size, group=m.group),
    ),
    "splits for other ranks": (
        "INVALID:LIST",
        lambda m: dist.all_to_all_single(
            torch.zeros(m.size), torch.zeros(m.size), [1] * (m.size + 1), None, group=m.group
        ),
    ),
}


def misuse(member: Member, name: str) -> list[str]:
    """Makes the call on all ranks, then on the last one only; the group must work after each."""
    code, call = MISUSES[name]
    problems = []
    for whose in ("everybody", "the last rank"):
        if whose == "everybody" or member.rank == member.size - 1:
            for _ in range(3):
                try:
                    call(member)
                except InvalidCall as error:
                    if error.code != code or error.rank != member.rank:
                        problems.append(f"{whose}: expected {code} on rank {member.rank}, got {error}")
                else:
                    problems.append(f"{whose}: nothing was raised")
        total = torch.full((5,), float(member.rank))
        dist.all_reduce(total, group=member.group)
        if total.tolist() != [sum(range(member.size))] * 5:
            problems.append(f"{whose}: the next all_reduce gave {total.tolist()}")
    return problems


def pass_barriers(member: Member, folder: Path, num_barriers: int) -> list[str]:
    """Leaves a mark before each barrier; after it all marks must be there."""
    missing = []
    for barrier in range(num_barriers):
        (folder / f"{barrier}-{member.rank}").touch()
        work = dist.barrier(group=member.group or dist.group.WORLD, async_op=barrier % 2 == 1)
        if work is not None:
            work.wait()
        missing += [f"{barrier}-{rank}" for rank in range(member.size) if not (folder / f"{barrier}-{rank}").exists()]
    return missing
