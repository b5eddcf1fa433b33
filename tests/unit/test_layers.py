"""Imports go downwards only, and torch's private names stay in one place."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent

# From the bottom up: a module may import from its own layer and from those before it.
LAYERS = [
    {"_core_ext", "_native"},
    {"children", "durations", "errors", "log", "memory", "phrases", "printable", "statistics", "types"},
    {"transports"},
    {"collectives"},
    {"group"},
    {"functional"},
    {"debug"},
    {"testing"},
    {"pytest_plugin"},
    {"reporters"},
    {"commands", "__main__"},
    {"_autoload", "__init__"},
]
# What a layer may not import although it lies below: transports and collectives do not know each other.
STRANGERS = {("collectives", "transports")}


def _layer(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if module in names)


def _is_private(part: str) -> bool:
    return part.startswith("_") or part == "distributed_c10d"


def _imports(path: Path) -> list[tuple[str, ...]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(*node.module.split("."), alias.name) for alias in node.names]
    return found


def test_every_module_has_a_layer() -> None:
    modules = {
        path.stem if path.is_file() else path.name for path in ROOT.iterdir() if not path.name.startswith("__py")
    }
    assert modules - {"_core", "py"} <= set().union(*LAYERS), "say in LAYERS where the new module belongs"


def test_imports_go_downwards() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in _imports(path):
            if name[0] != "phalanx" or len(name) < 2 or own == "__init__":
                continue
            lazy = own == "_autoload"
            if not lazy and (_layer(name[1]) > _layer(own) or (own, name[1]) in STRANGERS):
                wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(name)}")
    assert not wrong


def test_private_names_of_torch_stay_in_torch_compat() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        if path.name == "torch_compat.py":
            continue
        private = [name for name in _imports(path) if name[0] == "torch" and any(map(_is_private, name))]
        wrong += [f"{path.relative_to(ROOT)} imports {'.'.join(name)}" for name in private]
    assert not wrong


def test_the_core_knows_nothing_of_torch() -> None:
    for path in (ROOT / "_core").iterdir():
        assert "torch/" not in path.read_text(), f"{path.name} includes a torch header"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Rank processes import them by their name alone."""
    tests = Path(__file__).resolve().parents[1]
    names = [path.stem for path in tests.rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(set(names)) == sorted(names)


def _core_includes() -> dict[str, set[str]]:
    """Of each file of the core, header and source together, the others that it includes."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "_core").glob("*.?pp"):
        included = re.findall(r'^#include "(\w+)\.hpp"', path.read_text(), re.MULTILINE)
        found.setdefault(path.stem, set()).update(set(included) - {path.stem})
    return found


def test_files_of_the_core_include_each_other_in_no_circle() -> None:
    # Raises CycleError, which names the circle.
    assert len(list(graphlib.TopologicalSorter(_core_includes()).static_order())) > 50


def test_files_that_know_python_are_the_top_of_the_core() -> None:
    """So that C++ tests can have all the others without an interpreter."""
    texts = {path.stem: "" for path in (ROOT / "_core").glob("*.?pp")}
    for path in (ROOT / "_core").glob("*.?pp"):
        texts[path.stem] += path.read_text()
    python = {stem for stem, text in texts.items() if re.search(r"#include <(nanobind/|Python\.h)", text)}
    wrong = {
        f"{stem} includes {name}"
        for stem, names in _core_includes().items()
        if stem not in python
        for name in names & python
    }
    assert python
    assert not wrong
