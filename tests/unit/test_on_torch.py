"""tools/on_torch.py: what it makes of a package index's answers, and the environments that it makes."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from on_torch import Index, ask_index  # noqa: E402

# Environments are made with pip.
pytestmark = pytest.mark.slow

PIP = [sys.executable, "-m", "pip"]


@contextmanager
def _index(status: int, page: str = "") -> Iterator[str]:
    """A package index that answers every request in one way."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def own_pip(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A pip that knows of no index but that of the test."""
    for name in os.environ:
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "*")
    return monkeypatch


WHEEL = '<a href="torch-2.15.0-py3-none-any.whl">torch-2.15.0-py3-none-any.whl</a>'


@pytest.mark.parametrize(
    ("status", "page", "verdict"),
    [
        (200, WHEEL, Index.HAS_IT),
        (200, WHEEL.replace("2.15.0", "2.13.0"), Index.REFUSES),
        (200, "", Index.REFUSES),
        (403, "", Index.REFUSES),
        (404, "", Index.REFUSES),
        (500, "", Index.REFUSES),
        (503, "", Index.REFUSES),
    ],
)
def test_index_that_answers(status: int, page: str, verdict: Index, own_pip: pytest.MonkeyPatch) -> None:
    with _index(status, page) as address:
        own_pip.setenv("PIP_INDEX_URL", address)
        found, output = ask_index(PIP, "torch", "2.15.0")
    assert found is verdict, output


def test_index_on_a_port_where_nobody_listens(own_pip: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        own_pip.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{taken.getsockname()[1]}/simple")
        assert ask_index(PIP, "torch", "2.15.0")[0] is Index.UNREACHABLE


def test_unreachable_index_beside_a_folder_that_has_the_version(tmp_path: Path, own_pip: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch-2.15.0-py3-none-any.whl").touch()
    own_pip.setenv("PIP_FIND_LINKS", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        own_pip.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{taken.getsockname()[1]}/simple")
        assert ask_index(PIP, "torch", "2.15.0")[0] is Index.HAS_IT
        assert ask_index(PIP, "torch", "2.14.1")[0] is Index.UNREACHABLE


# What pip prints in cases that would need a resolver, a proxy, a certificate or much time.
SAYINGS = {
    "broken by 'NewConnectionError('[Errno -3] Temporary failure in name resolution')'": Index.UNREACHABLE,
    "broken by 'NameResolutionError(\"Failed to resolve 'index.example'\")'": Index.UNREACHABLE,
    "broken by 'ReadTimeoutError(\"Read timed out. (read timeout=20)\")'": Index.UNREACHABLE,
    "broken by 'ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 403'))'": Index.UNREACHABLE,
    "There was a problem confirming the ssl certificate: certificate verify failed": Index.REFUSES,
}


@pytest.mark.parametrize("saying", SAYINGS)
def test_sayings_of_pip(saying: str, tmp_path: Path) -> None:
    pip = _executable(tmp_path / "pip", f"print({saying!r})\nprint('ERROR: No matching distribution found')\nexit(1)\n")
    assert ask_index([str(pip)], "torch", "2.15.0")[0] is SAYINGS[saying]


def _executable(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable} -IS\n{code}")
    path.chmod(0o755)
    return path


# Stands for Python, venv and pip, and notes what pip installs. Its installs wait while there is a file `wait`.
PYTHON = """
import os, pathlib, shutil, sys
fake, arguments = pathlib.Path(os.environ["FAKE"]), sys.argv[1:]
if arguments[0] == "-c":
    print("3.11")
elif arguments[:2] == ["-m", "venv"]:
    folder = pathlib.Path(arguments[-1])
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.argv[0]))
    (folder / "bin" / "torchrun").write_text(f"#!{folder}/bin/python\\nrun()\\n")
elif arguments[:4] == ["-m", "pip", "index", "versions"]:
    print((fake / "answer").read_text().replace("PACKAGE", arguments[4]))
elif arguments[:3] == ["-m", "pip", "install"]:
    with (fake / "installs").open("a") as file:
        print(*(word for word in arguments[3:] if word[0] != "-"), file=file)
    if (fake / "wait").exists():
        (fake / "wait").read_text()  # a pipe: until the test opens it
    sys.exit(int((fake / "code").read_text()))
elif arguments[:2] != ["-m", "pip"]:
    print("command:", sys.argv[0], *arguments)
"""
HAS_IT = "Available versions: 2.15.0, 2.14.1, 2.0, 1.0\n"
UNREACHABLE = "WARNING: connection broken by 'NewConnectionError()'\nERROR: No matching distribution found\n"
REFUSES = "ERROR: HTTP error 403 while getting PACKAGE\n"


class _Clone:
    """A clone of the project, with Python, pip and the user's cache replaced."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.python = _executable(folder.parent / "python", PYTHON)
        self.answer(HAS_IT)
        self.installs_end_with(0)
        (folder / "tools").mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "on_torch.py", folder / "tools")
        (folder / "constraints.txt").write_text("# Pins.\ntorch==2.13.0\npytest==1.0\ncmake==1.0\n")

    def answer(self, text: str) -> None:
        (self.folder.parent / "answer").write_text(text)

    def installs_end_with(self, code: int) -> None:
        (self.folder.parent / "code").write_text(str(code))

    def installs(self) -> list[str]:
        noted = self.folder.parent / "installs"
        return noted.read_text().splitlines() if noted.exists() else []

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, self.folder / "tools" / "on_torch.py", "--python", self.python, *options, "--", "x.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "FAKE": str(self.folder.parent), "XDG_CACHE_HOME": str(self.cache)},
        )

    def run(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture
def clone(tmp_path: Path) -> _Clone:
    return _Clone(tmp_path / "clone", tmp_path / "cache")


def test_environments_are_made_once_and_the_project_is_built_for_every_command(clone: _Clone) -> None:
    own = clone.folder / "build" / "on-torch" / "torch-2.15.0-py3.11"
    shared = ["torch==2.15.0", "cmake==1.0 pytest==1.0"]
    for count in (1, 2):
        code, out, err = clone.run()
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == f"command: {own}/bin/python x.py"
        assert clone.installs() == shared + [str(clone.folder)] * count
    assert (own / "bin" / "torchrun").read_text() == f"#!{own}/bin/python\nrun()\n"
    (link,) = own.glob("lib/*/site-packages/shared.pth")
    assert f"{clone.cache}/phalanx/torch-2.15.0-py3.11/lib/python3.11/site-packages" in link.read_text()


def test_clones_share_torch_but_not_the_project_nor_tools_with_other_pins(clone: _Clone, tmp_path: Path) -> None:
    clone.run()
    other = _Clone(tmp_path / "other", clone.cache)
    (other.folder / "constraints.txt").write_text("torch==2.13.0\npytest==2.0\n")
    other.run()
    assert clone.installs()[3:] == ["pytest==2.0", str(other.folder)]
    assert len(list((clone.cache / "phalanx").glob("tools-*-py3.11"))) == 2


def test_index_that_cannot_be_reached_is_one_line(clone: _Clone) -> None:
    clone.answer(UNREACHABLE)
    code, out, err = clone.run("--skip-unreachable")
    reason = "the package index, which has torch==2.15.0, can't be reached"
    assert (code, out, err) == (0, f"Skipped what needs torch 2.15.0: {reason}\n", "")
    assert clone.run() == (1, "", f"{reason}\n")
    assert clone.installs() == []


def test_environment_that_is_complete_needs_no_index(clone: _Clone) -> None:
    clone.run()
    clone.answer(UNREACHABLE)
    assert clone.run("--skip-unreachable")[1].splitlines()[-1].startswith("command:")


def test_index_that_answers_with_an_error_is_a_failure(clone: _Clone) -> None:
    clone.answer(REFUSES)
    code, _, err = clone.run("--skip-unreachable")
    assert code == 1
    assert "HTTP error 403 while getting torch" in err
    assert err.splitlines()[-1] == "the package index answers, but does not offer torch==2.15.0"


def test_install_that_fails_is_a_failure_and_is_tried_again(clone: _Clone) -> None:
    clone.installs_end_with(3)
    code, _, err = clone.run("--skip-unreachable")
    assert code == 1
    assert "installing torch==2.15.0 failed with exit code 3" in err
    clone.installs_end_with(0)
    assert clone.run()[0] == 0
    assert clone.installs()[:2] == ["torch==2.15.0"] * 2


def test_python_that_does_not_run_is_a_failure(clone: _Clone) -> None:
    clone.python.unlink()
    code, _, err = clone.run("--skip-unreachable")
    assert code == 1
    assert err.startswith(f"{clone.python} does not run")


def test_half_made_environment_is_completed(clone: _Clone) -> None:
    """pip notes who installed a package when all of it is in place; without, it takes the package for installed."""
    clone.run()
    folder = clone.cache / "phalanx" / "torch-2.15.0-py3.11"
    (folder / "complete").unlink()
    packages = folder / "lib" / "python3.11" / "site-packages"
    for name in ("whole", "half"):
        (packages / f"{name}-1.0.dist-info").mkdir()
    (packages / "whole-1.0.dist-info" / "INSTALLER").touch()
    assert clone.run()[0] == 0
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]
    assert clone.installs().count("torch==2.15.0") == 2
    assert (folder / "complete").exists()


def test_environment_whose_python_is_gone_is_made_again(clone: _Clone) -> None:
    clone.run()
    (clone.cache / "phalanx" / "torch-2.15.0-py3.11" / "bin" / "python").unlink()
    assert clone.run()[0] == 0
    assert clone.installs().count("torch==2.15.0") == 2


@pytest.mark.parametrize("is_killed", [False, True])
def test_one_process_at_a_time_works_on_an_environment(is_killed: bool, clone: _Clone) -> None:
    pipe = clone.folder.parent / "wait"
    os.mkfifo(pipe)
    first = clone.start()
    with pipe.open("w"):  # opens when the first install waits, and ends its wait when it is closed
        if is_killed:
            first.send_signal(signal.SIGKILL)
            first.wait()
        second = clone.start()
        assert second.stdout is not None
        assert second.stdout.readline() == "Waiting for another process that works on torch-2.15.0-py3.11\n"
        pipe.unlink()
    for process in (first, second):
        process.communicate(timeout=60)
    assert second.returncode == 0
    assert clone.installs().count("torch==2.15.0") == (2 if is_killed else 1)
