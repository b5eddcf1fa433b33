"""Which code is the program's own."""

from __future__ import annotations

import multiprocessing
import os
import sysconfig
from pathlib import Path

import torch
import typing_extensions

from phalanx import _native

__all__ = ["is_framework", "is_ours"]


def _folder_of(module_file: str | None) -> str:
    return str(Path(module_file or "").parent) + os.sep


_OURS = str(Path(__file__).parent.parent) + os.sep
_TORCH = _folder_of(torch.__file__)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
# typing_extensions wraps some of torch's functions, wherever it is installed.
_OTHERS = (_TORCH, _folder_of(multiprocessing.__file__), _STANDARD_LIBRARY, typing_extensions.__file__)
# Packages may be installed inside of the standard library's folder.
_INSTALLED = "site-packages" + os.sep

# For the places of calls, which the native core finds in the frames.
_native.set_folders(_OURS, str(Path(_TORCH, "autograd", "graph.py")), list(_OTHERS))


def is_framework(filename: str) -> bool:
    """Whether a file is none of the program's own: ours, torch's or Python's."""
    if filename.startswith((_OURS, "<frozen ")):
        return True
    return any(filename.startswith(folder) and _INSTALLED not in filename[len(folder) :] for folder in _OTHERS)


def is_ours(filename: str) -> bool:
    return filename.startswith(_OURS)
