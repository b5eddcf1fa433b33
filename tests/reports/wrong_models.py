"""Programs that train, or compare more than signatures: each docstring is the report (see wrong_table.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.nn.parallel import DistributedDataParallel
from wrong_table import wrong

from phalanx.testing import World


@wrong()
def another_model(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 1: all_reduce(SUM, 6 elements of float32)
        at {one} (in the backward pass, by DDP's reducer)
      rank 2: all_reduce(SUM, 9 elements of float32)  <-- 9 elements
        at {one} (in the backward pass, by DDP's reducer)
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    width = 3 if rank == 2 else 2
    model = DistributedDataParallel(torch.nn.Linear(2, width), init_sync=False)
    model(torch.ones(1, 2)).sum().backward()  # one


@wrong(processes=False)
def another_model_in_ddp(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [PEER_LOST] broadcast, seq 3, group 'default_pg', rank {rank}: rank 2 {ended} while rank 0 waited for
    | it in broadcast, seq 3, at {one}
      the first exception of rank 2: RuntimeError: [2]: params[0] in this process with sizes [3, 2] appears not to match
      | sizes of the same param in process 0. ({one})
        {harness}
        {one}: DistributedDataParallel(torch.nn.Linear(2, 3 if rank == 2 else 2))  # one
      the last calls of rank 2:
        all_gather, seq 1, group 'default_pg', at {one} (completed)
        broadcast, seq 2, group 'default_pg', at {one} (completed)
      Next: mend what raised on rank 2; the others only waited for it

    on rank 2: RuntimeError: [2]: params[0] in this process with sizes [3, 2] appears not to match sizes of the same
    | param in process 0.
    """
    DistributedDataParallel(torch.nn.Linear(2, 3 if rank == 2 else 2))  # one


@wrong()
def another_way_back(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [MISMATCH:OP] all_reduce, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 1: [MISMATCH:OP] barrier, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 2 elements of float32)
        at {one} (in the backward pass)
      rank 1: barrier()  <-- barrier
        at {two}
      last completed call of all ranks: all_reduce, seq 1, at {before}
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    weight = torch.ones(2, requires_grad=True)
    loss = differentiable.all_reduce(weight).sum()  # before
    if rank == 1:
        dist.barrier()  # two
    loss.backward()  # one


@wrong(level="full")
def another_shape(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:SHAPE] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | shape of the tensor
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 6 elements of float32, shape (3, 2))
        at {one}
      rank 1: all_reduce(SUM, 6 elements of float32, shape (2, 3))  <-- shape (2, 3)
        at {one}
      last completed call of all ranks: none
      Next: pass tensors of the same sizes, in the same order, on all ranks; this group can't be used any more
    """
    dist.all_reduce(torch.ones(2, 3) if rank == 1 else torch.ones(3, 2))  # one


@wrong(level="full")
def another_number_of_elements_with_shapes(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 6 elements of float32, shape (3, 2))
        at {one}
      rank 1: all_reduce(SUM, 12 elements of float32, shape (3, 4))  <-- 12 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    dist.all_reduce(torch.ones(3, 4) if rank == 1 else torch.ones(3, 2))  # one


@wrong(level="full")
def another_op_with_shapes(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [MISMATCH:OP] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 1: [MISMATCH:OP] reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 6 elements of float32, shape (3, 2))
        at {one}
      rank 1: reduce(SUM, root 1, 6 elements of float32, shape (6,))  <-- reduce
        at {two}
      last completed call of all ranks: none
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    if rank == 1:
        dist.reduce(torch.ones(6), 1)  # two
    else:
        dist.all_reduce(torch.ones(3, 2))  # one


# Ranks that are threads share what is global.
SHARED = torch.zeros(5)


@wrong(processes=False, level="full")
def tensors_that_share_memory(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:RESULT] barrier, seq 2, group 'default_pg', rank {rank}: ranks disagree about the result
    | of the call before
      the group has ranks 0, 1, 2
      ranks 1, 2: barrier()
        at {one}
      rank 0: barrier()  <-- result {hash}
        at {one}
      last completed call of all ranks: all_reduce, seq 1, at {before}
      Next: look for code that writes to a tensor while a call that uses it is under way; this group can't be used any
      | more
    """
    own = SHARED[rank : rank + 3] if rank < 2 else torch.ones(3)
    own.copy_(torch.arange(3.0))
    dist.all_reduce(own)  # before
    dist.barrier()  # one
