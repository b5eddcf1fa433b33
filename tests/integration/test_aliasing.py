"""Random programs whose tensors share memory, against an oracle that carries out the calls in order.

tests/soak/aliasing.py says how they are made. `make soak` runs thousands of others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Here, values

SOAK = Path(__file__).parents[1] / "soak"
sys.path.insert(0, str(SOAK))

import aliasing  # noqa: E402

import phalanx.testing  # noqa: E402


def _play(here: Here, seeds: list[int]) -> list[str]:
    here.init()
    return aliasing.play_all(seeds)


@pytest.mark.parametrize(("size", "seeds"), [(2, range(16)), (3, range(6))])
def test_tensors_that_share_memory(size: int, seeds: range, tmp_path: Path) -> None:
    wrong = [text for found in values(_play, size, tmp_path, list(seeds)) for text in found]
    assert not wrong, "\n".join(wrong)


def test_tensors_that_share_memory_on_ranks_that_are_threads() -> None:
    wrong = [text for found in phalanx.testing.run(lambda *_: aliasing.play_all(range(6)), 3) for text in found]
    assert not wrong, "\n".join(wrong)


def _sparse_behind(rank: int, world: phalanx.testing.World) -> list[float]:
    """An all_reduce of a sparse tensor reads its entries when it is made; one in flight writes them."""
    entries = torch.full((10,), rank + 1.0)
    work = dist.all_reduce(entries, async_op=True)
    total = torch.sparse_coo_tensor(torch.arange(10)[None], entries, (10,), check_invariants=False)
    dist.all_reduce(total)
    work.wait()
    found: list[float] = total.to_dense().unique().tolist()
    return found


def test_sparse_entries_that_a_call_in_flight_writes_where_ranks_are_threads() -> None:
    assert phalanx.testing.run(_sparse_behind, 2) == [[6.0]] * 2
