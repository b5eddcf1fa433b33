"""Imports go downwards only, and torch's private names stay in one place."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent

# From the bottom up: a module may import from its own layer and from those before it.
LAYERS = [
    {"_core_ext", "_native"},
    {"children", "durations", "errors", "log", "memory", "phrases", "printable", "statistics", "types"},
    {"transports"},
    {"collectives"},
    {"group"},
    {"functional", "guards"},
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
    return _imports_of(ast.parse(path.read_text()))


def _imports_of(tree: ast.Module) -> list[tuple[str, ...]]:
    found = []
    for node in ast.walk(tree):
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


PACKAGES = ["collectives", "debug", "group", "guards", "reporters", "testing", "transports", "transports/threads"]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_each_of_its_files_does(package: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()), clean=False) or ""
    lines = re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)
    named = {name for line in lines for name in re.findall(r"\w+", line)}
    listed = {name for line in lines for name in re.findall(r"^(\w+)(?:\.py|/)", line)}
    modules = {path.stem for path in (ROOT / package).iterdir() if not path.name.startswith("__")}
    assert not modules - named, "say in __init__.py what the new module does"
    assert not listed - modules, "remove the module that is gone from the list in __init__.py"


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


def test_groups_know_no_kind_of_transport_between_processes() -> None:
    """The factory does: another kind joins there."""
    kinds = {"shm", "rendezvous", "segments", "splitting"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(name)}"
        for path in [*(ROOT / "group").rglob("*.py"), ROOT / "transports" / "base.py"]
        for name in _imports(path)
        if name[:2] == ("phalanx", "transports") and kinds & set(name[2:])
    ]
    assert not wrong


# Where torch's private names are, and nowhere else.
COMPAT = ROOT / "group" / "torch_compat"
# Calls whose argument names an attribute or a module.
_BY_NAME = {"getattr", "hasattr", "setattr", "import_module", "find_spec", "__import__"}


def _is_private_name(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*", text)) and any(
        _is_private(part) and not part.startswith("__") for part in text.split(".")
    )


def _names_of_torch(tree: ast.Module) -> set[str]:
    """What a module calls things that come from torch."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or "torch") for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _root_of(node: ast.AST) -> str:
    """The name at the beginning of a chain of attributes, calls and subscripts."""
    while isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _parameters_of_torch(tree: ast.Module, names: set[str]) -> set[str]:
    """Variables and parameters that are annotated with something of torch's."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and _root_of(node.annotation) in names:
            found.add(node.arg)
        elif (
            isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _root_of(node.annotation) in names
        ):
            found.add(node.target.id)
    return found


# Private attributes that only torch's objects have, on whatever they are looked for.
_ON_OBJECTS = re.compile(
    r"_(get_backend|plugins|nnz|indices|values|schema|get_dispatch_mode|is_profiler_enabled|current_graph_task_id|"
    r"register_process_group|unregister_process_group|execution_engine|torchdynamo\w*|c10d_logger|world)"
)


def _private_names(path: Path, text: str) -> list[str]:
    """Uses of torch's private names: imports, attributes, and names in strings."""
    tree = ast.parse(text)
    names = _names_of_torch(tree)
    names |= _parameters_of_torch(tree, names)
    found = [".".join(name) for name in _imports_of(tree) if name[0] == "torch" and any(map(_is_private, name))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not node.attr.startswith("__"):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if _root_of(node) in names or (_ON_OBJECTS.fullmatch(node.attr) and not own):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("torch.") and _is_private_name(node.value):
                found.append(repr(node.value))
        elif isinstance(node, ast.Call) and _name_of_function(node) in _BY_NAME:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if any(map(_is_private_name, texts)) and _root_of(node.args[0]) in names:
                found.append(ast.unparse(node))
    return found


def _name_of_function(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_private_names_of_torch_stay_in_torch_compat() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        if COMPAT not in path.parents
        for name in _private_names(path, path.read_text())
    ]
    assert not wrong


@pytest.mark.parametrize(
    "code",
    [
        "from torch._C import DispatchKey",
        "from torch.distributed import distributed_c10d",
        "import torch\ntorch._C._get_dispatch_mode()",
        "import torch.distributed as dist\ndist.distributed_c10d.GroupMember",
        "import torch.distributed as dist\ndist.Backend._plugins",
        "from torch.autograd import profiler as p\np._is_profiler_enabled",
        "from torch import Tensor\ndef f(tensor: Tensor): return tensor.detach()._nnz()",
        "def f(group): return group._get_backend(None)",
        "import importlib\nimportlib.import_module('torch.distributed._dist2')",
        "import torch\ngetattr(torch, '_C')",
        "import torch\nhasattr(torch.distributed, 'distributed_c10d')",
    ],
)
def test_a_private_name_of_torch_is_found(code: str) -> None:
    assert _private_names(ROOT / "x.py", code)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.distributed.all_reduce(t)",
        "class Group:\n    def _get_backend(self): return self._get_backend",
        "import torch\ntorch.Tensor.__torch_dispatch__",
        "'see torch._C for more'",
    ],
)
def test_public_names_are_not_taken_for_private_ones(code: str) -> None:
    assert not _private_names(ROOT / "x.py", code)


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
