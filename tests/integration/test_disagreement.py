"""Ranks that disagree: every rank raises Mismatch with the same code, at once or at its next call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, World, place, run


def _calls(kind: str, odd: bool) -> None:
    """The call of one rank; `odd` is the rank that disagrees."""
    t = torch.ones(4)
    if kind == "OP":
        dist.barrier() if odd else dist.all_reduce(t)
    elif kind == "COUNT":
        dist.all_reduce(torch.ones(5 if odd else 4))
    elif kind == "DTYPE":
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32))
    elif kind == "REDUCE_OP":
        dist.all_reduce(t, op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
    elif kind == "ROOT":
        dist.reduce(torch.ones(2**20), 1 if odd else 0)
    elif kind == "SPLITS":
        # The block for the rank itself is as it should be; that one would be an InvalidCall.
        rows = ([2, 1, 3] if dist.get_rank() == 0 else [1, 3, 2]) if odd else [2, 2, 2]
        dist.all_to_all_single(torch.empty(6), torch.ones(6), None, rows)
    elif kind == "SHAPE":
        sizes = (1, 3) if odd else (2, 2)
        dist.all_reduce_coalesced([torch.ones(n) for n in sizes])


def _disagree(here: Here, kind: str, odd_rank: int, before: int) -> tuple[str, str]:
    here.init()
    for _ in range(before):
        dist.all_reduce(torch.ones(1))
    try:
        _calls(kind, here.rank == odd_rank)
        # A rank that waited for nobody learns of it here.
        dist.barrier()
    except dist.DistBackendError as error:
        first: Any = error
    else:
        return "nothing", ""
    with pytest.raises(type(first), match="the group is broken"):
        dist.barrier()
    dist.destroy_process_group()
    return first.code, str(first)


@pytest.mark.parametrize("kind", ["OP", "COUNT", "DTYPE", "REDUCE_OP", "ROOT", "SPLITS", "SHAPE"])
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_every_rank_is_told(kind: str, odd_rank: int, tmp_path: Path) -> None:
    ends = run(_disagree, 3, tmp_path, kind, odd_rank, 9)
    assert [(end.error, end.value and end.value[0]) for end in ends] == [(None, f"MISMATCH:{kind}")] * 3
    for rank, end in enumerate(ends):
        text = end.value[1]
        assert f"rank {rank}" in text.splitlines()[0]
        assert "seq 10" in text.splitlines()[0]
        assert f"  rank {odd_rank}: " in text
        assert "  Next: " in text
        assert text.endswith("; this group can't be used any more")


def _nobody_looks(here: Here) -> str:
    """Rank 0 broadcasts, rank 1 takes part, rank 2 gathers: none of them waits for one that disagrees with it."""
    here.init()
    calls = 0
    try:
        while calls < 20:
            if here.rank == 2 and calls == 3:
                dist.gather(torch.ones(1), dst=0)
            else:
                dist.broadcast(torch.ones(1), 0)
            calls += 1
    except dist.DistBackendError as error:
        return f"{error.code} {error.seq}"  # type: ignore[attr-defined]
    return "nothing"


def test_calls_that_nobody_compared_are_caught_up_with(tmp_path: Path) -> None:
    ends = run(_nobody_looks, 3, tmp_path)
    assert [end.value for end in ends] == ["MISMATCH:OP 4"] * 3


def _report(here: Here) -> None:
    here.init()
    dist.all_reduce(torch.ones(3, 2) if here.rank == 0 else torch.ones(4, dtype=torch.int32), op=dist.ReduceOp.MAX)


def test_the_report_in_full(tmp_path: Path) -> None:
    for rank, end in enumerate(run(_report, 2, tmp_path)):
        assert end.text.splitlines() == [
            f"[MISMATCH:DTYPE] all_reduce, seq 1, group 'default_pg', rank {rank}: ranks disagree about the dtype",
            "  the group has ranks 0, 1",
            "  rank 0: all_reduce(MAX, 6 elements of float32)  <-- float32",
            f"    at {place(_report, 'dist.all_reduce')}",
            "  rank 1: all_reduce(MAX, 4 elements of int32)  <-- int32",
            f"    at {place(_report, 'dist.all_reduce')}",
            "  no majority: any of these may be the one to mend",
            "  last completed call of all ranks: none",
            "  Next: give tensors of one dtype on all ranks, or look for a call that one of them left out; "
            "this group can't be used any more",
        ]


def _last_splits(here: Here, odd_rank: int, listed: bool) -> str:
    """all_to_all is the last call: only what it compares itself can tell a rank."""
    here.init()
    rows = [1] * here.size
    if here.rank == odd_rank:
        # One row more for the next rank, which expects one, and none for the one after.
        rows[(odd_rank + 1) % here.size], rows[(odd_rank + 2) % here.size] = 2, 0
    try:
        if listed:
            dist.all_to_all([torch.empty(1) for _ in rows], [torch.ones(num) for num in rows])
        else:
            dist.all_to_all_single(torch.empty(here.size), torch.ones(here.size), None, rows)
    except dist.DistBackendError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("odd_rank", [0, 3])
def test_splits_are_compared_by_every_rank(odd_rank: int, listed: bool, tmp_path: Path) -> None:
    ends = run(_last_splits, 4, tmp_path, odd_rank, listed)
    for end in ends:
        assert end.value.startswith("[MISMATCH:SPLITS] all_to_all, seq 1")
        assert f"rank {odd_rank} sends " in end.value


def _one_call(here: Here, kind: str, odd_rank: int, level: str) -> str:
    """One call, and no other that could tell of it."""
    os.environ["PHALANX_CHECK"] = level
    here.init()
    odd = here.rank == odd_rank
    count = 5 if odd else 4
    ones = torch.ones(count)
    try:
        if kind == "broadcast":
            dist.broadcast(ones, 0)
        elif kind == "reduce":
            dist.reduce(ones, 0)
        elif kind == "gather":
            dist.gather(ones, [torch.empty(count) for _ in range(here.size)] if here.rank == 0 else None, 0)
        elif kind == "scatter":
            dist.scatter(ones, [torch.ones(count) for _ in range(here.size)] if here.rank == 0 else None, 0)
        elif kind == "another op":
            dist.gather(torch.ones(4), dst=0) if odd else dist.broadcast(torch.ones(4), 0)
    except dist.DistBackendError as error:
        return str(error.code)  # type: ignore[attr-defined]
    return "nothing"


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter", "another op"])
@pytest.mark.parametrize("odd_rank", [1, 2])
def test_at_level_full_the_call_itself_tells_every_rank(kind: str, odd_rank: int, tmp_path: Path) -> None:
    code = "MISMATCH:OP" if kind == "another op" else "MISMATCH:COUNT"
    assert [end.value for end in run(_one_call, 3, tmp_path, kind, odd_rank, "full")] == [code] * 3


def _does_not_wait(here: Here) -> str:
    """Async calls wait for nobody at any level: rank 1 comes when rank 0 is through with its own."""
    os.environ["PHALANX_CHECK"] = "full"
    here.init()
    dist.barrier()
    if here.rank == 0:
        work = dist.broadcast(torch.ones(2), 0, async_op=True)
        assert work is not None
        work.wait()
        here.tell()
    else:
        here.hear()
        dist.broadcast(torch.ones(2), 0)
    dist.barrier()
    return "done"


def test_async_calls_do_not_wait_at_level_full(tmp_path: Path) -> None:
    world = World(_does_not_wait, 2, tmp_path)
    world.told(0)
    world.tell(1)
    assert [end.value for end in world.ends()] == ["done", "done"]
