"""Programs of messages that every group must run; some would hang if a message had to wait for another one.

Each returns how many messages it is about and what went wrong, as the runners of collectives do.
"""

from __future__ import annotations

import mmap
import random
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contract_cases import SHOWN, wait_for
from contract_data import difference, values
from contract_messages import COUNTS, DTYPES, Message, Side, draw_message, every_kind, in_own_order, pairs, sides_of
from contract_pool import Member
from torch import Tensor

from huge import PERIOD, last_of, repeating

__all__ = [
    "exchange_both_ways",
    "exchange_huge",
    "exchange_in_batches",
    "exchange_in_threads",
    "exchange_objects",
    "exchange_one_by_one",
    "exchange_with_oneself",
    "misarrivals",
    "receive_from_any_and_one",
    "receive_from_anyone",
    "receive_in_another_order",
    "send_what_can_only_be_read",
]

Result = tuple[int, list[str]]
LARGE = (5 << 20) + 3
HUGE = (2 << 30) + 1000


def _result(num_messages: int, sides: Iterable[Side]) -> Result:
    problems = (side.problem() for side in sides)
    return num_messages, [problem for problem in problems if problem is not None][:SHOWN]


def exchange_one_by_one(member: Member) -> Result:
    """Every kind of message, the next one after the last has come to its end."""
    warnings.simplefilter("ignore")
    messages = list(every_kind(member.size))
    done: list[Side] = []
    for message in messages:
        member.note(str(message))
        sends, receives = sides_of(member, [message])
        for side in sends + receives:
            side.start().wait()
            done.append(side)
        # The other side of a message that went wrong is of no use to those that follow.
        if done and done[-1].raised:
            break
    return _result(len(messages), done)


def receive_in_another_order(member: Member, late: bool) -> Result:
    """Receives that block, one after another, in another order of tags than the sends, which are all in flight.

    Where the receives are late all sends have been made before the first of them.
    """
    warnings.simplefilter("ignore")
    draw = random.Random("another order")
    messages = []
    for source, target in pairs(member.size):
        counts = [*COUNTS, LARGE, 1, 0]
        for seed, count in enumerate(counts):
            dtype = torch.uint8 if count == LARGE else draw.choice((torch.int64, torch.float16, torch.uint8))
            message = draw_message(draw, source, target, dtype, count, seed)
            messages.append(replace(message, tag=draw.randrange(6), receive=draw.choice(("recv", "direct recv"))))
    sends, receives = sides_of(member, messages)
    for side in sends:
        side.start()
    if late:
        dist.barrier(group=member.process_group)
    for side in in_own_order(random.Random(member.rank), receives, lambda s: (s.message.source, s.message.tag)):
        member.note(str(side.message))
        side.start().wait()
    wait_for(sends, draw)
    return _result(len(messages), sends + receives)


def exchange_both_ways(member: Member, first: str) -> Result:
    """Large messages from everyone to everyone at once; each rank starts all its sends or all its receives first."""
    messages = [Message(source, target, torch.uint8, LARGE, seed=source) for source, target in pairs(member.size)]
    sends, receives = sides_of(member, messages)
    sides = sends + receives if first == "isend" else receives + sends
    for side in sides:
        side.start()
    for side in sides:
        member.note(str(side.message))
        side.wait()
    return _result(len(messages), sides)


def exchange_with_oneself(member: Member, first: str) -> Result:
    """Each rank's messages to itself, among those to others; a receive from anyone is none of its own."""
    everyone = [(source, target) for source in range(member.size) for target in range(member.size)]
    messages = [
        Message(source, target, torch.int32, count, seed=source, tag=tag, send=send, receive=receive)
        for source, target in everyone
        for tag, count in enumerate((0, 5, 700, LARGE // 4))
        for send, receive in [("isend", "irecv") if tag % 2 else ("direct send", "direct recv")]
    ]
    sends, receives = sides_of(member, messages)
    sides = sends + receives if first == "isend" else receives + sends
    for side in sides:
        side.start()
    wait_for(sides, random.Random(member.rank))
    return _result(len(messages), sides)


def exchange_in_batches(member: Member, num_batches: int) -> Result:
    warnings.simplefilter("ignore")
    draw = random.Random("batches")
    num_messages = 0
    done: list[Side] = []
    for batch in range(num_batches):
        member.note(f"batch {batch}")
        messages: list[Message] = []
        for source, target in pairs(member.size) * 3:
            message = draw_message(draw, source, target, draw.choice(DTYPES), draw.choice(COUNTS), len(messages))
            if message.dtype.is_complex:
                message = replace(message, of="flat", into="flat")
            messages.append(replace(message, tag=draw.randrange(2)))
        num_messages += len(messages)
        sends, receives = sides_of(member, messages)
        # Anything may come first, and on each rank something else.
        sides = in_own_order(
            random.Random(f"{batch} {member.rank}"),
            sends + receives,
            lambda s: (s.message.source, s.message.target, s.message.tag),
        )
        works = dist.batch_isend_irecv([side.as_op() for side in sides])
        if len(works) != len(sides):
            return num_messages, [f"{len(works)} works of {len(sides)} ops"]
        for side, work in zip(sides, works, strict=True):
            side.work = work
        wait_for(sides, draw)
        done += sides
    return _result(num_messages, done)


def receive_from_anyone(member: Member, count: int, num_each: int, late: bool) -> Result:
    """Everyone sends to everyone, and no receive says from whom. Two tags are in use at once."""
    tags = (3, 5)
    peers = [rank for rank in range(member.size) if rank != member.rank]
    numbered = [(tag, number) for number in range(num_each) for tag in tags]

    def send() -> list[Any]:
        return [
            dist.isend(torch.full((count,), _payload(member.rank, number)), group=member.group, group_dst=peer, tag=tag)
            for tag, number in numbered
            for peer in peers
        ]

    works = send() if late else []
    if late:
        dist.barrier(group=member.process_group)
    posted: list[tuple[int, Tensor, Any]] = []
    for tag in in_own_order(random.Random(member.rank), [tag for tag, _ in numbered for _ in peers], lambda tag: tag):
        tensor = torch.full((count,), -1)
        posted.append((tag, tensor, dist.irecv(tensor, group=member.group, tag=tag)))
    works += [] if late else send()
    arrivals: dict[int, list[tuple[int, int]]] = {tag: [] for tag in tags}
    problems = []
    for tag, tensor, work in posted:
        member.note(f"{len(arrivals[tag])} have come with tag {tag}")
        work.wait()
        source, number = divmod(int(tensor[0]), 1000)
        arrivals[tag].append((source, number))
        if work._source_rank() != source:
            problems.append(f"a message of rank {source} is said to be from rank {work._source_rank()}")
        if not bool((tensor == tensor[0]).all()):
            problems.append(f"a message of rank {source} is mixed with others: {sorted(set(tensor.tolist()))}")
    for work in works:
        work.wait()
    for tag in tags:
        problems += misarrivals(arrivals[tag], peers, num_each)
    return len(numbered) * len(peers), problems[:SHOWN]


def _payload(rank: int, number: int) -> int:
    return 1000 * rank + number


def misarrivals(arrivals: Sequence[tuple[int, int]], peers: Sequence[int], num_each: int) -> list[str]:
    """What is wrong with (source, number) in the order of the receives: each once, those of a source in order."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for source, number in arrivals:
        numbers[source].append(number)
    expected = list(range(num_each))
    return [
        f"from rank {source} came {numbers[source]}"
        for source in sorted({*peers, *numbers})
        if numbers[source] != (expected if source in peers else [])
    ]


def receive_from_any_and_one(member: Member) -> Result:
    """Where only one rank sends, receives from it and from anyone take its messages in the order they were made in."""
    left, right = (member.rank - 1) % member.size, (member.rank + 1) % member.size
    spellings = ["irecv any", "irecv", "irecv", "direct recv any", "direct recv", "irecv any", "irecv any", "irecv"] * 3
    counts = [COUNTS[i % len(COUNTS)] for i in range(len(spellings))]
    given = list(enumerate(zip(spellings, counts, strict=True)))
    incoming = [Message(left, member.rank, torch.int32, n, 9, "isend", text, seed=i) for i, (text, n) in given]
    outgoing = [Message(member.rank, right, torch.int32, n, 9, "isend", text, seed=i) for i, (text, n) in given]
    sides = [Side(member, message, message.receive).start() for message in incoming]
    sides += [Side(member, message, message.send).start() for message in outgoing]
    wait_for(sides, random.Random(0))
    return _result(len(given), sides)


def send_what_can_only_be_read(member: Member, folder: Path) -> Result:
    """Memory of senders may be shared: by elements of a tensor, by tensors in flight, with a file that is read-only."""
    warnings.simplefilter("ignore")
    path = folder / "bytes"
    whole = values(torch.uint8, 300_007, lane=0, seed=3)
    if member.rank == 0:
        path.write_bytes(bytes(whole.tolist()))
    dist.barrier(group=member.process_group)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sources = [
        torch.frombuffer(mapped, dtype=torch.uint8),
        whole,
        whole[7:100_001],
        whole[::3],
        torch.arange(1037)[None].expand(64, -1),
        torch.ones(1).expand(70_001),
    ]
    peers = [rank for rank in range(member.size) if rank != member.rank]
    works, received = [], []
    for tag, tensor in enumerate(sources):
        works += [dist.isend(tensor, group=member.group, group_dst=peer, tag=tag) for peer in peers]
    for tag, tensor in enumerate(sources):
        for peer in peers:
            into = torch.empty(tensor.shape, dtype=tensor.dtype)
            received.append((tag, peer, into, dist.irecv(into, group=member.group, group_src=peer, tag=tag)))
    problems = []
    for tag, peer, into, work in received:
        assert work is not None
        work.wait()
        problem = difference(into, sources[tag], nan_is_nan=False)
        if problem is not None:
            problems.append(f"tensor {tag} of rank {peer}: {problem}")
    for work in works:
        assert work is not None
        work.wait()
    return len(received), problems


def exchange_objects(member: Member) -> Result:
    """Lists of objects between all pairs in turn, alone and in batches."""
    problems = []
    turns = [(source, target, use_batch) for source, target in pairs(member.size) for use_batch in (False, True)]
    for source, target, use_batch in turns:
        objects = [{"from": source, "to": [target, None]}, "", use_batch, list(range(1000 * source)), b"\0" * 300_000]
        member.note(f"objects from {source} to {target}, batch: {use_batch}")
        if member.rank == source:
            dist.send_object_list(objects, group=member.group, group_dst=target, use_batch=use_batch)
        elif member.rank == target:
            received: list[Any] = [None] * len(objects)
            said = dist.recv_object_list(received, group=member.group, group_src=source, use_batch=use_batch)
            if received != objects or said != dist.get_global_rank(member.process_group, source):
                problems.append(f"from {source}, batch {use_batch}: said to be from {said}, {str(received)[:200]}")
    return len(turns), problems


def exchange_in_threads(member: Member, num_threads: int, num_rounds: int) -> Result:
    """Several threads of each rank, each with a tag of its own, pass messages round the ring."""
    left, right = (member.rank - 1) % member.size, (member.rank + 1) % member.size
    problems: list[str] = []

    def pass_on(tag: int) -> None:
        draw = random.Random(tag)
        try:
            for seed in range(num_rounds):
                count = draw.choice(COUNTS)
                into = torch.empty(count, dtype=torch.int32)
                outgoing = values(torch.int32, count, lane=member.rank, seed=seed + tag)
                work = dist.isend(outgoing, group=member.group, group_dst=right, tag=tag)
                dist.recv(into, group=member.group, group_src=left, tag=tag)
                assert work is not None
                work.wait()
                expected = values(torch.int32, count, lane=left, seed=seed + tag)
                problem = difference(into, expected, nan_is_nan=False)
                if problem is not None:
                    problems.append(f"round {seed} of the thread with tag {tag}: {problem}")
        except Exception as error:
            problems.append(f"the thread with tag {tag} raised {error!r}")

    threads = [threading.Thread(target=pass_on, args=(tag,), daemon=True) for tag in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_threads * num_rounds, problems[:SHOWN]


def exchange_huge(member: Member) -> Result:
    """More than 2 GiB, and than 2**31 elements, from rank 0 to rank 1."""
    pattern = torch.arange(PERIOD // 8).view(torch.uint8)
    with repeating(HUGE) as tensor:
        first, last = tensor[:PERIOD], last_of(tensor)
        if member.rank == 0:
            first.copy_(pattern)
            last.copy_(pattern[-len(last) :])
            dist.send(tensor, group=member.group, group_dst=1)
            return 1, []
        dist.recv(tensor, group=member.group, group_src=0)
        arrived = torch.equal(first, pattern), torch.equal(last, pattern[-len(last) :])
        return 1, [] if all(arrived) else [f"the first and the last bytes are what was sent: {arrived}"]
