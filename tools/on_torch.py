"""Runs Python in this clone with another version of torch: `tools/on_torch.py --torch 2.15.0 -- -m pytest tests/unit`.

Three folders make up the environment that the command runs in:

- `~/.cache/phalanx/torch-2.15.0-py3.11` (below XDG_CACHE_HOME, if set) has torch, with 5 GB of packages for GPUs.
- `~/.cache/phalanx/tools-1a2b3c4d-py3.11` has the tools. Their pins in constraints.txt give the number.
- `build/on-torch/torch-2.15.0-py3.11` in the clone has Phalanx, built from the clone's sources before every command
  (the build is incremental), and reads everything else from the other two.

All clones share the first two, which do not change any more once their file `complete` exists. A run completes a folder
that an earlier run left incomplete. One process at a time works on a folder: pip inherits the lock, and holds it even
if this program is killed.
"""

from __future__ import annotations

import argparse
import enum
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEWEST_TORCH = "2.15.0"
NOTE_SECONDS = 15.0

# What pip prints if nobody answered. An answer with an error (403, 503, a wrong certificate) is not in this list.
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|RemoteDisconnected|ProxyError"
    r"|Connection refused|Connection reset|Network is unreachable|No route to host|name resolution|timed out"
)


class Index(enum.Enum):
    """What a package index says about one version of a package."""

    HAS_IT = "has it"
    UNREACHABLE = "can't be reached"
    REFUSES = "answers, but does not offer it"


class SetupError(Exception):
    """An environment can't be made."""


class UnreachableIndexError(SetupError):
    """The package index is needed and can't be reached."""


def main() -> None:
    options = parse()
    try:
        torch, tools = torch_environment(options.torch, options.python), tools_environment(options.python)
        for shared in (torch, tools):
            shared.complete()
        python = build_in_clone(torch, tools)
    except UnreachableIndexError as error:
        if not options.skip_unreachable:
            sys.exit(str(error))
        print(f"Skipped what needs torch {options.torch}: {error}")
        return
    except SetupError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    print(f"On torch {options.torch}: python {' '.join(options.command)}", flush=True)
    # These wheels are made for GPUs; the project is about the CPU.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": f"{python.parent}:{os.environ.get('PATH', '')}"}
    os.execve(python, [str(python), *options.command], environment)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run Python in this clone with another version of torch.")
    parser.add_argument("--torch", default=NEWEST_TORCH, help=f"version of torch (default: {NEWEST_TORCH})")
    parser.add_argument("--python", default="python3", help="Python to make the environment with (default: python3)")
    parser.add_argument(
        "--skip-unreachable", action="store_true", help="succeed if the package index is needed and can't be reached"
    )
    parser.add_argument("command", nargs="+", help="what to pass to Python, after --")
    return parser.parse_args()


class SharedEnvironment:
    """Packages for all clones. What it is called says what is in it."""

    def __init__(self, name: str, python: str, packages: Sequence[str]) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx"
        self.folder = cache / name
        self.python = self.folder / "bin" / "python"
        self._base = python
        self._packages = packages
        self._stamp = self.folder / "complete"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def complete(self) -> None:
        """Makes what is missing; raises SetupError."""
        if self._is_complete():
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(Path(f"{self.folder}.lock")) as lock:
            # Another process may have completed it meanwhile.
            if not self._is_complete():
                self._make(lock)

    def _is_complete(self) -> bool:
        return self.python.exists() and self._stamp.exists()

    def _make(self, lock: int) -> None:
        pip = [str(self.python), "-m", "pip"]
        self._stamp.unlink(missing_ok=True)
        if not self.python.exists() or subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
            run_or_fail([self._base, "-m", "venv", "--clear", str(self.folder)], "making an environment", lock)
        check_index(pip, self._packages[0])
        print(f"Making {self.folder}", flush=True)
        forget_half_installed(self.site_packages)
        with notes_about(self.folder):
            command = [*pip, "install", "--disable-pip-version-check", *self._packages]
            run_or_fail(command, f"installing {self._packages[0]}", lock)
        self._stamp.touch()


def torch_environment(torch: str, python: str) -> SharedEnvironment:
    return SharedEnvironment(f"torch-{torch}-py{version_of(python)}", python, [f"torch=={torch}"])


def tools_environment(python: str) -> SharedEnvironment:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = sorted(line for line in lines if "==" in line and not line.startswith(("#", "torch==")))
    number = hashlib.sha256("\n".join(pins).encode()).hexdigest()[:8]
    return SharedEnvironment(f"tools-{number}-py{version_of(python)}", python, pins)


def version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"{python} does not run: {error}") from error
    return done.stdout.strip()


def check_index(pip: Sequence[str], requirement: str) -> None:
    """Asks the package index, as pip is set up here, before pip tries hard and for long."""
    verdict, output = ask_index(pip, *requirement.split("=="))
    if verdict is Index.UNREACHABLE:
        raise UnreachableIndexError(f"the package index, which has {requirement}, can't be reached")
    if verdict is Index.REFUSES:
        raise SetupError(f"{output}\nthe package index answers, but does not offer {requirement}")


def ask_index(pip: Sequence[str], package: str, version: str) -> tuple[Index, str]:
    """Whether a version of a package is there, and what pip printed."""
    command = [*pip, "index", "versions", package, "--disable-pip-version-check", "--retries", "1", "--timeout", "20"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    listed = re.search(r"(?m)^Available versions: (.*)$", done.stdout)
    if listed and version in listed[1].split(", "):
        return Index.HAS_IT, done.stdout
    return Index.UNREACHABLE if _UNREACHABLE.search(done.stdout) else Index.REFUSES, done.stdout


def forget_half_installed(site_packages: Path) -> None:
    """Has pip install again what an earlier pip was installing when it was killed: pip writes INSTALLER at the end."""
    for folder in site_packages.glob("*.dist-info"):
        if not (folder / "INSTALLER").exists():
            shutil.rmtree(folder)


def build_in_clone(torch: SharedEnvironment, tools: SharedEnvironment) -> Path:
    """Builds Phalanx from this clone's sources; gives the Python that has it, torch and the tools."""
    folder = ROOT / "build" / "on-torch" / torch.folder.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    with locked(Path(f"{folder}.lock")) as lock:
        if not python.exists():
            command = [str(torch.python), "-m", "venv", "--clear", "--without-pip", str(folder)]
            run_or_fail(command, "making the clone's own environment", lock)
        own = next(folder.glob("lib/python*/site-packages"))
        (own / "shared.pth").write_text(
            "".join(f"import site; site.addsitedir({str(shared.site_packages)!r})\n" for shared in (tools, torch))
        )
        for shared in (torch, tools):
            copy_scripts(shared.python, python)
        print("Building the native core", flush=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # `make build` has a folder of its own, with the paths of its own tools.
        command += ["--no-build-isolation", f"--config-settings=build-dir={folder}/cmake", "--editable", str(ROOT)]
        run_or_fail(command, "building Phalanx", lock)
    return python


def copy_scripts(source: Path, target: Path) -> None:
    """Gives an environment the commands of another, such as torchrun."""
    for script in source.parent.iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            copy = target.parent / script.name
            copy.write_bytes(f"#!{target}\n".encode() + rest)
            copy.chmod(0o755)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Waits until no other process has the lock. A child that inherits the handle keeps it locked."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another process that works on {path.name.removesuffix('.lock')}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextmanager
def notes_about(folder: Path) -> Iterator[None]:
    """Says every now and then how large a folder is."""
    done = threading.Event()
    began = time.monotonic()

    def say() -> None:
        while not done.wait(NOTE_SECONDS):
            blocks = subprocess.run(["du", "-sm", folder], capture_output=True, text=True, check=False).stdout.split()
            print(f"[{time.monotonic() - began:4.0f} s] {blocks[0] if blocks else 0} MB installed", flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run_or_fail(command: Sequence[str], what: str, lock: int) -> None:
    """The command inherits the lock's handle."""
    try:
        code = subprocess.run(command, pass_fds=[lock], check=False).returncode
    except OSError as error:
        raise SetupError(f"{what} failed: {error}") from error
    if code:
        raise SetupError(f"{what} failed with exit code {code}: {' '.join(command)}")


if __name__ == "__main__":
    main()
