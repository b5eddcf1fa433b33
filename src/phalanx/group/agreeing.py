"""What the ranks of a group raise where they do not agree about another group, or one of them can't take part.

They have told each other before, so all of them raise the same, and the group that they are in still works.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import GroupError, Mismatch
from phalanx.types import GroupInfo

__all__ = ["check_problems", "mismatch"]


def check_problems(info: GroupInfo, op: str, seq: int, problems: Sequence[str], code: str, hint: str) -> None:
    """Raises if any rank can't take part. `problems` are those of all ranks; empty: it can."""
    lines = [f"  {info.describe(rank)}: {problem}" for rank, problem in enumerate(problems) if problem]
    if lines:
        text = "\n".join(["no group was made", *lines])
        raise GroupError(text, code=code, group=info.name, rank=info.rank, op=op, seq=seq, hint=hint)


def mismatch(
    info: GroupInfo, op: str, seq: int, code: str, verdict: str, passed: Sequence[tuple[str, str]], hint: str
) -> Mismatch:
    """`passed` is what each rank passed, and where in the program."""
    lines = [
        f"  rank {rank} passed {what}" + (f", at {where}" if where else "") for rank, (what, where) in enumerate(passed)
    ]
    return Mismatch(
        "\n".join([verdict, *lines]),
        code=code,
        group=info.name,
        rank=info.rank,
        op=op,
        seq=seq,
        hint=f"{hint}; no group was made, and this one still works",
    )
