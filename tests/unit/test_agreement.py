"""Ranks that post their calls and never wait: all orders of their steps, and with faults that must be found.

`make sanitize` runs more orders, and real threads under the thread sanitizer.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FAULTS = {
    "weak_number": "nobody found the difference",
    "number_first": "a difference was found where there is none",
    "no_second_look": "a difference was found where there is none",
    "one_ring": "nobody found the difference",
    "claim_by_store": "two ranks reported",
    "publish_by_store": "two ranks reported",
    "no_rest": "nobody found the difference at rest",
    "one_rest": "nobody found the difference at rest",
    "short_memory": "nobody found the difference at rest",
    "no_own_look": "a difference was found where there is none",
}


def _build(folder: Path) -> Path:
    built = folder / "interleavings"
    source = _ROOT / "tests/native/interleavings.cpp"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", f"-I{_ROOT / 'src/phalanx/_core'}"]
    subprocess.run([*command, str(source), "-o", str(built)], check=True)
    return built


def _run(program: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([program, "some", *arguments], capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout


def test_no_order_of_steps_is_wrong_and_faults_are_found_in_some_order(tmp_path: Path) -> None:
    # In one test: it is built once.
    program = _build(tmp_path)
    code, told = _run(program)
    assert told.endswith("states of worlds of 2 and 3 ranks: nothing wrong\n")
    assert code == 0
    for fault, expected in _FAULTS.items():
        code, told = _run(program, fault)
        assert expected in told.splitlines()[0], fault
        assert code == 1, fault
