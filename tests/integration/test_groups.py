"""Groups as torch.distributed makes and ends them, and what they take in."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Here, values

import phalanx


def _recreate(here: Here) -> list[float]:
    """The same store, hence the same keys, for one world after another."""
    store = here.store()
    sums = []
    for round_number in range(5):
        dist.init_process_group("phalanx", store=store, rank=here.rank, world_size=here.size)
        tensor = torch.ones(3) * round_number
        dist.all_reduce(tensor)
        sums.append(tensor.sum().item())
        dist.destroy_process_group()
    return sums


def test_destroy_and_recreate_on_one_store(tmp_path: Path) -> None:
    assert values(_recreate, 2, tmp_path) == [[0.0, 6.0, 12.0, 18.0, 24.0]] * 2


def _many(here: Here) -> list[int]:
    here.init()
    groups = [dist.new_group([0, 1, 2] if i % 2 else [2, 0]) for i in range(40)]
    total = []
    for i, group in enumerate(groups):
        if here.rank == 1 and i % 2 == 0:
            continue
        tensor = torch.tensor([i])
        dist.all_reduce(tensor, group=group)
        total.append(int(tensor.item()))
    dist.destroy_process_group()
    return total


def test_many_groups_at_once(tmp_path: Path) -> None:
    all_groups = [i * (3 if i % 2 else 2) for i in range(40)]
    assert values(_many, 3, tmp_path) == [all_groups, all_groups[1::2], all_groups]


def _identity(here: Here) -> dict[str, object]:
    here.init()
    pair = dist.new_group([1, 0], group_desc="pair", timeout=timedelta(seconds=7))
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=pair)
    facts = {
        "backend": dist.get_backend(pair),
        "class": type(pair),
        "seq": pair._get_sequence_number_for_group(),
        "world seq": dist.group.WORLD._get_sequence_number_for_group(),
        "name": pair.group_name == dist.distributed_c10d._get_process_group_name(pair),
        "desc": pair.group_desc,
        "ranks": dist.get_process_group_ranks(pair),
        "found": dist.distributed_c10d._resolve_process_group(pair.group_name) is pair,
    }
    dist.destroy_process_group()
    return facts


def test_what_a_group_says_of_itself(tmp_path: Path) -> None:
    assert values(_identity, 2, tmp_path)[0] == {
        "backend": "phalanx",
        "class": phalanx.ProcessGroup,
        "seq": 3,
        "world seq": 0,
        "name": True,
        "desc": "pair",
        "ranks": [0, 1],
        "found": True,
    }


def _set_timeout(here: Here) -> str:
    here.init(timeout=1000)
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=0.2))
    if here.rank == 1:
        return ""
    with pytest.raises(phalanx.CallTimeout) as caught:
        dist.barrier()
    return str(caught.value)


def test_a_timeout_set_later_counts(tmp_path: Path) -> None:
    assert "timeout of 0.2 s: rank 1 did not come" in values(_set_timeout, 2, tmp_path)[0]


def _threads(here: Here) -> list[float]:
    """Two threads use a group each, and both use a third: calls of one group are carried out one after another."""
    here.init()
    own = [dist.new_group([0, 1]) for _ in range(2)]
    sums = [0.0, 0.0]

    def work(index: int) -> None:
        for _ in range(200):
            tensor = torch.ones(100)
            dist.all_reduce(tensor, group=own[index])
            dist.all_reduce(tensor)
            sums[index] += tensor.sum().item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_calls_from_several_threads_of_a_rank(tmp_path: Path) -> None:
    assert values(_threads, 2, tmp_path) == [[200 * 400.0] * 2] * 2


def _large(here: Here) -> list[bool]:
    """A little more than 2 GiB and than 2**31 elements of one byte."""
    here.init(timeout=100)
    count = 2**31 + 1000
    tensor = torch.zeros(count, dtype=torch.uint8)
    tensor[-1] = here.rank + 1
    tensor[0] = 7
    dist.all_reduce(tensor)
    reduced = tensor[0].item() == 14 and tensor[-1].item() == 3 and tensor[1:-1].count_nonzero().item() == 0
    tensor[-5] = here.rank
    dist.broadcast(tensor, 1)
    return [reduced, tensor[-5].item() == 1]


@pytest.mark.slow
def test_above_two_gibibytes(tmp_path: Path) -> None:
    assert values(_large, 2, tmp_path, timeout=110) == [[True, True]] * 2
