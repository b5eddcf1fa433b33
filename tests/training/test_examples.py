"""The examples, started with torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _torchrun(name: str, ranks: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    running = subprocess.Popen(
        [*command, str(EXAMPLES / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        printed, complaints = running.communicate(timeout=100)
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        raise
    assert running.returncode == 0, complaints
    assert complaints == ""
    return printed


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
