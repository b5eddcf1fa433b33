"""Programs of which a rank ends too early: each docstring is the report (see wrong_table.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong_table import wrong

from phalanx.testing import World


@wrong()
def an_exception(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [PEER_LOST] all_reduce, seq 2, group 'default_pg', rank {rank}: rank 1 {ended} while rank 2 waited
    | for it in all_reduce, seq 2, at {two}
      the first exception of rank 1: LookupError: no shard 7 ({one})
        {harness}
        {one}: raise LookupError("no shard 7")  # one
      the last calls of rank 1:
        barrier, seq 1, group 'default_pg', at {before} (completed)
      Next: mend what raised on rank 1; the others only waited for it

    on rank 1: LookupError: no shard 7
    """
    dist.barrier()  # before
    if rank == 1:
        raise LookupError("no shard 7")  # one
    dist.all_reduce(torch.ones(2))  # two


@wrong()
def an_invalid_call(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [PEER_LOST] all_gather, seq 1, group 'default_pg', rank {rank}: rank 2 {ended} while rank 0 waited
    | for it in all_gather, seq 1, at {one}
      the first exception of rank 2: phalanx.errors.InvalidCall: [INVALID:LIST] all_gather, group 'default_pg', rank 2:
      | expected 3 tensors in outputs, one a rank, got 2; Next: give outputs one entry for each of the 3 ranks of the
      | group ({one})
        {harness}
        {one}: dist.all_gather(outputs, torch.ones(2))  # one
      Next: mend what raised on rank 2; the others only waited for it

    on rank 2: [INVALID:LIST] all_gather, group 'default_pg', rank {rank}: expected 3 tensors in outputs, one a rank,
    | got 2
      Next: give outputs one entry for each of the 3 ranks of the group
    """
    outputs = [torch.empty(2) for _ in range(2 if rank == 2 else 3)]
    dist.all_gather(outputs, torch.ones(2))  # one


@wrong()
def an_early_return(rank: int, world: World) -> None:
    """
    on ranks 1, 2: [PEER_LOST] all_reduce, seq 1, group 'default_pg', rank {rank}: rank 0 {ended} while rank 2 waited
    | for it in all_reduce, seq 1, at {one}
      Next: look for an error on rank 0; if there is none, let it make as many calls as the others before it ends or
      | destroys the group
    """
    if rank == 0:
        return
    dist.all_reduce(torch.ones(2))  # one


@wrong()
def an_exit(rank: int, world: World) -> None:
    """
    on ranks 1, 2: [PEER_LOST] all_reduce, seq 1, group 'default_pg', rank {rank}: rank 0 {ended} while rank 2 waited
    | for it in all_reduce, seq 1, at {one}
      the first exception of rank 0: RuntimeError: rank 0 called sys.exit(3) ({two})
        {harness}
        {two}: raise SystemExit(3)  # two
      Next: mend what raised on rank 0; the others only waited for it
    """
    if rank == 0:
        raise SystemExit(3)  # two
    dist.all_reduce(torch.ones(2))  # one


@wrong()
def a_group_that_is_destroyed(rank: int, world: World) -> None:
    """
    on ranks 1, 2: [PEER_LOST] all_reduce, seq 1, group 'default_pg', rank {rank}: rank 0 left the group (it was
    | destroyed there) while rank 2 waited for it in all_reduce, seq 1, at {one}
      Next: look for an error on rank 0; if there is none, let it make as many calls as the others before it ends or
      | destroys the group
    """
    if rank == 0:
        dist.destroy_process_group()
    else:
        dist.all_reduce(torch.ones(2))  # one


@wrong(4, members=(3, 1))
def an_exception_within_a_smaller_group(rank: int, world: World) -> None:
    """
    on rank 1: LookupError: no shard

    on rank 3: [PEER_LOST] broadcast, seq 1, group 'columns', rank {rank}: rank 1 {ended} while rank 0 (global rank 3)
    | waited for it in broadcast, seq 1, at {two}
      the first exception of rank 1: LookupError: no shard ({one})
        {harness}
        {one}: raise LookupError("no shard")  # one
      Next: mend what raised on rank 1; the others only waited for it
    """
    group = dist.new_group([3, 1], sort_ranks=False, group_desc="columns")
    if rank == 1:
        raise LookupError("no shard")  # one
    if rank == 3:
        dist.broadcast(torch.ones(2), 1, group)  # two


@wrong()
def a_sender_that_has_ended(rank: int, world: World) -> None:
    """
    on rank 1: [PEER_LOST] recv, seq 1, group 'default_pg', rank {rank}: rank 0 {ended} while rank 1 waited for it in
    | recv, seq 1, at {one}
      Next: look for an error on rank 0; if there is none, let it make as many calls as the others before it ends or
      | destroys the group
    """
    if rank == 1:
        dist.recv(torch.ones(1), 0, tag=4)  # one


@wrong(processes=False)
def senders_that_have_all_ended(rank: int, world: World) -> None:
    """
    on rank 1: [PEER_LOST] recv, seq 1, group 'default_pg', rank {rank}: rank 0 {ended} while rank 1 waited for it in
    | recv, seq 1, at {one}
      Next: look for an error on rank 0; if there is none, let it make as many calls as the others before it ends or
      | destroys the group
    """
    if rank == 1:
        dist.recv(torch.ones(1))  # one


@wrong(4, processes=False)
def senders_one_of_which_raised(rank: int, world: World) -> None:
    """
    on rank 1: LookupError: no shard

    on rank 2: [PEER_LOST] recv, seq 1, group 'default_pg', rank {rank}: rank 1 {ended} while rank 2 waited for it in
    | recv, seq 1, at {two}
      the first exception of rank 1: LookupError: no shard ({one})
        {harness}
        {one}: raise LookupError("no shard")  # one
      Next: mend what raised on rank 1; the others only waited for it
    """
    if rank == 1:
        raise LookupError("no shard")  # one
    if rank == 2:
        dist.recv(torch.ones(1))  # two


@wrong(processes=False)
def an_exception_before_a_group_is_made(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [PEER_LOST] new_group, group '1', rank {rank}: rank 2 ended while the group was being made
      the first exception of rank 2: LookupError: no shard ({one})
        {harness}
        {one}: raise LookupError("no shard")  # one
      Next: mend what raised on rank 2; the others only waited for it

    on rank 2: LookupError: no shard
    """
    if rank == 2:
        raise LookupError("no shard")  # one
    dist.new_group(group_desc="rows")


@wrong()
def an_abort(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [ABORTED] all_reduce, seq 1, group 'default_pg', rank {rank}: rank 1 aborted the group: abort() was
    | called
      Next: make a new group; the first error on the rank that aborted tells why
    """
    if rank == 1:
        world.group.abort()
    else:
        dist.all_reduce(torch.ones(2))  # one
