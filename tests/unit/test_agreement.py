"""Ranks that post their calls and never wait: all orders of their steps, and with faults that must be found.

`make sanitize` runs more orders, and real threads under the thread sanitizer.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FAULTS = {
    "weak_number": "nobody found the difference",
    "number_first": "a difference was found where there is none",
    "no_second_look": "a difference was found where there is none",
    "one_ring": "nobody found the difference",
    "claim_by_store": "two ranks reported",
    "publish_by_store": "two ranks reported",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("interleavings") / "interleavings"
    source = _ROOT / "tests/native/interleavings.cpp"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", f"-I{_ROOT / 'src/phalanx/_core'}"]
    subprocess.run([*command, str(source), "-o", str(built)], check=True)
    return built


def _run(program: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([program, "some", *arguments], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout


def test_no_order_of_steps_is_wrong(program: Path) -> None:
    code, told = _run(program)
    assert told.endswith("states of worlds of 2 and 3 ranks: nothing wrong\n")
    assert code == 0


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_fault_is_found_in_some_order_of_steps(program: Path, fault: str) -> None:
    code, told = _run(program, fault)
    assert _FAULTS[fault] in told.splitlines()[0]
    assert code == 1
