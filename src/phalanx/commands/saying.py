"""What a verb prints: names and texts of others among it, so nothing but printable text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from phalanx.printable import printable

__all__ = ["say"]


def say(lines: Iterable[str], to: TextIO | None = None) -> None:
    to = to or sys.stdout
    for line in lines:
        # Letters that the terminal's encoding does not have are shown as escapes.
        encoding = to.encoding or "utf-8"
        print(printable(line).encode(encoding, "backslashreplace").decode(encoding), file=to)
