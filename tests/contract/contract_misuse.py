"""Calls that are refused on the rank that makes them, through torch.distributed and directly; and barriers."""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from contract_pool import Member
from torch import Tensor

from phalanx.errors import InvalidCall

__all__ = ["MESSAGE_MISUSES", "MISUSES", "misuse", "pass_barriers"]

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
    "tensors that share memory": (
        "INVALID:OVERLAP",
        lambda m: m.process_group.allreduce_coalesced(_overlapping(2)).wait(),
    ),
    "outputs of one list that share memory": (
        "INVALID:OVERLAP",
        lambda m: m.process_group.allgather_coalesced(
            [_overlapping(2), *([torch.zeros(3)] * 2 for _ in range(m.size - 1))], [torch.zeros(3)] * 2
        ).wait(),
    ),
    "outputs of two ranks that share memory": (
        "INVALID:OVERLAP",
        lambda m: (
            dist.all_gather(_overlapping(m.size), torch.zeros(3), group=m.group)
            if m.size > 1
            else dist.all_reduce(torch.zeros(5).as_strided((3, 3), (1, 1)), group=m.group)
        ),
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
    "an all_reduce of a memmap that is read-only": (
        "INVALID:MEMORY",
        lambda m: dist.all_reduce(_numpy_read_only(), group=m.group),
    ),
    "an async all_reduce of a memmap that is read-only": (
        "INVALID:MEMORY",
        lambda m: dist.all_reduce(_numpy_read_only(), group=m.group, async_op=True),
    ),
    "an all_reduce of a mapping that is read-only, through a copy": (
        "INVALID:MEMORY",
        lambda m: dist.all_reduce(_mapped_read_only()[::2], group=m.group),
    ),
    "a list with a mapping that is read-only": (
        "INVALID:MEMORY",
        lambda m: dist.all_gather(
            [torch.zeros(5000, dtype=torch.uint8) for _ in range(m.size - 1)] + [_mapped_read_only()],
            torch.zeros(5000, dtype=torch.uint8),
            group=m.group,
            async_op=True,
        ),
    ),
    "an output that is mapped read-only": (
        "INVALID:MEMORY",
        lambda m: dist.reduce_scatter_single(
            _mapped_read_only(), torch.zeros(m.size * 5000, dtype=torch.uint8), group=m.group
        ),
    ),
}


def _overlapping(num: int) -> list[Tensor]:
    """The first one and the last one share an element."""
    apart = torch.zeros(3 * num)
    return [*(apart[3 * i : 3 * i + 3] for i in range(num - 1)), apart[2:5]]


def _peer(member: Member) -> int:
    return (member.rank + 1) % member.size


def _isend(member: Member, tensor: Tensor, peer: int | None = None, tag: int = 0) -> Any:
    return dist.isend(tensor, group=member.group, group_dst=_peer(member) if peer is None else peer, tag=tag)


def _irecv(member: Member, tensor: Tensor, peer: int | None = None, tag: int = 0) -> Any:
    return dist.irecv(tensor, group=member.group, group_src=_peer(member) if peer is None else peer, tag=tag)


def _freed() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _mapped_read_only() -> Tensor:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(10_000))
        file.flush()
        return torch.frombuffer(mmap.mmap(file.fileno(), 10_000, prot=mmap.PROT_READ), dtype=torch.uint8)[5000:]


def _numpy_read_only() -> Tensor:
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(10_000))
        file.flush()
        return torch.from_numpy(numpy.memmap(file.name, dtype=numpy.float32, mode="r"))


# name -> (code, the call); no code where torch itself raises a ValueError
MESSAGE_MISUSES: dict[str, tuple[str | None, Callable[[Member], Any]]] = {
    "a send to a rank below zero": ("INVALID:PEER", lambda m: _isend(m, torch.zeros(3), -1)),
    "a send to a rank that is too high": ("INVALID:PEER", lambda m: _isend(m, torch.zeros(3), m.size)),
    "a receive from a rank below zero": ("INVALID:PEER", lambda m: _irecv(m, torch.zeros(3), -1)),
    "a receive from a rank that is too high": ("INVALID:PEER", lambda m: _irecv(m, torch.zeros(3), m.size)),
    "dist.send to oneself": (None, lambda m: dist.send(torch.zeros(3), group=m.group, group_dst=m.rank)),
    "a send with a tag below zero": ("INVALID:TAG", lambda m: _isend(m, torch.zeros(3), tag=-1)),
    "a receive with a tag below zero": ("INVALID:TAG", lambda m: _irecv(m, torch.zeros(3), tag=-1)),
    "a receive from anyone with a tag below zero": (
        "INVALID:TAG",
        lambda m: dist.irecv(torch.zeros(3), group=m.group, tag=-1),
    ),
    "a send with a tag that is too high": ("INVALID:TAG", lambda m: _isend(m, torch.zeros(3), tag=2**31)),
    "a receive with a tag that is too high": ("INVALID:TAG", lambda m: _irecv(m, torch.zeros(3), tag=2**31)),
    "a receive from anyone with a tag that is too high": (
        "INVALID:TAG",
        lambda m: dist.irecv(torch.zeros(3), group=m.group, tag=2**32),
    ),
    "a send of no tensor": ("INVALID:LIST", lambda m: m.process_group.send([], _peer(m), 0)),
    "a send of two tensors": ("INVALID:LIST", lambda m: m.process_group.send([torch.zeros(3)] * 2, _peer(m), 0)),
    "a receive into no tensor": ("INVALID:LIST", lambda m: m.process_group.recv([], _peer(m), 0)),
    "a receive into two tensors": (
        "INVALID:LIST",
        lambda m: m.process_group.recv([torch.zeros(3), torch.zeros(3)], _peer(m), 0),
    ),
    "a receive from anyone into two tensors": (
        "INVALID:LIST",
        lambda m: m.process_group.recv_anysource([torch.zeros(3), torch.zeros(3)], 0),
    ),
    "a send from another device": ("INVALID:DEVICE", lambda m: _isend(m, torch.zeros(3, device="meta"))),
    "a receive on another device": ("INVALID:DEVICE", lambda m: _irecv(m, torch.zeros(3, device="meta"))),
    "a send of a sparse tensor": ("INVALID:LAYOUT", lambda m: _isend(m, torch.eye(3).to_sparse())),
    "a receive into a sparse tensor": ("INVALID:LAYOUT", lambda m: _irecv(m, torch.eye(3).to_sparse())),
    "a receive into memory that overlaps": ("INVALID:OVERLAP", lambda m: _irecv(m, torch.zeros(1).expand(3))),
    "a receive from anyone into memory that overlaps": (
        "INVALID:OVERLAP",
        lambda m: dist.irecv(torch.zeros(5).as_strided((3, 3), (1, 1)), group=m.group),
    ),
    "a receive into a mapping that is read-only": ("INVALID:MEMORY", lambda m: _irecv(m, _mapped_read_only())),
    "a receive into a memmap that is read-only": ("INVALID:MEMORY", lambda m: _irecv(m, _numpy_read_only())),
    "a receive from anyone into memory that is read-only": (
        "INVALID:MEMORY",
        lambda m: dist.irecv(_mapped_read_only(), group=m.group),
    ),
    "a send of a tensor without memory": ("INVALID:TENSOR", lambda m: _isend(m, _freed())),
    "a receive into a tensor without memory": ("INVALID:TENSOR", lambda m: _irecv(m, _freed())),
}


def misuse(member: Member, name: str) -> list[str]:
    """Makes the call on all ranks, then on the last one only; the group must work after each."""
    warnings.simplefilter("ignore")
    code, call = {**MISUSES, **MESSAGE_MISUSES}[name]
    problems = []
    for whose in ("everybody", "the last rank"):
        member.note(f"{name}, by {whose}")
        if whose == "everybody" or member.rank == member.size - 1:
            for _ in range(3):
                try:
                    call(member)
                except InvalidCall as error:
                    if error.code != code or error.rank != member.rank:
                        problems.append(f"{whose}: expected {code} on rank {member.rank}, got {error}")
                except ValueError as error:
                    if code is not None:
                        problems.append(f"{whose}: expected {code}, got {error!r}")
                else:
                    problems.append(f"{whose}: nothing was raised")
        problems += [f"{whose}: {problem}" for problem in _use(member, name)]
    return problems


def _use(member: Member, name: str) -> list[str]:
    """An all_reduce, and after misuse of messages some that would meet what had been left behind."""
    total = torch.full((5,), float(member.rank))
    dist.all_reduce(total, group=member.group)
    problems = []
    if total.tolist() != [sum(range(member.size))] * 5:
        problems.append(f"the next all_reduce gave {total.tolist()}")
    if name in MESSAGE_MISUSES:
        works = [_isend(member, torch.full((3,), float(member.rank)), peer) for peer in _peers(member)]
        for peer in _peers(member):
            tensor = torch.full((3,), -1.0)
            _irecv(member, tensor, peer).wait()
            if tensor.tolist() != [peer] * 3:
                problems.append(f"the next message of rank {peer} was {tensor.tolist()}")
        for work in works:
            work.wait()
    return problems


def _peers(member: Member) -> list[int]:
    return [rank for rank in range(member.size) if rank != member.rank]


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
