"""Which code counts as the program's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import typing_extensions


def test_typing_extensions_is_no_code_of_the_program_wherever_it_is_installed(tmp_path: Path) -> None:
    """It wraps some of torch's functions, and may lie in another folder than torch."""
    shutil.copy(typing_extensions.__file__, tmp_path)
    code = (
        "import typing_extensions\n"
        "from phalanx.transports.places import is_framework\n"
        "print(typing_extensions.__file__, is_framework(typing_extensions.__file__))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [str(tmp_path / "typing_extensions.py"), "True"]
