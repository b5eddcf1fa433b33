"""What the native core says of a failure, as an exception."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from phalanx import _native
from phalanx.errors import Aborted, CallTimeout, GroupError, InvalidCall, Mismatch, PeerLost, PhalanxError
from phalanx.transports.signatures import Signature, compare
from phalanx.types import GroupInfo

_SAME_CALL = "make the ranks issue the same calls in the same order"
_MISMATCH_HINTS = {
    "COUNT": "give tensors of the same number of elements on all ranks, or look for a call that one of them left out",
    "DTYPE": "give tensors of one dtype on all ranks, or look for a call that one of them left out",
    "ROOT": "pass the same root on all ranks",
    "REDUCE_OP": "pass the same reduce op on all ranks",
    "SPLITS": "make what each rank sends to another equal to what that one expects of it",
    "SHAPE": "pass tensors of the same sizes, in the same order, on all ranks",
}


# What the core answers to a call that it does not begin: class, code, message, hint.
_REFUSALS: dict[int, tuple[type[PhalanxError], str, str, str]] = {
    _native.LEFT: (
        GroupError,
        "GROUP:CLOSED",
        "the group was destroyed on this rank",
        "make a new group, or move this call before destroy_process_group()",
    ),
    _native.FORKED: (
        GroupError,
        "GROUP:FORKED",
        "this process is a fork of the one that made the group, and a group does not go along with a fork",
        "make the group in the child, or start ranks with spawn",
    ),
    _native.NO_MEMORY: (
        InvalidCall,
        "INVALID:TENSOR",
        "expected a tensor with memory of its own, got one without (a fake tensor, a wrapper such as DTensor, or one "
        "whose storage was freed)",
        "pass a plain tensor; of a DTensor, its to_local()",
    ),
    _native.NESTED: (
        InvalidCall,
        "INVALID:NESTED",
        "expected a group that is free, got one whose call on this thread was interrupted by a signal handler that "
        "makes this call",
        "set a flag in the signal handler, and communicate when the interrupted call has ended",
    ),
    _native.BUSY: (
        CallTimeout,
        "MISSING",
        "gave up after a timeout of {timeout:g} s: another thread of this rank was in a call all the time",
        "look at what that thread waits for; the group is still usable",
    ),
}


class _Where(TypedDict):
    group: str
    rank: int
    op: str
    seq: int


def explain(group: _native.Group | None, info: GroupInfo, op: str, status: int, timeout: float) -> PhalanxError:
    """The exception for a call that did not finish. `status` is what Group.run returned; `group` is None once left."""
    if group is None:
        status = _native.LEFT
    if status in _REFUSALS:
        kind, code, message, hint = _REFUSALS[status]
        return kind(message.format(timeout=timeout), code=code, group=info.name, rank=info.rank, op=op, hint=hint)
    assert group is not None
    failure: dict[str, Any] = group.failure()
    cause, finder, seq = failure["kind"], failure["rank"], failure["seq"]
    was_broken = status == _native.WAS_BROKEN
    here = _Where(group=info.name, rank=info.rank, op=op, seq=group.seq + 1 if was_broken else group.seq)
    broken = "the group is broken: " if was_broken else ""
    if cause == _native.FAILURE_MISMATCH:
        return _mismatch(group, info, op, failure, broken)
    if cause == _native.FAILURE_TIMEOUT:
        missing = _ranks(failure["missing"], failure["num_missing"])
        if finder == info.rank and not was_broken:
            message = f"gave up after a timeout of {timeout:g} s: {missing} did not come"
        else:
            message = f"{broken}rank {finder} gave up on seq {seq} when its timeout ran out: {missing} did not come"
        return CallTimeout(
            message, **here, hint=f"look at what {missing} did instead; if it was only slow, raise the group's timeout"
        )
    if cause == _native.FAILURE_LEFT:
        return PeerLost(
            f"{broken}rank {failure['peer']} left the group (destroyed it, or ended) while rank {finder} waited for it "
            f"in seq {seq}",
            **here,
            hint=f"look for an error on rank {failure['peer']}; if there is none, let it make as many calls as the "
            "others before it destroys the group",
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
    own = Signature.from_native(group.describe(info.rank, seq))
    field, detail = compare(one, other, seq, failure["text"])
    return Mismatch(
        f"{broken}ranks {first} and {second} disagree{detail}\n"
        f"  rank {first}: {one.describe(seq)}\n"
        f"  rank {second}: {other.describe(seq)}",
        code=f"MISMATCH:{field}",
        group=info.name,
        rank=info.rank,
        op=own.op if own.seq == seq else op,
        seq=seq,
        hint=f"{_MISMATCH_HINTS.get(field, _SAME_CALL)}; this group can't be used any more",
    )


def _ranks(ranks: Sequence[int], total: int) -> str:
    listed = ", ".join(map(str, ranks))
    if total > len(ranks):
        listed += f" and {total - len(ranks)} more"
    return f"rank {listed}" if total == 1 else f"ranks {listed}"
