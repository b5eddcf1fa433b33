"""barrier: nobody leaves before everybody has come. It moves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.collectives.checks import Form, describe
from phalanx.types import Call, GroupInfo

__all__ = ["build", "meaning"]


def build(info: GroupInfo) -> Call:
    return Call(describe(info, "barrier", Form.barrier), meaning)


def meaning(calls: Sequence[Call]) -> None:
    pass
