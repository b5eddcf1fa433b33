"""Every example in the docs is run, and prints what the docs say.

A block of Python that starts with `# name.py` is a program; a console block that follows shows a command that runs it,
behind `$ `, and what it prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import programs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Programs that a reader's shell would start: one of each tool. A whole stack is seen in `late.py`.
_FRESH = {"late.py", "test_sum.py"}
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _examples() -> list[tuple[str, dict[str, str], list[str], str]]:
    """(id, programs of the page so far, command, output)"""
    found = []
    for page in PAGES:
        programs: dict[str, str] = {}
        for language, text in _BLOCK.findall(page.read_text()):
            if language == "python":
                name = re.match(r"# (\w+\.py)", text)
                assert name, f"a block in {page.name} has no name, so no test runs it"
                programs[name[1]] = text
                continue
            command, _, output = text.removeprefix("$ ").partition("\n")
            if command.startswith("make "):
                continue
            found.append((f"{page.name}: {command}", dict(programs), command.split(), output))
    return found


EXAMPLES = _examples()


def test_every_program_is_run() -> None:
    shown = {word for _, _, command, _ in EXAMPLES for word in command if word.endswith(".py")}
    written = {name for _, programs, _, _ in EXAMPLES for name in programs}
    assert written == shown


@pytest.mark.parametrize(("texts", "command", "output"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES])
def test_example(texts: dict[str, str], command: list[str], output: str, tmp_path: Path) -> None:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tool, *arguments = command
    if tool == "torchrun":
        arguments.insert(0, "--standalone")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PHALANX_FOLDER": os.fspath(tmp_path / "jobs")}
    if _FRESH.intersection(arguments):
        words = [os.fspath(Path(sys.executable).parent / tool), *arguments]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False, env=env)
    else:
        done = programs.run([tool, *arguments], tmp_path, env)
    assert done.returncode == 0, done.stderr
    # An ellipsis stands for what is another each time, or on another machine.
    if "…" not in output:
        assert done.stdout == output, done.stderr
    assert re.fullmatch(re.escape(output).replace("…", "[^\n]+"), done.stdout), done.stdout


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
