"""The backend is there after `import torch`, costs little, and can't break it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx import _autoload

# Every test needs a fresh interpreter that imports torch.
pytestmark = pytest.mark.slow


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def _outcome(code: str, **environment: str) -> str:
    done = _run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


USE = """
import torch, torch.distributed as dist
dist.init_process_group("phalanx", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(tensor.tolist(), dist.get_backend())
dist.destroy_process_group()
"""


# What `import torch` has loaded and started.
LOOK = """
import os, sys, torch
print(sorted(name for name in sys.modules if name.startswith("phalanx")), len(os.listdir("/proc/self/task")))
"""


def test_import_torch_is_enough_and_loads_no_more_than_it_must() -> None:
    loaded, result = _outcome(LOOK + USE).splitlines()
    needed = [
        "phalanx",
        "phalanx._autoload",
        *(["phalanx.children"] if sys.version_info >= (3, 13) else []),
        "phalanx.group",
        "phalanx.group.torch_compat",
        "phalanx.group.torch_compat.registering",
    ]
    without, result_without = _outcome(LOOK + "import phalanx\n" + USE, TORCH_DEVICE_BACKEND_AUTOLOAD="0").splitlines()
    assert result == result_without == "[1.0, 1.0, 1.0] phalanx"
    # As many threads as without.
    assert without.startswith("[] ")
    assert loaded == f"{needed} {without.removeprefix('[] ')}"


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_both_orders_of_import_register_once(autoload: str) -> None:
    code = "import phalanx, torch, phalanx" + USE
    assert _outcome(code, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "[1.0, 1.0, 1.0] phalanx"


def test_a_broken_installation_does_not_break_import_torch(tmp_path: Path) -> None:
    """A native module that can't be loaded is an error for whoever asks for the backend, and for nobody else."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'phalanx._core_ext':\n"
        "            raise ImportError('no native module')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    done = _run("import torch; print(torch.ones(1).item())\n" + USE, PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == "1.0"
    assert "ImportError: no native module" in done.stderr


def test_a_register_that_fails_is_logged_and_does_not_break_import_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins\n"
        "real = builtins.__import__\n"
        "def refuse(name, globals=None, locals=None, fromlist=(), level=0):\n"
        "    if globals and globals.get('__name__') == 'phalanx._autoload' and name == 'torch.distributed':\n"
        "        raise RuntimeError('no torch.distributed')\n"
        "    return real(name, globals, locals, fromlist, level)\n"
        "builtins.__import__ = refuse\n"
    )
    done = _run("import torch; print(torch.ones(1).item())", PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == "1.0"
    assert 'the backend "phalanx" could not be registered' in done.stderr
    assert "RuntimeError: no torch.distributed" in done.stderr


# Has `import torch` find another version, as its own file would state it.
OTHER_TORCH = """
import importlib.machinery, os, sys
class Find:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.version":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            def run_and_set(module):
                run(module)
                module.__version__ = os.environ["OTHER_TORCH"]
            spec.loader.exec_module = run_and_set
            return spec
sys.meta_path.insert(0, Find())
"""


def test_unsupported_torch_is_one_line_and_torch_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_TORCH)
    done = _run(USE, PYTHONPATH=str(tmp_path), OTHER_TORCH="2.16.0a0+git1234")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 1.0, 1.0] phalanx"
    line = "phalanx supports torch 2.13 to 2.15, not torch 2.16.0a0+git1234: its groups may fail"
    assert done.stderr.splitlines() == [line]


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [
        ("1.13.1", False),
        ("2.12.1+cpu", False),
        ("2.13.0", True),
        ("2.14.1+cu130", True),
        ("2.15.3.dev20270101", True),
        ("2.16.0a0", False),
        ("3.14.0", False),
        ("our own", True),
    ],
)
def test_line_about_the_version(version: str, is_supported: bool, caplog: pytest.LogCaptureFixture) -> None:
    _autoload._check_version(version)
    assert len(caplog.messages) == (0 if is_supported else 1)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'phalanx' has no attribute 'Nothing'"):
        _ = phalanx.Nothing
