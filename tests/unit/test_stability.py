"""docs/stability.md lists what is public: its lists are those of the package."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx
import phalanx.commands
import phalanx.errors
from phalanx._autoload import TORCH_VERSIONS
from phalanx.debug.box_layout import FORMATS
from phalanx.testing.graph import _HINTS as DEADLOCKS
from phalanx.transports.signatures import FIELDS

ROOT = Path(phalanx.__file__).parent
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "stability.md").read_text()
MODULES = ["phalanx", "phalanx.functional", "phalanx.testing"]
# The code of an error, or what follows the colon.
_CODE = re.compile(r"(INVALID|MISMATCH|DEADLOCK|GROUP|MISSING|PEER_LOST|ABORTED)(:[A-Z_0-9]+)?")


def _section(title: str) -> str:
    return re.split(r"(?m)^## ", PAGE.partition(f"\n## {title}\n")[2])[0]


def _rows(title: str) -> dict[str, list[list[str]]]:
    """The tables of a section: the first cell, and the names in each of the others."""
    lines = [line for line in _section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): [re.findall(r"`([^`]+)`", cell) for cell in others] for first, *others in cells}


def _sources() -> Iterator[tuple[Path, ast.AST]]:
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


@pytest.mark.parametrize("module", MODULES)
def test_names(module: str) -> None:
    assert _rows("Names")[module] == [sorted(importlib.import_module(module).__all__)]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = _rows("Names")["command"]
    verbs = {name.split()[1] for name in listed if name.startswith("phalanx ")}
    assert verbs == set(phalanx.commands._VERBS)
    options: set[str] = set()
    for verb in verbs:
        with pytest.raises(SystemExit):
            phalanx.commands.main([verb, "--help"])
        options |= set(re.findall(r"(?<!\w)--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert {name for name in listed if name.startswith("--")} == options


def test_pytest_plugin(request: pytest.FixtureRequest) -> None:
    (listed,) = _rows("Names")["pytest"]
    own = "phalanx.pytest_plugin"
    marks = {line.partition("(")[0] for line in request.config.getini("markers")}
    plugin = importlib.import_module(own)
    names = {name for name in listed if not name.startswith("--")}
    fixtures = {name for name in names if hasattr(plugin, name)}
    assert fixtures == set(plugin._OWN)
    assert names - fixtures == marks & {"ranks", "requires"}
    source = Path(str(plugin.__file__)).read_text()
    assert {name for name in listed if name.startswith("--")} == set(re.findall(r'"(--[a-z-]+)",\n', source))


def _codes() -> set[str]:
    """Codes that the sources write out, and those that they put together."""
    found = {f"MISMATCH:{code}" for code, _, _ in FIELDS} | {f"DEADLOCK:{kind}" for kind in DEADLOCKS}
    for path, node in _sources():
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CODE.fullmatch(node.value):
            found.add(node.value)
        elif isinstance(node, ast.Assign) and "field" in {getattr(one, "id", "") for one in ast.walk(node.targets[0])}:
            found |= {f"MISMATCH:{text}" for text in _capitals(node.value)}
        elif isinstance(node, ast.Call):
            found |= set(_codes_of_call(path.relative_to(ROOT), node))
    return found


def _codes_of_call(path: Path, call: ast.Call) -> Iterator[str]:
    function = getattr(call.func, "id", "")
    if function == "Report":
        yield from (f"MISMATCH:{text}" for text in _capitals(call.args[0]))
    elif path.parts[0] in ("collectives", "group") and "torch_compat" not in path.parts and len(call.args) > 2:
        # fail(info, op, "ROOT", …) and its like; Refusal("ROOT", …) of a problem, and its like.
        place = 0 if path.stem in ("problems", "checks") and function in ("Refusal", "_Unfit") else 2
        yield from (f"INVALID:{text}" for text in _capitals(call.args[place]))


def test_codes_are_put_together_where_this_test_looks_for_them() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path, node in _sources()
        if isinstance(node, ast.JoinedStr)
        and isinstance(node.values[0], ast.Constant)
        and _CODE.fullmatch(str(node.values[0].value).removesuffix(":"))
    }
    assert found == {
        "collectives/checks.py",
        "collectives/numbers.py",
        "group/merging.py",
        "testing/graph.py",
        "transports/failures.py",
    }


def _capitals(node: ast.AST) -> list[str]:
    texts = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return [text for text in texts if re.fullmatch("[A-Z][A-Z_0-9]+", text)]


def test_error_codes() -> None:
    listed = {name: codes for name, (codes,) in _rows("Errors").items() if codes}
    classes = {name: getattr(phalanx, name) for name in listed}
    assert set(classes.values()) == {*phalanx.PhalanxError.__subclasses__(), phalanx.Deadlock}
    for name, codes in listed.items():
        assert codes == sorted(codes)
        assert all(code.split(":")[0] == classes[name].code for code in codes)
    assert {code for codes in listed.values() for code in codes} == _codes()


def test_error_codes_are_in_the_page_about_errors() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "errors.md").read_text()
    missing = [code for code in _codes() if not re.search(rf"`:?(\w+:)?{code.split(':')[-1]}[`:]", page)]
    assert missing == []


def test_environment_variables() -> None:
    text = _section("Environment variables")
    used = {
        node.value
        for _, node in _sources()
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch("PHALANX_[A-Z_]+", node.value)
    }
    for path in (ROOT / "_core").glob("*.cpp"):
        used |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text()))
    public = {name for name in _rows("Environment variables") if name.startswith("PHALANX_")}
    private = set(re.findall(r"(?m)^`(PHALANX_\w+)`", text))
    assert public | private == used
    assert not public & private


def test_keys_of_traces(tmp_path: Path) -> None:
    group = phalanx.ProcessGroup(dist.HashStore(), 0, 1, name="stability")
    group.allreduce(torch.ones(2)).wait()
    group.send([torch.ones(2)], 0, 1).wait()
    traces = [
        json.loads(phalanx.dump(tmp_path / name, format="json", short=name == "short").read_text())
        for name in ("short", "long")
    ]
    group.shutdown()
    rows = _rows("Formats")
    for name, (plain, full) in ("trace", traces), ("entries[]", [trace["entries"][-1] for trace in traces]):
        always, more = rows[name]
        assert list(plain) == always
        assert sorted(full) == sorted(always + more)
    assert list(traces[1]["phalanx"]) == rows["phalanx"][1]


def test_versions() -> None:
    (first, end), text = TORCH_VERSIONS, _section("Versions of torch and Python")
    assert f"torch {first[0]}.{first[1]} to {end[0]}.{end[1] - 1} " in text
    *others, newest = FORMATS
    assert f"boxes of version {', '.join(map(str, others))} and {newest}." in PAGE
