"""Tensors of the same number of elements in different shapes: a warning, once a group, and an error where all is
compared (wrong_models.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.testing as pt

_WARNING = (
    "all_reduce, seq 1, group {group!r}: ranks pass tensors of the same number of elements in different shapes: "
    "rank 0 has shape (2, 3), at {place}; rank 1 has shape (6,), at {place}. The elements are taken in order; "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL makes this an error. Said once a group."
)


def _reduce(rank: int, world: pt.World) -> list[float]:
    others = dist.new_group(group_desc="others")
    tensor = torch.ones(6) if rank else torch.ones(2, 3)
    for _ in range(2):
        for group in (dist.group.WORLD, others):
            dist.all_reduce(tensor, group=group)
    return tensor.view(-1).tolist()


def _warnings() -> list[str]:
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "all_reduce(tensor" in line)
    place = f"{Path(__file__).name}:{number}, in _reduce"
    return [_WARNING.format(group=group, place=place) for group in ("default_pg", "others")]


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_one_warning_a_group(seed: int | None, caplog: pytest.LogCaptureFixture) -> None:
    assert pt.run(_reduce, ranks=2, seed=seed) == [[16.0] * 6] * 2
    assert [record.getMessage() for record in caplog.records if record.name == "phalanx"] == _warnings()


def test_one_warning_a_group_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert pt.run(_reduce, ranks=2, processes=True) == [[16.0] * 6] * 2
    # Nobody has set up logging in the ranks: warnings are printed.
    assert sorted(capsys.readouterr().err.splitlines()) == _warnings()
