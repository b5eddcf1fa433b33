"""What the native core says of a failure, as an exception."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, TypedDict

from phalanx import _native
from phalanx.errors import Aborted, CallTimeout, GroupError, InvalidCall, Mismatch, PeerLost, PhalanxError
from phalanx.transports.signatures import Signature, compare, dtype_name
from phalanx.types import GroupInfo

_OP_NUMBERS = {name: number for number, name in enumerate(_native.OPS)}
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
        "gave up after a timeout of {timeout:g} s: an earlier call of this rank was under way all the time",
        "look at what that call waits for; the group is still usable",
    ),
    _native.NO_SPACE: (
        GroupError,
        "GROUP:NO_SPACE",
        "there is no memory left in /dev/shm for the messages to this peer",
        "give the container more of it (--shm-size), or let the ranks see each other's processes (--pid=host)",
    ),
    _native.NOT_WRITABLE: (
        InvalidCall,
        "INVALID:MEMORY",
        "expected a tensor that can be written, got one whose memory is mapped read-only",
        "receive into a tensor of its own memory, for example torch.empty_like(tensor)",
    ),
}


class _Where(TypedDict):
    group: str
    rank: int
    op: str
    seq: int | None


def explain(
    group: _native.Group | None, info: GroupInfo, op: str, status: int, timeout: float, seq: int | None = None
) -> PhalanxError:
    """The exception for a call that did not finish.

    `status` is what the core says of the call, `group` is None once left, `seq` is the call's own where it is not the
    last one of the group.
    """
    if group is None:
        status = _native.LEFT
    if status in _REFUSALS:
        kind, code, message, hint = _REFUSALS[status]
        return kind(message.format(timeout=timeout), code=code, group=info.name, rank=info.rank, op=op, hint=hint)
    assert group is not None
    failure: dict[str, Any] = group.failure()
    cause, finder = failure["kind"], failure["rank"]
    was_broken = status == _native.WAS_BROKEN
    # Messages are not counted by the group, and one that was refused has no number.
    if seq is None and op not in ("send", "recv"):
        seq = group.seq + 1 if was_broken else group.seq
    here = _Where(group=info.name, rank=info.rank, op=op, seq=seq)
    broken = "the group is broken: " if was_broken else ""
    if cause == _native.FAILURE_MISMATCH:
        return _mismatch(group, info, op, failure, broken)
    if cause == _native.FAILURE_MESSAGE:
        return _misfit(here, failure, broken)
    if cause == _native.FAILURE_TIMEOUT:
        missing = _ranks(failure["missing"], failure["num_missing"])
        if finder == info.rank and not was_broken and failure["op"] == _OP_NUMBERS.get(op):
            message = f"gave up after a timeout of {timeout:g} s: {missing} did not come"
        else:
            gave_up = f"rank {finder} gave up on {_what(failure)} when its timeout ran out"
            message = f"{broken}{gave_up}: {missing} did not come"
        return CallTimeout(
            message, **here, hint=f"look at what {missing} did instead; if it was only slow, raise the group's timeout"
        )
    if cause in (_native.FAILURE_LEFT, _native.FAILURE_LOST):
        return _peer_lost(group, here, failure, broken)
    who = "a rank" if finder < 0 else "this rank" if finder == info.rank else f"rank {finder}"
    return Aborted(
        f"{broken}{who} aborted the group: {failure['text']}",
        **here,
        hint="make a new group; the first error on the rank that aborted tells why",
    )


def still_under_way(info: GroupInfo, op: str, seq: int, seconds: float, missing: Sequence[int]) -> CallTimeout:
    """A wait was given up, the call was not."""
    message = f"gave up waiting after {seconds:g} s"
    if missing:
        message += f": {_ranks(missing, len(missing))} did not come"
    return CallTimeout(
        f"{message}; the call is still under way",
        group=info.name,
        rank=info.rank,
        op=op,
        seq=seq,
        hint="wait again, or for longer; the group's own timeout ends calls whose peers do not come",
    )


def lost_while_joining(info: GroupInfo, peer: int, status: int) -> PeerLost:
    """A peer died before the group was made."""
    error = PeerLost(
        f"rank {peer} died while the group was being made: {_ending(status)}",
        group=info.name,
        rank=info.rank,
        op="new_group",
        hint=f"look for an error on rank {peer}",
    )
    error.peer = peer
    return error


def _peer_lost(group: _native.Group, here: _Where, failure: dict[str, Any], broken: str) -> PeerLost:
    peer, status = failure["peer"], failure["status"]
    words = group.last_words(peer)
    if failure["kind"] == _native.FAILURE_LOST:
        what = f"died ({_ending(status)})"
    elif failure["leaving"] == _native.LEAVING_EXITING:
        what = "ended" if status == _native.UNKNOWN_STATUS else f"ended ({_ending(status)})"
    else:
        what = "left the group (it was destroyed there)"
    message = f"{broken}rank {peer} {what} while rank {failure['rank']} waited for it in {_what(failure)}"
    if words:
        message += f"\n  the first exception of rank {peer}: {words}"
        hint = f"mend what raised on rank {peer}; the others only waited for it"
    elif failure["kind"] == _native.FAILURE_LOST:
        hint = f"look at the output of rank {peer}, and in the system's log for a process that was killed"
    else:
        hint = (
            f"look for an error on rank {peer}; if there is none, let it make as many calls as the others before it "
            "ends or destroys the group"
        )
    error = PeerLost(message, **here, hint=hint)
    error.peer = peer
    error.exception = words or None
    return error


def _ending(status: int) -> str:
    """How a process ended, of the status that waitpid gives."""
    if status == _native.UNKNOWN_STATUS:
        return "how is not visible from here"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"


def _what(failure: dict[str, Any]) -> str:
    """What the finder of the failure was doing."""
    return f"{_native.OPS[failure['op']]}, seq {failure['seq']}"


def _misfit(here: _Where, failure: dict[str, Any], broken: str) -> Mismatch:
    sent_dtype, sent, expected_dtype, expected, tag = failure["misfit"]
    receiver, sender = failure["rank"], failure["peer"]
    field = "COUNT" if sent_dtype == expected_dtype and sent != expected else "DTYPE"
    about = "the number of elements" if field == "COUNT" else "the dtype"
    return Mismatch(
        f"{broken}ranks {sender} and {receiver} disagree about {about} of a message\n"
        f"  rank {sender}: send({sent} elements of {dtype_name(sent_dtype)}, to rank {receiver}, tag {tag})\n"
        f"  rank {receiver}: recv({expected} elements of {dtype_name(expected_dtype)}, from rank {sender}, tag {tag})",
        code=f"MISMATCH:{field}",
        **here,
        hint="receive into a tensor of the dtype and number of elements that are sent, or look for a message that is "
        "sent or received once too often; this group can't be used any more",
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
