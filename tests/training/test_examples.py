"""The examples, started with torchrun."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

import phalanx
import phalanx.testing as pt
import programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# What all ranks of an example load, and what takes them seconds.
_LOADS = {
    "train_fsdp.py": ["torch.distributed.checkpoint", "torch.distributed.fsdp"],
    "train_tensor_parallel.py": ["torch.distributed.tensor.parallel"],
}


def _torchrun(name: str, ranks: int, *arguments: str) -> str:
    command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), str(EXAMPLES / name), *arguments]
    done = programs.run(command, Path.cwd(), os.environ | {"OMP_NUM_THREADS": "1"}, loads=_LOADS.get(name, ()))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("name", "ranks", "arguments", "last_line"),
    [
        ("train_ddp.py", 2, ["--steps", "300", "--no-table"], "All 2 ranks hold the same 67,331 weights, bit for bit."),
        ("train_fsdp.py", 2, [], "All ranks have read the checkpoint as they wrote it."),
        ("train_tensor_parallel.py", 4, [], None),
    ],
)
def test_example_learns(name: str, ranks: int, arguments: list[str], last_line: str | None) -> None:
    printed = _torchrun(name, ranks, *arguments)
    accuracies = [float(text) for text in re.findall(r"test accuracy +([0-9.]+)%", printed)]
    assert accuracies[-1] > 90
    assert last_line is None or printed.splitlines()[-1] == last_line


def test_actors_and_learners() -> None:
    first, *statistics = _torchrun("actors.py", 3, "--rounds", "60").splitlines()
    found = re.fullmatch(r"found arm 5 of 8; the last plays won (\d\.\d\d) on average", first)
    assert found, first
    assert float(found[1]) > 0.8
    # Rank 0 has one actor, which answers each policy with two messages.
    assert "  rank 0 among everybody: recv, 120 calls, 46080 bytes" in statistics


@pytest.mark.parametrize("seed", [None, 3])
def test_actors_and_learners_as_threads(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    actors = importlib.import_module("actors")

    def program(rank: int, world: pt.World) -> str:
        with phalanx.new_group(name="everybody") as everybody:
            return str(actors.run(everybody, rounds=40))

    told = pt.run(program, ranks=4, init=False, seed=seed)
    assert len(set(told)) == 1
    assert told[0].startswith("found arm 5 of 8; ")
