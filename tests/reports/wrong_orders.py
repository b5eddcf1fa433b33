"""Programs whose ranks make other calls, or in another order: each docstring is the report (see wrong_table.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from wrong_table import wrong

from phalanx.testing import World


@wrong()
def a_call_that_is_left_out(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [MISMATCH:OP] all_reduce, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
    on rank 2: [MISMATCH:OP] barrier, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2
      ranks 0, 1: all_reduce(SUM, 2 elements of float32)
        at {one}
      rank 2: barrier()  <-- barrier
        at {two}
      last completed call of all ranks: all_reduce, seq 1, at {before}
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    dist.all_reduce(torch.ones(2))  # before
    if rank != 2:
        dist.all_reduce(torch.ones(2))  # one
    dist.barrier()  # two


@wrong()
def a_call_too_many(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:OP] all_reduce, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
    on ranks 1, 2: [MISMATCH:OP] barrier, seq 2, group 'default_pg', rank {rank}: ranks disagree about the op
      the group has ranks 0, 1, 2
      ranks 1, 2: barrier()
        at {one}
      rank 0: all_reduce(SUM, 2 elements of float32)  <-- all_reduce
        at {two}
      last completed call of all ranks: all_reduce, seq 1, at {before}
      Next: make the ranks issue the same calls in the same order; this group can't be used any more
    """
    dist.all_reduce(torch.ones(2))  # before
    if rank == 0:
        dist.all_reduce(torch.ones(2))  # two
    dist.barrier()  # one


@wrong()
def a_call_that_is_left_out_among_equal_ones(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [PEER_LOST] all_reduce, seq 4, group 'default_pg', rank {rank}: rank 1 {ended} while rank 0 waited
    | for it in all_reduce, seq 4, at {one}
      the last calls of rank 1:
        all_reduce, seq 1, group 'default_pg', at {one} (completed)
        all_reduce, seq 2, group 'default_pg', at {one} (completed)
        all_reduce, seq 3, group 'default_pg', at {one} (completed)
      Next: look for an error on rank 1; if there is none, let it make as many calls as the others before it ends or
      | destroys the group
    """
    for _ in range(3 if rank == 1 else 4):
        dist.all_reduce(torch.ones(2))  # one


@wrong()
def a_loop_of_other_lengths(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 3, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 2 elements of float32)
        at {one}
      rank 1: all_reduce(SUM, 1 element of float32)  <-- 1 element
        at {two}
      last completed call of all ranks: all_reduce, seq 2, at {one}
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    for _ in range(2 if rank == 1 else 3):
        dist.all_reduce(torch.ones(2))  # one
    dist.all_reduce(torch.ones(1))  # two


@wrong(4, members=(1, 3, 2))
def within_a_smaller_group(rank: int, world: World) -> None:
    """
    on ranks 1, 2, 3: [MISMATCH:COUNT] all_reduce, seq 1, group 'columns', rank {rank}: ranks disagree about the number
    | of elements
      the group has ranks 0 (global rank 1), 1 (global rank 3), 2
      ranks 0 (global rank 1), 1 (global rank 3): all_reduce(SUM, 3 elements of float32)
        at {one}
      rank 2: all_reduce(SUM, 2 elements of float32)  <-- 2 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    group = dist.new_group([1, 3, 2], sort_ranks=False, group_desc="columns")
    if rank:
        dist.all_reduce(torch.ones(2 if rank == 2 else 3), group=group)  # one


@wrong(4, members=(1, 3), eager=True)
def splits_within_a_smaller_group(rank: int, world: World) -> None:
    """
    on ranks 1, 3: [MISMATCH:SPLITS] all_to_all, seq 1, group 'columns', rank {rank}: ranks disagree about the sizes
    | they exchange
      rank 0 (global rank 1): all_to_all(elements of float32, sizes 1, 2)
        at {one}
      rank 1 (global rank 3): all_to_all(elements of float32, sizes 1, 2)
        at {one}
      rank 0 (global rank 1) sends 2 elements to rank 1 (global rank 3), which expects 1
      last completed call of all ranks: none
      Next: make what each rank sends to another equal to what that one expects of it; this group can't be used any more
    """
    group = dist.new_group([1, 3], group_desc="columns")
    if rank % 2:
        expected = [1, 1] if rank == 1 else [1, 2]
        dist.all_to_all_single(torch.empty(sum(expected)), torch.ones(3), expected, [1, 2], group)  # one
        dist.barrier(group)


@wrong()
def an_asynchronous_call(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 2, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 0, 2: all_reduce(SUM, 2 elements of float32)
        at {one}
      rank 1: all_reduce(SUM, 3 elements of float32)  <-- 3 elements
        at {one}
      last completed call of all ranks: all_reduce, seq 1, at {before}
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    first = dist.all_reduce(torch.ones(2), async_op=True)  # before
    second = dist.all_reduce(torch.ones(3 if rank == 1 else 2), async_op=True)  # one
    first.wait()
    second.wait()


@wrong()
def an_asynchronous_call_that_others_wait_for(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:REDUCE_OP] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | reduce op
      the group has ranks 0, 1, 2
      ranks 0, 1: all_reduce(SUM, 2 elements of float32)
        at {one} (rank 0)
        at {two} (rank 1)
      rank 2: all_reduce(PRODUCT, 2 elements of float32)  <-- PRODUCT
        at {two}
      last completed call of all ranks: none
      Next: pass the same reduce op on all ranks; this group can't be used any more
    """
    if rank == 0:
        dist.all_reduce(torch.ones(2), async_op=True).wait()  # one
    else:
        dist.all_reduce(torch.ones(2), dist.ReduceOp.PRODUCT if rank == 2 else dist.ReduceOp.SUM)  # two


@wrong()
def a_coalesced_block(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 1, 2: all_reduce(SUM, 4 elements of float32, sizes 2, 2)
        at {one}
      rank 0: all_reduce(SUM, 5 elements of float32, sizes 2, 3)  <-- 5 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    with _coalescing_manager():  # one
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(3 if rank == 0 else 2))


@wrong()
def a_coalesced_block_with_one_call_less(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [MISMATCH:COUNT] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the
    | number of elements
      the group has ranks 0, 1, 2
      ranks 1, 2: all_reduce(SUM, 6 elements of float32, sizes 2, 2, 2)
        at {one}
      rank 0: all_reduce(SUM, 4 elements of float32, sizes 2, 2)  <-- 4 elements
        at {one}
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    with _coalescing_manager():  # one
        for _ in range(2 if rank == 0 else 3):
            dist.all_reduce(torch.ones(2))


@wrong(2, processes=False)
def groups_in_another_order(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [DEADLOCK:ORDER] nobody can go on
      rank 0 waits for rank 1 in all_reduce, seq 1, group 'rows' ({one})
      rank 1 waits for rank 0 in all_reduce, seq 1, group 'columns' ({one})
      Next: make all ranks issue the calls of these groups in the same order, or asynchronously
    """
    groups = [dist.new_group(group_desc=name) for name in ("rows", "columns")]
    if rank == 1:
        groups.reverse()
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)  # one


@wrong(3, processes=False)
def three_groups_in_a_circle(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [DEADLOCK:ORDER] nobody can go on
      rank 0 waits for rank 1 in barrier, seq 1, group 'edge 0' ({one})
      rank 1 waits for rank 2 in barrier, seq 1, group 'edge 1' ({one})
      rank 2 waits for rank 0 in barrier, seq 1, group 'edge 2' ({one})
      Next: make all ranks issue the calls of these groups in the same order, or asynchronously
    """
    groups = [dist.new_group(sorted((each, (each + 1) % 3)), group_desc=f"edge {each}") for each in range(3)]
    dist.barrier(groups[rank])  # one
    dist.barrier(groups[rank - 1])


@wrong(2)
def groups_mixed_up(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:COUNT] all_reduce, seq 2, group 'rows', rank {rank}: ranks disagree about the number of
    | elements
      the group has ranks 0, 1
      rank 0: all_reduce(SUM, 2 elements of float32)  <-- 2 elements
        at {one}
      rank 1: all_reduce(SUM, 3 elements of float32)  <-- 3 elements
        at {two}
      no majority: any of these may be the one to mend
      last completed call of all ranks: all_reduce, seq 1, at {before}
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more

    on rank 1: [MISMATCH:COUNT] all_reduce, seq 1, group 'columns', rank {rank}: ranks disagree about the number of
    | elements
      the group has ranks 0, 1
      rank 0: all_reduce(SUM, 3 elements of float32)  <-- 3 elements
        at {two}
      rank 1: all_reduce(SUM, 2 elements of float32)  <-- 2 elements
        at {one}
      no majority: any of these may be the one to mend
      last completed call of all ranks: none
      Next: give tensors of the same number of elements on all ranks, or look for a call that one of them left out; this
      | group can't be used any more
    """
    rows, columns = (dist.new_group(group_desc=name) for name in ("rows", "columns"))
    dist.all_reduce(torch.ones(2), group=rows)  # before
    works = [
        dist.all_reduce(torch.ones(2), group=columns if rank else rows, async_op=True),  # one
        dist.all_reduce(torch.ones(3), group=rows if rank else columns, async_op=True),  # two
    ]
    for work in works:
        work.wait()


@wrong(3, processes=False)
def a_group_that_one_rank_does_not_make(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [DEADLOCK:JOIN] nobody can go on
      rank 0 waits for rank 2 in new_group, group '1' ({one})
      rank 2 waits for rank 0 in barrier, seq 1, group 'default_pg' ({two})
      1 more rank waits for these
      Next: make all ranks make the same groups in the same order
    """
    if rank != 2:
        dist.new_group(group_desc="rows")  # one
    dist.barrier()  # two
