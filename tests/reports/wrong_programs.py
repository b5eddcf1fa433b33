"""Programs whose ranks disagree about one call: each docstring is the report (wrong_table.py says how to read it)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong_table import wrong

from phalanx.testing import World


@wrong()
def another_op(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [MISMATCH:OP] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 2: [MISMATCH:OP] barrier, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2
      ranks 0, 1: all_reduce(SUM, 4 elements of float32)
        at {one}
      rank 2: barrier()  <-- barrier
        at {two}
      last completed call of all ranks: none
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    if rank < 2:
        dist.all_reduce(torch.ones(4))  # one
    else:
        dist.barrier()  # two


@wrong()
def another_reduce_op(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:REDUCE_OP] all_reduce, seq 2, group 'default_pg', rank {rank}: ranks disagree about the
    | reduce op
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 4 elements of float32)
        at {one}
      rank 1: all_reduce(MAX, 4 elements of float32)  <-- MAX
        at {two}
      last completed call of all ranks: barrier, seq 1, at {before}
      Next: pass the same reduce op on all ranks; this group can't be used any more
    """
    dist.barrier()  # before
    if rank == 1:
        dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX)  # two
    else:
        dist.all_reduce(torch.ones(4))  # one


@wrong(eager=True)
def another_root(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:ROOT] reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the root
      the group has ranks 0, 1, 2
      ranks 1, 2: reduce(SUM, root 2, 4 elements of float32)
        at {one}
      rank 0: reduce(SUM, root 1, 4 elements of float32)  <-- root 1
        at {one}
      last completed call of all ranks: none
      Next: pass the same root on all ranks; this group can't be used any more
    """
    dist.reduce(torch.ones(4), dst=1 if rank == 0 else 2)  # one
    dist.barrier()


@wrong(eager=True)
def a_root_that_is_ahead(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] broadcast, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 1, 2: broadcast(root 0, 3 elements of float32)
        at {one}
      rank 0: broadcast(root 0, 4 elements of float32)  <-- 4 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    dist.broadcast(torch.ones(4 if rank == 0 else 3), src=0)  # one
    dist.barrier()


@wrong(eager=True)
def a_root_that_is_far_ahead(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] broadcast, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 1, 2: broadcast(root 0, 3 elements of float32)
        at {one}
      rank 0: broadcast(root 0, 4 elements of float32)  <-- 4 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    for _ in range(6):
        dist.broadcast(torch.ones(4 if rank == 0 else 3), src=0)  # one


@wrong(eager=True)
def each_its_own_root(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:ROOT] broadcast, seq 1, group 'default_pg', rank {rank}: ranks disagree about the root
      the group has ranks 0, 1, 2
      rank 0: broadcast(root 0, 4 elements of float32)  <-- root 0
        at {one}
      rank 1: broadcast(root 1, 4 elements of float32)  <-- root 1
        at {one}
      rank 2: broadcast(root 2, 4 elements of float32)  <-- root 2
        at {one}
      no majority: any of these may be the one to mend
      last completed call of all ranks: none
      Next: pass the same root on all ranks; this group can't be used any more
    """
    dist.broadcast(torch.ones(4), src=rank)  # one
    dist.barrier()


@wrong()
def another_dtype(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:DTYPE] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | dtype
      the group has ranks 0, 1, 2
      ranks 0, 1: all_reduce(SUM, 4 elements of float32)
        at {one}
      rank 2: all_reduce(SUM, 4 elements of float64)  <-- float64
        at {one}
      last completed call of all ranks: none
      Next: give tensors of one dtype on all ranks, or look for a call that one of them left out; this group can't be
      | used any more
    """
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 2 else torch.float32))  # one


@wrong()
def another_count(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 1, 2: all_reduce(SUM, 4 elements of float32)
        at {one}
      rank 0: all_reduce(SUM, 5 elements of float32)  <-- 5 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    dist.all_reduce(torch.ones(5 if rank == 0 else 4))  # one


@wrong()
def another_dtype_and_count(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:DTYPE] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | dtype
      the group has ranks 0, 1, 2
      ranks 1, 2: all_reduce(SUM, 6 elements of float32)
        at {one}
      rank 0: all_reduce(SUM, 4 elements of int32)  <-- int32
        at {one}
      last completed call of all ranks: none
      Next: give tensors of one dtype on all ranks, or look for a call that one of them left out; this group can't be
      | used any more
    """
    dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(4, dtype=torch.int32))  # one


@wrong()
def nothing_to_reduce(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 1 element of float32)
        at {one}
      rank 1: all_reduce(SUM, 0 elements of float32)  <-- 0 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    dist.all_reduce(torch.ones(0 if rank == 1 else 1))  # one


@wrong()
def another_division_of_a_coalesced_call(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:SHAPE] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about how the
    | elements are divided between tensors
      the group has ranks 0, 1, 2
      ranks 0, 1: all_reduce(SUM, 4 elements of float32, sizes 2, 2)
        at {one}
      rank 2: all_reduce(SUM, 4 elements of float32, sizes 1, 3)  <-- sizes 1, 3
        at {one}
      last completed call of all ranks: none
      Next: pass tensors of the same sizes, in the same order, on all ranks; this group can't be used any more
    """
    sizes = (1, 3) if rank == 2 else (2, 2)
    dist.all_reduce_coalesced([torch.ones(size) for size in sizes])  # one


@wrong()
def many_coalesced_tensors(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:SHAPE] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about how the
    | elements are divided between tensors
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 12 elements of float32, sizes 1, 1, 1, 1, 1, 1, 1, 3, ...)
        at {one}
      rank 1: all_reduce(SUM, 12 elements of float32, sizes 1, 1, 1, 1, 1, 1, 1, 2, ...)  <-- sizes 1, 1, 1, 1, 1, 1, 1,
      | 2, ...
        at {one}
      last completed call of all ranks: none
      Next: pass tensors of the same sizes, in the same order, on all ranks; this group can't be used any more
    """
    sizes = [1] * 7 + [2, 3] if rank == 1 else [1] * 7 + [3, 2]
    dist.all_reduce_coalesced([torch.ones(size) for size in sizes])  # one


@wrong(eager=True)
def splits_that_do_not_fit(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:SPLITS] all_to_all, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | sizes they exchange
      rank 0: all_to_all(elements of float32, sizes 2, 2, 2)
        at {one}
      rank 1: all_to_all(elements of float32, sizes 1, 2, 2)
        at {one}
      rank 1 sends 1 element to rank 0, which expects 2
      last completed call of all ranks: none
      Next: make what each rank sends to another equal to what that one expects of it; this group can't be used any more
    """
    splits = [1, 2, 2] if rank == 1 else [2, 2, 2]
    dist.all_to_all_single(torch.empty(6), torch.ones(sum(splits)), input_split_sizes=splits)  # one
    dist.barrier()


@wrong(eager=True)
def lists_that_do_not_fit(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:SPLITS] all_to_all, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | sizes they exchange
      rank 0: all_to_all(elements of float32, sizes 2, 2, 2)
        at {one}
      rank 2: all_to_all(elements of float32, sizes 4, 2, 2)
        at {one}
      rank 2 sends 4 elements to rank 0, which expects 2
      last completed call of all ranks: none
      Next: make what each rank sends to another equal to what that one expects of it; this group can't be used any more
    """
    inputs = [torch.ones(4 if (rank, to) == (2, 0) else 2) for to in range(3)]
    dist.all_to_all([torch.empty(2) for _ in range(3)], inputs)  # one
    dist.barrier()


@wrong()
def another_dtype_to_exchange(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:DTYPE] all_to_all, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | dtype
      the group has ranks 0, 1, 2
      ranks 1, 2: all_to_all(elements of int32)
        at {one}
      rank 0: all_to_all(elements of int16)  <-- int16
        at {one}
      last completed call of all ranks: none
      Next: give tensors of one dtype on all ranks, or look for a call that one of them left out; this group can't be
      | used any more
    """
    dtype = torch.int16 if rank == 0 else torch.int32
    dist.all_to_all_single(torch.empty(3, dtype=dtype), torch.ones(3, dtype=dtype))  # one


@wrong(eager=True)
def another_size_to_gather(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] gather, seq 1, group 'default_pg', rank {rank}: ranks disagree about the number
    | of elements
      the group has ranks 0, 1, 2
      ranks 0, 1: gather(root 0, 2 elements of float32)
        at {one}
      rank 2: gather(root 0, 3 elements of float32)  <-- 3 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    size = 3 if rank == 2 else 2
    dist.gather(torch.ones(size), list(torch.empty(3, size)) if rank == 0 else None)  # one
    dist.barrier()


@wrong(eager=True)
def another_size_to_scatter(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] scatter, seq 1, group 'default_pg', rank {rank}: ranks disagree about the number
    | of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: scatter(root 0, 2 elements of float32)
        at {one}
      rank 1: scatter(root 0, 3 elements of float32)  <-- 3 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    size = 3 if rank == 1 else 2
    dist.scatter(torch.empty(size), [torch.ones(size)] * 3 if rank == 0 else None)  # one
    dist.barrier()


@wrong()
def another_size_to_reduce_and_scatter(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] reduce_scatter, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: reduce_scatter(SUM, 6 elements of float32)
        at {one}
      rank 1: reduce_scatter(SUM, 9 elements of float32)  <-- 9 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    size = 3 if rank == 1 else 2
    dist.reduce_scatter_single(torch.empty(size), torch.ones(3 * size))  # one


@wrong()
def another_list_to_reduce_and_scatter(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:SHAPE] reduce_scatter, seq 1, group 'default_pg', rank {rank}: ranks disagree about how
    | the elements are divided between tensors
      the group has ranks 0, 1, 2
      ranks 1, 2: reduce_scatter(SUM, 5 elements of float32, sizes 2, 1, 2)
        at {one}
      rank 0: reduce_scatter(SUM, 5 elements of float32, sizes 2, 2, 1)  <-- sizes 2, 2, 1
        at {one}
      last completed call of all ranks: none
      Next: pass tensors of the same sizes, in the same order, on all ranks; this group can't be used any more
    """
    sizes = [2, 2, 1] if rank == 0 else [2, 1, 2]
    dist.reduce_scatter(torch.empty(sizes[rank]), [torch.ones(size) for size in sizes])  # one


@wrong()
def another_size_to_gather_on_all(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_gather, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: all_gather(6 elements of float32)
        at {one}
      rank 1: all_gather(3 elements of float32)  <-- 3 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    size = 1 if rank == 1 else 2
    dist.all_gather_single(torch.empty(3 * size), torch.ones(size))  # one


@wrong()
def a_deprecated_function(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_gather, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: all_gather(6 elements of float32)
        at {one}
      rank 1: all_gather(3 elements of float32)  <-- 3 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    size = 1 if rank == 1 else 2
    dist.all_gather_into_tensor(torch.empty(3 * size), torch.ones(size))  # one


@wrong()
def another_list_to_gather_on_all(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:SHAPE] all_gather, seq 1, group 'default_pg', rank {rank}: ranks disagree about how the
    | elements are divided between tensors
      the group has ranks 0, 1, 2
      ranks 0, 1: all_gather(6 elements of float32, sizes 1, 2, 3)
        at {one}
      rank 2: all_gather(6 elements of float32, sizes 2, 1, 3)  <-- sizes 2, 1, 3
        at {one}
      last completed call of all ranks: none
      Next: pass tensors of the same sizes, in the same order, on all ranks; this group can't be used any more
    """
    sizes = [2, 1, 3] if rank == 2 else [1, 2, 3]
    dist.all_gather([torch.empty(size) for size in sizes], torch.ones(rank + 1))  # one


@wrong()
def objects_instead_of_tensors(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [MISMATCH:OP] all_gather, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 1: [MISMATCH:OP] broadcast, seq 1, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2
      ranks 0, 2: all_gather(3 elements of int64)
        at {one}
      rank 1: broadcast(root 0, 1 element of int64)  <-- broadcast
        at {two}
      last completed call of all ranks: none
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    if rank == 1:
        dist.broadcast_object_list([rank])  # two
    else:
        dist.all_gather_object([None] * 3, rank)  # one
