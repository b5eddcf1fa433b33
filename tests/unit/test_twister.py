"""Python's generator, read and written in its memory. Runs on every CPython that the metadata claims."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.testing import twister
from phalanx.testing.twister import PythonState


@pytest.fixture
def state() -> Iterator[PythonState]:
    before = random.getstate()
    yield PythonState()
    random.setstate(before)


def test_the_memory_looks_as_expected(state: PythonState) -> None:
    """Otherwise every run of threads takes the slow way: a new Python may need another look at the layout."""
    assert state.is_quick


@pytest.mark.parametrize("num_drawn", [0, 1, 623, 624, 625, 2000])
def test_a_state_comes_back(state: PythonState, num_drawn: int) -> None:
    random.seed(num_drawn)
    for _ in range(num_drawn):
        random.getrandbits(32)
    random.gauss(0, 1)
    kept, public = state.read(), random.getstate()
    drawn = [random.random(), random.gauss(0, 1), random.getrandbits(100)]
    assert state.read() != kept
    state.write(kept)
    assert state.read() == kept
    assert random.getstate() == public
    assert [random.random(), random.gauss(0, 1), random.getrandbits(100)] == drawn


def test_the_public_way_gives_the_same(state: PythonState) -> None:
    state._memory = None
    kept = state.read()
    drawn = random.random()
    assert state.read() != kept
    state.write(kept)
    assert random.random() == drawn


def _claimed_versions() -> list[str]:
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    return re.findall(r"Python :: (3\.\d+)", project.read_text())


_CHECK = """
import random, sys
sys.path.insert(0, sys.argv[1])
import twister
state = twister.PythonState()
kept, public = state.read(), random.getstate()
random.random(), random.gauss(0, 1)
changed = state.read() != kept
state.write(kept)
print("%d.%d" % sys.version_info[:2], state.is_quick, changed, random.getstate() == public)
"""


def _found() -> list[str]:
    """The interpreters of claimed versions that this machine has; this one always."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    roots = [path / "bin" for path in Path.home().glob(".pyenv/versions/*")] + [
        Path("/usr/bin"),
        Path("/usr/local/bin"),
    ]
    others = {
        version: str(root / f"python{version}")
        for version in _claimed_versions()
        for root in roots
        if version != own and (root / f"python{version}").exists()
    }
    return [sys.executable, *others.values()]


@pytest.mark.parametrize("python", _found(), ids=lambda path: Path(path).name)
def test_other_interpreters_on_this_machine(python: str) -> None:
    """The module needs no torch, so that it can be tried where the package is not installed."""
    done = subprocess.run(
        [python, "-I", "-c", _CHECK, str(Path(twister.__file__).parent)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[1:] == ["True", "True", "True"], done.stdout
