"""One place says which versions of torch are supported, and one which version this is; the rest says the same."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import torch

import phalanx
from phalanx._autoload import TORCH_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from on_torch import NEWEST_TORCH  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
FIRST, END = TORCH_VERSIONS
LAST = (END[0], END[1] - 1)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _numbers(text: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", text)
    assert numbers
    return int(numbers[1]), int(numbers[2])


def test_metadata_requires_a_supported_torch() -> None:
    assert PROJECT["dependencies"] == [f"torch>={_text(FIRST)},<{_text(END)}"]


def test_readme_names_the_versions() -> None:
    assert f"torch {_text(FIRST)} to {_text(LAST)}" in README
    assert f"the test suite, on torch {_text(FIRST)}\n" in README
    assert f"the test suite on torch {_text(LAST)}," in README


def test_first_and_last_version_are_those_that_are_tested() -> None:
    pin = re.search(r"(?m)^torch==(.*)$", (ROOT / "constraints.txt").read_text())
    assert pin
    assert _numbers(pin[1]) == FIRST
    assert _numbers(NEWEST_TORCH) == LAST
    assert f"on torch {NEWEST_TORCH} " in (ROOT / "Makefile").read_text()
    assert FIRST <= _numbers(torch.__version__) < END


def test_every_requirement_has_a_pin() -> None:
    """tools/on_torch.py installs the pins."""

    def names(file: str) -> set[str]:
        lines = (ROOT / file).read_text().splitlines()
        return {re.split("[=>]", line)[0].replace("_", "-") for line in lines if not line.startswith("#")}

    assert names("requirements-dev.txt") == names("constraints.txt")


def test_versions_of_python() -> None:
    bounds = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"])
    assert bounds
    minors = range(int(bounds[1]), int(bounds[2]))
    prefix = "Programming Language :: Python :: 3."
    assert [text for text in PROJECT["classifiers"] if text.startswith(prefix)] == [f"{prefix}{n}" for n in minors]
    assert f"Python 3.{minors[0]} to 3.{minors[-1]}" in README
    assert sys.version_info.minor in minors


def test_metadata_has_the_version_of_the_package() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert importlib.metadata.version(PROJECT["name"]) == phalanx.__version__


def test_newest_entry_of_the_changelog_is_this_version() -> None:
    newest = re.search(r"(?m)^## (\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text())
    assert newest, "`make changelog VERSION=…` makes the first entry"
    assert newest[1] == phalanx.__version__


def test_links_of_the_changelog_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "CHANGELOG.md").read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
