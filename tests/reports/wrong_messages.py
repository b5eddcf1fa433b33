"""Programs whose messages do not fit: each docstring is the report (see wrong_table.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from wrong_table import wrong

from phalanx.testing import World

# Elements of a message that is not sent before it is received.
LONG = 1000


@wrong(2)
def a_message_of_another_dtype(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:DTYPE] send, seq 1, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the dtype
    | of a message
    on rank 1: [MISMATCH:DTYPE] recv, seq 1, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the dtype
    | of a message
      rank 0: send(1000 elements of float32, to rank 1, tag 0)  <-- float32
        at {one}
      rank 1: recv(1000 elements of float64, from rank 0, tag 0)  <-- float64
        at {two}
      last completed call of all ranks: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    if rank == 0:
        dist.send(torch.ones(LONG), 1)  # one
    else:
        dist.recv(torch.ones(LONG, dtype=torch.float64), 0)  # two


@wrong(2)
def a_message_that_is_too_long(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:COUNT] send, seq 1, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the
    | number of elements of a message
    on rank 1: [MISMATCH:COUNT] recv, seq 1, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the
    | number of elements of a message
      rank 0: send(1001 elements of float32, to rank 1, tag 7)  <-- 1001 elements
        at {one}
      rank 1: recv(1000 elements of float32, from rank 0, tag 7)  <-- 1000 elements
        at {two}
      last completed call of all ranks: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    if rank == 0:
        dist.send(torch.ones(LONG + 1), 1, tag=7)  # one
    else:
        dist.recv(torch.ones(LONG), 0, tag=7)  # two


@wrong(2)
def a_message_that_is_too_short(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:COUNT] recv, seq 1, group 'default_pg', rank {rank}: rank 1 and rank 0 disagree about the
    | number of elements of a message
    on rank 1: [MISMATCH:COUNT] send, seq 1, group 'default_pg', rank {rank}: rank 1 and rank 0 disagree about the
    | number of elements of a message
      rank 1: send(999 elements of float32, to rank 0, tag 0)  <-- 999 elements
        at {one}
      rank 0: recv(1000 elements of float32, from rank 1, tag 0)  <-- 1000 elements
        at {two}
      last completed call of all ranks: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    if rank == 0:
        dist.recv(torch.ones(LONG), 1)  # two
    else:
        dist.send(torch.ones(LONG - 1), 0)  # one


@wrong(2, eager=True)
def a_sender_that_is_ahead(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [MISMATCH:COUNT] {call}, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the
    | number of elements of a message
      rank 0: send(1 element of float32, to rank 1, tag 0)  <-- 1 element
        at {one}
      rank 1: recv(2 elements of float32, from rank 0, tag 0)  <-- 2 elements
        at {two}
      last completed call of all ranks: barrier, seq 1, at {before}
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    if rank == 0:
        dist.send(torch.ones(1), 1)  # one
    dist.barrier()  # before
    if rank == 0:
        dist.recv(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(2), 0)  # two


@wrong(2, eager=True)
def a_sender_that_is_ahead_and_meets_the_others(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:DTYPE] all_reduce, seq 2, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the
    | dtype of a message
    on rank 1: [MISMATCH:DTYPE] recv, seq 1, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the dtype
    | of a message
      rank 0: send(1 element of int32, to rank 1, tag 0)  <-- int32
        at {one}
      rank 1: recv(1 element of float32, from rank 0, tag 0)  <-- float32
        at {two}
      last completed call of all ranks: barrier, seq 1, at {before}
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    if rank == 0:
        dist.send(torch.ones(1, dtype=torch.int32), 1)  # one
    dist.barrier()  # before
    if rank == 1:
        dist.recv(torch.ones(1), 0)  # two
    dist.all_reduce(torch.ones(1))


@wrong(2)
def an_asynchronous_message(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:COUNT] send, seq 1, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the
    | number of elements of a message
    on rank 1: [MISMATCH:COUNT] recv, seq 1, group 'default_pg', rank {rank}: rank 0 and rank 1 disagree about the
    | number of elements of a message
      rank 0: send(1000 elements of float32, to rank 1, tag 0)  <-- 1000 elements
        at {one}
      rank 1: recv(2000 elements of float32, from rank 0, tag 0)  <-- 2000 elements
        at {two}
      last completed call of all ranks: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    work: dist.Work | None = None
    if rank == 0:
        work = dist.isend(torch.ones(LONG), 1)  # one
    if rank == 1:
        work = dist.irecv(torch.ones(2 * LONG), 0)  # two
    assert work is not None
    work.wait()


@wrong(2)
def a_batch_of_messages(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [MISMATCH:COUNT] {call}, group 'default_pg', rank {rank}: rank 1 and rank 0 disagree about the
    | number of elements of a message
      rank 1: send(2000 elements of float32, to rank 0, tag 0)  <-- 2000 elements
        at {one}
      rank 0: recv(1000 elements of float32, from rank 1, tag 0)  <-- 1000 elements
        at {one}
      last completed call of all ranks: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    sent, received = torch.ones(2 * LONG if rank == 1 else LONG), torch.ones(LONG)
    ops = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):  # one
        work.wait()


@wrong()
def a_message_from_anybody(rank: int, world: World) -> None:
    """
    on rank 0: [MISMATCH:COUNT] recv, seq 1, group 'default_pg', rank {rank}: rank 1 and rank 0 disagree about the
    | number of elements of a message
    on rank 1: [MISMATCH:COUNT] send, seq 1, group 'default_pg', rank {rank}: rank 1 and rank 0 disagree about the
    | number of elements of a message
      rank 1: send(1000 elements of float32, to rank 0, tag 5)  <-- 1000 elements
        at {one}
      rank 0: recv(3 elements of float32, from rank 1, tag 5)  <-- 3 elements
        at {two}
      last completed call of both: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    if rank == 0:
        dist.recv(torch.ones(3), tag=5)  # two
    elif rank == 1:
        dist.send(torch.ones(LONG), 0, tag=5)  # one


@wrong(4, members=(3, 1))
def a_message_within_a_smaller_group(rank: int, world: World) -> None:
    """
    on rank 1: [MISMATCH:DTYPE] recv, seq 1, group 'columns', rank {rank}: rank 0 (global rank 3) and rank 1 disagree
    | about the dtype of a message
    on rank 3: [MISMATCH:DTYPE] send, seq 1, group 'columns', rank {rank}: rank 0 (global rank 3) and rank 1 disagree
    | about the dtype of a message
      rank 0 (global rank 3): send(1000 elements of float32, to rank 1, tag 0)  <-- float32
        at {one}
      rank 1: recv(1000 elements of int32, from rank 0 (global rank 3), tag 0)  <-- int32
        at {two}
      last completed call of all ranks: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    group = dist.new_group([3, 1], sort_ranks=False, group_desc="columns")
    if rank == 3:
        dist.send(torch.ones(LONG), 1, group)  # one
    elif rank == 1:
        dist.recv(torch.ones(LONG, dtype=torch.int32), 3, group)  # two


@wrong(3)
def a_message_too_many(rank: int, world: World) -> None:
    """
    on ranks 0, 2: [MISMATCH:COUNT] {call}, group 'default_pg', rank {rank}: rank 2 and rank 1 disagree about
    | the number of elements of a message
    on rank 1: [MISMATCH:COUNT] recv, seq 1, group 'default_pg', rank {rank}: rank 2 and rank 1 disagree about the
    | number of elements of a message
      rank 2: send(2 elements of float32, to rank 1, tag 0)  <-- 2 elements
        at {one}
      rank 1: recv(3 elements of float32, from rank 2, tag 0)  <-- 3 elements
        at {two}
      last completed call of both: none
      Next: receive into a tensor of the dtype and number of elements that are sent, or look for a message that is sent
      | or received once too often; this group can't be used any more
    """
    if rank == 2:
        dist.send(torch.ones(2), 1)  # one
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        dist.recv(torch.ones(3), 2)  # two
    dist.barrier()


@wrong(3, processes=False)
def a_circle_of_messages(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [DEADLOCK:P2P] nobody can go on
      rank 0 waits for rank 1 in send, seq 1, tag 0, group 'default_pg' ({one})
      rank 1 waits for rank 2 in send, seq 1, tag 0, group 'default_pg' ({one})
      rank 2 waits for rank 0 in send, seq 1, tag 0, group 'default_pg' ({one})
      Next: let one side receive first, or use isend and irecv, or batch_isend_irecv
    """
    dist.send(torch.ones(LONG), (rank + 1) % 3)  # one
    dist.recv(torch.ones(LONG), (rank - 1) % 3)


@wrong(2, processes=False)
def both_receive_first(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [DEADLOCK:P2P] nobody can go on
      rank 0 waits for rank 1 in recv, seq 1, tag 3, group 'default_pg' ({one})
      rank 1 waits for rank 0 in recv, seq 1, tag 3, group 'default_pg' ({one})
      Next: let one side receive first, or use isend and irecv, or batch_isend_irecv
    """
    dist.recv(torch.ones(1), 1 - rank, tag=3)  # one
    dist.send(torch.ones(1), 1 - rank, tag=3)


@wrong(2, processes=False)
def another_tag(rank: int, world: World) -> None:
    """
    on ranks 0, 1: [DEADLOCK:P2P] nobody can go on
      rank 0 waits for rank 1 in send, seq 1, tag 1, group 'default_pg' ({one})
      rank 1 waits for rank 0 in recv, seq 1, tag 2, group 'default_pg' ({two})
      Next: let one side receive first, or use isend and irecv, or batch_isend_irecv
    """
    if rank == 0:
        dist.send(torch.ones(LONG), 1, tag=1)  # one
    else:
        dist.recv(torch.ones(LONG), 0, tag=2)  # two


@wrong(3, processes=False)
def a_message_to_one_who_waits_for_all(rank: int, world: World) -> None:
    """
    on ranks 0, 1, 2: [DEADLOCK:ORDER] nobody can go on
      rank 0 waits for rank 1 in send, seq 1, tag 0, group 'default_pg' ({one})
      rank 1 waits for rank 0 in barrier, seq 1, group 'default_pg' ({two})
      1 more rank waits for these
      Next: make all ranks issue the calls of these groups in the same order, or asynchronously
    """
    if rank == 0:
        dist.send(torch.ones(LONG), 1)  # one
    dist.barrier()  # two
