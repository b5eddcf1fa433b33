"""What the tests of training take to run their ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RunRanks = Callable[..., list[Any]]
