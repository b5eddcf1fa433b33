"""What the native core says of a failure, as an exception."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from phalanx import _native
from phalanx.errors import Aborted, CallTimeout, GroupError, Mismatch, PeerLost, PhalanxError
from phalanx.transports.signatures import Signature, compare
from phalanx.types import GroupInfo


class _Where(TypedDict):
    group: str
    rank: int
    op: str
    seq: int


def explain(group: _native.Group | None, info: GroupInfo, op: str, status: int, timeout: float) -> PhalanxError:
    """The exception for a call that did not finish. `status` is what Group.run returned; `group` is None once left."""
    if group is None:
        return GroupError(
            "the group was destroyed on this rank",
            code="GROUP:CLOSED",
            group=info.name,
            rank=info.rank,
            op=op,
            hint="make a new group, or move this call before destroy_process_group()",
        )
    if status == _native.FORKED:
        return GroupError(
            "this process is a fork of the one that made the group, and a group does not go along with a fork",
            code="GROUP:FORKED",
            group=info.name,
            rank=info.rank,
            op=op,
            hint="make the group in the child, or start ranks with spawn",
        )
    failure: dict[str, Any] = group.failure()
    kind, finder, seq = failure["kind"], failure["rank"], failure["seq"]
    was_broken = status == _native.WAS_BROKEN
    here = _Where(group=info.name, rank=info.rank, op=op, seq=group.seq + 1 if was_broken else group.seq)
    broken = "the group is broken: " if was_broken else ""
    if kind == _native.FAILURE_MISMATCH:
        return _mismatch(group, info, op, failure, broken)
    if kind == _native.FAILURE_TIMEOUT:
        missing = _ranks(failure["missing"], failure["num_missing"])
        if finder == info.rank and not was_broken:
            message = f"gave up after a timeout of {timeout:g} s: {missing} did not come"
        else:
            message = f"{broken}rank {finder} gave up on seq {seq} when its timeout ran out: {missing} did not come"
        return CallTimeout(
            message, **here, hint=f"look at what {missing} did instead; if it was only slow, raise the group's timeout"
        )
    if kind == _native.FAILURE_LEFT:
        return PeerLost(
            f"{broken}rank {failure['peer']} destroyed the group while rank {finder} waited for it in seq {seq}",
            **here,
            hint=f"let rank {failure['peer']} make as many calls as the others before it destroys the group",
        )
    who = "a rank" if finder < 0 else "this rank" if finder == info.rank else f"rank {finder}"
    return Aborted(
        f"{broken}{who} aborted the group: {failure['text']}",
        **here,
        hint="make a new group; the first error on the rank that aborted tells why",
    )


def _mismatch(group: _native.Group, info: GroupInfo, op: str, failure: dict[str, Any], broken: str) -> Mismatch:
    seq = failure["seq"]
    # In rank order, so that all ranks say the same, whoever found it.
    first, second = sorted((failure["rank"], failure["peer"]))
    one, other = (Signature.from_native(group.describe(rank, seq)) for rank in (first, second))
    field, detail = compare(one, other, seq, failure["text"])
    return Mismatch(
        f"{broken}ranks {first} and {second} disagree{detail}\n"
        f"  rank {first}: {one.describe(seq)}\n"
        f"  rank {second}: {other.describe(seq)}",
        code=f"MISMATCH:{field}",
        group=info.name,
        rank=info.rank,
        op=op,
        seq=seq,
        hint="make both ranks issue the same calls in the same order; the group can't be used any more",
    )


def _ranks(ranks: Sequence[int], total: int) -> str:
    listed = ", ".join(map(str, ranks))
    if total > len(ranks):
        listed += f" and {total - len(ranks)} more"
    return f"rank {listed}" if total == 1 else f"ranks {listed}"
