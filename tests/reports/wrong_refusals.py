"""Programs of which a rank refuses a call and then makes another one or leaves: each docstring is the report (see
wrong_table.py)."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from wrong_table import wrong

from phalanx import InvalidCall
from phalanx.testing import World


@wrong()
def a_refused_call_and_another_one(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [MISMATCH:OP] all_gather, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 1: [MISMATCH:OP] barrier, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2
      ranks 0, 2: all_gather(6 elements of float32)
        at {all}
      rank 1: barrier()  <-- barrier
        at {other}
      rank 1 refused all_gather, seq 2, at {refused}: [INVALID:LIST] expected 3 tensors in outputs, one a rank, got 2
      last completed call of all ranks: barrier, seq 1, at {before}
      Next: fix the arguments on rank 1: give outputs one entry for each of the 3 ranks of the group; or make the ranks
      | issue the same calls in the same order; this group can't be used any more
    """
    dist.barrier()  # before
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            dist.all_gather(list(torch.empty(2, 2)), torch.ones(2))  # refused
        dist.barrier()  # other
    else:
        dist.all_gather(list(torch.empty(3, 2)), torch.ones(2))  # all


@wrong()
def calls_that_most_ranks_refused(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 1, 2: all_reduce(SUM, 3 elements of float32)
        at {other}
      rank 0: all_reduce(SUM, 2 elements of float32)  <-- 2 elements
        at {all}
      rank 1 refused all_reduce, seq 1, at {refused}: [INVALID:REDUCE_OP] expected a torch.distributed.ReduceOp, got
      | 'sum'
      rank 2 refused all_reduce, seq 1, at {refused}: [INVALID:REDUCE_OP] expected a torch.distributed.ReduceOp, got
      | 'sum'
      last completed call of all ranks: none
      Next: fix the arguments on ranks 1, 2: pass one of torch.distributed.ReduceOp, for example ReduceOp.SUM; or give
      | tensors of the same number of elements on all ranks, or look for a call that one of them left out; this group
      | can't be used any more
    """
    if rank == 0:
        dist.all_reduce(torch.ones(2))  # all
    else:
        with contextlib.suppress(InvalidCall):
            world.group.allreduce(torch.ones(2), "sum")  # refused
        dist.all_reduce(torch.ones(3))  # other


@wrong()
def a_refused_call_and_an_early_return(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [PEER_LOST] broadcast, seq 1, group 'default_pg', rank {rank}: rank 1 {ended} while rank 0 waited for
    | it in broadcast, seq 1, at {all}
      rank 1 refused broadcast, seq 1, at {refused}: [INVALID:ROOT] expected a root between 0 and 2, got 7
      Next: fix the arguments on rank 1: give the root as a rank within this group (dist.get_group_rank turns a global
      | rank into one); the other ranks were only waiting for it
    """
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            world.group.broadcast(torch.ones(2), root=7)  # refused
    else:
        dist.broadcast(torch.ones(2), 1)  # all


@wrong()
def a_refused_call_and_a_group_that_is_destroyed(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [PEER_LOST] reduce_scatter, seq 1, group 'default_pg', rank {rank}: rank 1 left the group (it was
    | destroyed there) while rank 0 waited for it in reduce_scatter, seq 1, at {all}
      rank 1 refused reduce_scatter, seq 1, at {refused}: [INVALID:SIZE] expected 3 elements in tensor (3
      | ranks times 1), got 4
      Next: fix the arguments on rank 1: pass tensor with 3 elements; the other ranks were only waiting for it
    """
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            dist.reduce_scatter_single(torch.empty(1), torch.ones(4))  # refused
        dist.destroy_process_group()
    else:
        dist.reduce_scatter_single(torch.empty(1), torch.ones(3))  # all


@wrong()
def a_refused_call_and_another_exception(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [PEER_LOST] all_reduce, seq 1, group 'default_pg', rank {rank}: rank 1 {ended} while rank 0 waited
    | for it in all_reduce, seq 1, at {all}
      the first exception of rank 1: LookupError: no shard ({raised})
        {harness}
        {raised}: raise LookupError("no shard")  # raised
      rank 1 refused all_reduce, seq 1, at {refused}: [INVALID:REDUCE_OP] expected a reduce op that
      | torch.float32 has, got BAND
      Next: mend what raised on rank 1; the others only waited for it

    on rank 1: LookupError: no shard
    """
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)  # refused
        raise LookupError("no shard")  # raised
    dist.all_reduce(torch.ones(2))  # all


@wrong(4, members=(3, 1))
def a_refused_call_within_a_smaller_group(rank: int, world: World) -> None:
    """
    on rank 3: [PEER_LOST] broadcast, seq 1, group 'columns', rank {rank}: rank 1 {ended} while rank 0 (global rank 3)
    | waited for it in broadcast, seq 1, at {all}
      rank 1 refused broadcast, seq 1, at {refused}: [INVALID:ROOT] expected a root between 0 and 1, got 3
      Next: fix the arguments on rank 1: give the root as a rank within this group (dist.get_group_rank turns a global
      | rank into one); the other ranks were only waiting for it
    """
    group = dist.new_group([3, 1], sort_ranks=False, group_desc="columns")
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            group.broadcast(torch.ones(2), root=3)  # refused
    if rank == 3:
        dist.broadcast(torch.ones(2), 1, group)  # all


@wrong()
def a_refused_send_and_another_one(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [MISMATCH:COUNT] {call}, group 'default_pg', rank {rank}: rank 1 and rank 0 disagree about the number
    | of elements of a message
      rank 1: send(3 elements of float32, to rank 0, tag 4)  <-- 3 elements
        at {other}
      rank 0: recv(2 elements of float32, from rank 1, tag 4)  <-- 2 elements
        at {received}
      rank 1 refused send to rank 0, tag 4, at {refused}: [INVALID:LAYOUT] expected tensor to be dense, got
      | torch.sparse_coo
      last completed call of both: none
      Next: fix the arguments on rank 1: pass tensor.to_dense(); or receive into a tensor of the dtype and number of
      | elements that are sent, or look for a message that is sent or received once too often; this group can't be used
      | any more
    """
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            dist.send(torch.ones(2).to_sparse(), 0, tag=4)  # refused
        dist.send(torch.ones(3), 0, tag=4)  # other
        dist.recv(torch.ones(1), 0, tag=9)
    elif rank == 0:
        dist.recv(torch.empty(2), 1, tag=4)  # received


@wrong()
def a_refused_receive_and_an_early_return(rank: int, world: World) -> None:
    """
    on rank 0: [PEER_LOST] send, seq 1, group 'default_pg', rank {rank}: rank 1 {ended} while rank 0 waited for it in
    | send, seq 1, at {sent}
      rank 1 refused recv from rank 0, at {refused}: [INVALID:TAG] expected a tag between 0 and 2147483647, got -5
      Next: fix the arguments on rank 1: number the kinds of messages from 0; the other ranks were only waiting for it
    """
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            dist.recv(torch.empty(5000), 0, tag=-5)  # refused
    elif rank == 0:
        dist.send(torch.ones(5000), 1, tag=5)  # sent


@wrong()
def a_refused_call_that_went_on(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [PEER_LOST] barrier, seq 2, group 'default_pg', rank {rank}: rank 1 {ended} while rank 2 waited for
    | it in barrier, seq 2, at {all}
      the last calls of rank 1:
        all_reduce, seq 1, group 'default_pg', at {right} (completed)
      Next: look for an error on rank 1; if there is none, let it make as many calls as the others before it ends or
      | destroys the group
    """
    if rank == 1:
        with contextlib.suppress(InvalidCall):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    dist.all_reduce(torch.ones(2))  # right
    if rank != 1:
        dist.barrier()  # all
