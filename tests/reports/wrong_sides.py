"""Programs whose ranks disagree in more than one way: each docstring is the report (see wrong_table.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong_table import wrong

from phalanx.testing import World


@wrong(4)
def no_majority(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2, 3: [MISMATCH:REDUCE_OP] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about
    | the reduce op
      the group has ranks 0, 1, 2, 3
      ranks 0, 2: all_reduce(MIN, 4 elements of float32)  <-- MIN
        at {one}
      ranks 1, 3: all_reduce(SUM, 4 elements of float32)  <-- SUM
        at {one}
      no majority: any of these may be the one to mend
      last completed call of all ranks: none
      Next: pass the same reduce op on all ranks; this group can't be used any more
    """
    dist.all_reduce(torch.ones(4), dist.ReduceOp.SUM if rank % 2 else dist.ReduceOp.MIN)  # one


@wrong(2)
def two_ranks(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the number
    | of elements
      the group has ranks 0, 1
      rank 0: all_reduce(SUM, 2 elements of float32)  <-- 2 elements
        at {one}
      rank 1: all_reduce(SUM, 3 elements of float32)  <-- 3 elements
        at {one}
      no majority: any of these may be the one to mend
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    dist.all_reduce(torch.ones(2 + rank))  # one


@wrong(4)
def three_sides(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:OP] barrier, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 1: [MISMATCH:OP] broadcast, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
    on ranks 2, 3: [MISMATCH:OP] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2, 3
      ranks 2, 3: all_reduce(SUM, 2 elements of float32)  <-- all_reduce
        at {three}
      rank 0: barrier()  <-- barrier
        at {one}
      rank 1: broadcast(root 0, 2 elements of float32)  <-- broadcast
        at {two}
      no majority: any of these may be the one to mend
      last completed call of all ranks: none
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    if rank == 0:
        dist.barrier()  # one
    elif rank == 1:
        dist.broadcast(torch.ones(2), src=0)  # two
    else:
        dist.all_reduce(torch.ones(2))  # three


@wrong(5)
def a_majority_that_calls_from_two_places(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2, 3, 4: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about
    | the number of elements
      the group has ranks 0, 1, 2, 3, 4
      ranks 0, 1, 2, 3: all_reduce(SUM, 2 elements of float32)
        at {one} (ranks 0, 3)
        at {three} (ranks 1, 2)
      rank 4: all_reduce(SUM, 3 elements of float32)  <-- 3 elements
        at {two}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    if rank in (0, 3):
        dist.all_reduce(torch.ones(2))  # one
    elif rank == 4:
        dist.all_reduce(torch.ones(3))  # two
    else:
        dist.all_reduce(torch.ones(2))  # three


@wrong(5)
def sides_of_two_and_one(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2, 3, 4: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about
    | the number of elements
      the group has ranks 0, 1, 2, 3, 4
      ranks 0, 2: all_reduce(SUM, 2 elements of float32)  <-- 2 elements
        at {one}
      ranks 1, 4: all_reduce(SUM, 3 elements of float32)  <-- 3 elements
        at {one}
      rank 3: all_reduce(SUM, 4 elements of float32)  <-- 4 elements
        at {one}
      no majority: any of these may be the one to mend
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    dist.all_reduce(torch.ones((2, 3, 2, 4, 3)[rank]))  # one


@wrong(4)
def a_rank_that_does_not_come(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
    on rank 3: [MISMATCH:COUNT] recv, seq 1, group 'default_pg', rank {rank}: ranks disagree about the number of
    | elements
      the group has ranks 0, 1, 2, 3
      ranks 0, 2: all_reduce(SUM, 2 elements of float32)
        at {one}
      rank 1: all_reduce(SUM, 4 elements of float32)  <-- 4 elements
        at {one}
      rank 3: had not made this call
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    if rank == 3:
        dist.recv(torch.ones(1), 0)
    else:
        dist.all_reduce(torch.ones(4 if rank == 1 else 2))  # one


@wrong(2)
def another_op_and_everything_else(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:OP] all_gather, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 1: [MISMATCH:OP] reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1
      rank 0: all_gather(4 elements of float32)  <-- all_gather
        at {one}
      rank 1: reduce(MAX, root 1, 3 elements of int64)  <-- reduce
        at {two}
      no majority: any of these may be the one to mend
      last completed call of all ranks: none
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    if rank:
        dist.reduce(torch.ones(3, dtype=torch.int64), 1, dist.ReduceOp.MAX)  # two
    else:
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))  # one
