"""Ranks that disagree: every rank raises Mismatch with the same code, at once or at its next call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Here, place, run


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
        return f"{error.code} {error.seq}"
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
