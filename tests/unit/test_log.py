"""What the package logs is printable, whoever it comes from."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import phalanx
from phalanx.log import logger

BAD = "\x1b]0;owned\x07\x1b[2J"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J"


def test_messages_arguments_and_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("got %s from rank %d:\n\tnext line", BAD, 1)
    logger.warning(f"100% {BAD}")
    try:
        raise ValueError(BAD)
    except ValueError:
        logger.warning("failed", exc_info=True)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"got {SHOWN} from rank 1:\n\tnext line", f"100% {SHOWN}", "failed"]
    formatted = logging.Formatter().format(caplog.records[-1])
    assert formatted.endswith(f"ValueError: {SHOWN}")
    assert "\x1b" not in formatted


def test_no_module_has_a_logger_of_its_own() -> None:
    """But the one that `import torch` loads, which loads nothing else and logs no text of others."""
    root = Path(phalanx.__file__).parent
    calls = {
        path.name
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    }
    assert calls == {"_autoload.py", "log.py"}
