"""What the native core says of a failure, as an exception."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

import torch

from phalanx import _native
from phalanx.errors import Aborted, CallTimeout, GroupError, InvalidCall, Mismatch, PeerLost, PhalanxError
from phalanx.transports.hooks import observer
from phalanx.transports.reports import describe_misfit, describe_mismatch
from phalanx.transports.signatures import Facts
from phalanx.transports.spans import extent
from phalanx.types import GroupInfo

_logger = logging.getLogger("phalanx")
_MESSAGES = ("send", "recv")
_SAME_CALL = "make the ranks issue the same calls in the same order"
_MISMATCH_HINTS = {
    "COUNT": "give tensors of the same number of elements on all ranks, or look for a call that one of them left out",
    "DTYPE": "give tensors of one dtype on all ranks, or look for a call that one of them left out",
    "ROOT": "pass the same root on all ranks",
    "REDUCE_OP": "pass the same reduce op on all ranks",
    "SPLITS": "make what each rank sends to another equal to what that one expects of it",
    "SHAPE": "pass tensors of the same sizes, in the same order, on all ranks",
    "RESULT": "look for code that writes to a tensor while a call that uses it is under way",
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


class BrokenGroup(Protocol):
    """What an explanation takes: the native group, or what stands for it."""

    @property
    def seq(self) -> int: ...
    def failure(self) -> dict[str, Any]: ...
    @property
    def check(self) -> int: ...
    def last_words(self, rank: int, /) -> str: ...
    def testimonies(self) -> Sequence[tuple[Facts | None, Facts | None]]: ...


def explain(
    group: BrokenGroup | None, info: GroupInfo, op: str, status: int, timeout: float = 0.0, seq: int = 0
) -> PhalanxError:
    """The exception for a call that did not finish.

    `status` is what the core says of the call, `group` is None once left, `seq` is 0 where the call was not handed
    over.
    """
    if status in _REFUSALS:
        kind, code, message, hint = _REFUSALS[status]
        return kind(message, code=code, group=info.name, rank=info.rank, op=op, hint=hint)
    assert group is not None
    error = _explain_broken(group, info, op, status, timeout, seq)
    observer().failed(error)
    return error


def _explain_broken(
    group: BrokenGroup, info: GroupInfo, op: str, status: int, timeout: float, seq: int
) -> PhalanxError:
    failure: dict[str, Any] = group.failure()
    cause = failure["kind"]
    was_broken = status == _native.WAS_BROKEN
    # Messages are not counted by the group, and one that was refused has no number.
    number = seq or (None if op in _MESSAGES else group.seq + 1)
    here = _Where(group=info.name, rank=info.rank, op=op, seq=number)
    broken = "the group is broken: " if was_broken else ""
    if cause == _native.FAILURE_MISMATCH:
        return _mismatch(group, info, op, failure, broken)
    if cause == _native.FAILURE_MESSAGE:
        return _misfit(group, info, here, failure, broken)
    if cause == _native.FAILURE_TIMEOUT:
        own = failure["rank"] == info.rank and not was_broken and failure["op"] == _native.OP_NUMBERS.get(op)
        return _timeout(group, info, here, failure, timeout if own else None, broken)
    if cause in (_native.FAILURE_LEFT, _native.FAILURE_LOST):
        return _peer_lost(group, info, here, failure, broken)
    finder = failure["rank"]
    who = "a rank" if finder < 0 else "this rank" if finder == info.rank else info.describe(finder)
    return Aborted(
        f"{broken}{who} aborted the group: {failure['text']}",
        **here,
        hint="make a new group; the first error on the rank that aborted tells why",
    )


def tell_at_last(group: BrokenGroup, info: GroupInfo) -> None:
    """A rank leaves a group that its peers found to be broken, and has made no call since that could tell it so."""
    failure = group.failure()
    if failure["kind"] in (_native.FAILURE_MISMATCH, _native.FAILURE_MESSAGE):
        error = explain(group, info, _native.OPS[failure["op"]], _native.WAS_BROKEN)
        _logger.warning("this rank leaves a group about which it was not told before: %s", error)


def check_writable(info: GroupInfo, tensor: torch.Tensor) -> None:
    """Of a tensor that is received into by other means than the core, which looks itself."""
    start, end = extent(tensor)
    if not _native.writable(start, end - start):
        raise explain(None, info, "recv", _native.NOT_WRITABLE)


def still_under_way(info: GroupInfo, op: str, seq: int, seconds: float, missing: Sequence[int]) -> CallTimeout:
    """A wait was given up, the call was not."""
    message = f"gave up waiting after {seconds:g} s"
    if missing:
        message += f": {info.describe(*missing)} did not come"
    return CallTimeout(
        f"{message}; the call is still under way",
        group=info.name,
        rank=info.rank,
        op=op,
        seq=seq,
        hint="wait again, or for longer; the group's own timeout ends calls whose peers do not come",
    )


def lost_while_joining(info: GroupInfo, peer: int, status: int, *, dead: bool = True, words: str = "") -> PeerLost:
    """A peer died, or ended, before the group was made. `words` are its last ones."""
    lost = info.describe(peer)
    message = f"{lost} ended while the group was being made"
    hint = f"look for an error on {lost}; if there is none, let it make the same groups as the others before it ends"
    exception, frames, told = _last_words(lost, words)
    if exception:
        message += told
        hint = _mend(lost)
    elif dead:
        message = f"{lost} died while the group was being made: {_ending(status)}"
        hint = _look_at_output(lost)
    error = PeerLost(message, group=info.name, rank=info.rank, op="new_group", hint=hint)
    error.peer, error.exception, error.frames = peer, exception, frames
    return error


def another_group(info: GroupInfo, *seen: GroupInfo) -> GroupError:
    """Ranks that came to make one group mean others."""
    first, second = sorted(seen, key=lambda each: each.rank)
    return GroupError(
        f"expected the same ranks everywhere, got {first.ranks_text()} on rank {first.rank} of them and "
        f"{second.ranks_text()} on rank {second.rank} of them",
        code="GROUP:SIZE" if first.size != second.size else "GROUP:RANKS",
        group=info.name,
        rank=info.rank,
        op="new_group",
        hint="make the same groups, with the same ranks, in the same order on every rank; give each group a name or a "
        "store of its own",
    )


def _mend(lost: str) -> str:
    return f"mend what raised on {lost}; the others only waited for it"


def _look_at_output(lost: str) -> str:
    return f"look at the output of {lost}, and in the system's log for a process that was killed"


def _timeout(
    group: BrokenGroup, info: GroupInfo, here: _Where, failure: dict[str, Any], timeout: float | None, broken: str
) -> CallTimeout:
    """`timeout` is None where it was not this call that gave up."""
    missing = info.describe(*failure["missing"])
    they = "it was" if len(failure["missing"]) == 1 else "they were"
    if timeout is not None:
        message = f"gave up after a timeout of {timeout:g} s: "
    else:
        message = f"{broken}{info.describe(failure['rank'])} gave up on {_what(failure)}, when its timeout ran out: "
    hint = f"look at what {missing} did instead; if {they} only slow, raise the group's timeout"
    op, tag, others = _native.OPS[failure["op"]], failure["misfit"][-1], failure["text"]
    if op == "send":
        message += f"{missing} did not receive it (tag {tag})"
    elif op == "recv":
        message += f"no message with tag {tag} came from {missing}"
        if others:
            message += f", but others did, with tag {others}"
            hint = f"give both sides the same tag; if {they} only slow, raise the group's timeout"
    else:
        message += f"{missing} did not come"
    lines = observer().absent(group, info, op, failure["seq"], failure["missing"])
    return CallTimeout("\n".join([message, *lines]), **here, hint=hint)


def _peer_lost(group: BrokenGroup, info: GroupInfo, here: _Where, failure: dict[str, Any], broken: str) -> PeerLost:
    peer, status = failure["peer"], failure["status"]
    lost, finder = info.describe(peer), info.describe(failure["rank"])
    exception, frames, told = _last_words(lost, group.last_words(peer))
    if failure["kind"] == _native.FAILURE_LOST:
        what = f"died ({_ending(status)})"
    elif failure["leaving"] == _native.LEAVING_EXITING:
        what = "ended" if status == _native.UNKNOWN_STATUS else f"ended ({_ending(status)})"
    else:
        what = "left the group (it was destroyed there)"
    message = f"{broken}{lost} {what} while {finder} waited for it in {_what(failure)}"
    if exception:
        message += told
        hint = _mend(lost)
    elif failure["kind"] == _native.FAILURE_LOST:
        hint = _look_at_output(lost)
    else:
        hint = (
            f"look for an error on {lost}; if there is none, let it make as many calls as the others before it "
            "ends or destroys the group"
        )
    last_calls = observer().lost(group, info, peer)
    error = PeerLost("\n".join([message, *last_calls]), **here, hint=hint)
    error.peer, error.exception, error.frames = peer, exception, frames
    return error


def _last_words(lost: str, words: str) -> tuple[str | None, tuple[str, ...], str]:
    """A rank's first exception, its traceback, and both as lines of a message."""
    exception, *frames = words.split("\n")
    told = f"\n  the first exception of {lost}: {exception}" + "".join(f"\n    {frame}" for frame in frames)
    return exception or None, tuple(frames), told


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
    where = failure["where"][0]
    return f"{_native.OPS[failure['op']]}, seq {failure['seq']}" + (f", at {where}" if where else "")


def _misfit(group: BrokenGroup, info: GroupInfo, here: _Where, failure: dict[str, Any], broken: str) -> Mismatch:
    report = describe_misfit(info, failure, group.testimonies())
    return Mismatch(
        "\n".join([broken + report.about, *report.lines]),
        code=f"MISMATCH:{report.field}",
        **here,
        hint="receive into a tensor of the dtype and number of elements that are sent, or look for a message that is "
        "sent or received once too often; this group can't be used any more",
    )


def _mismatch(group: BrokenGroup, info: GroupInfo, op: str, failure: dict[str, Any], broken: str) -> Mismatch:
    testimonies = group.testimonies()
    report = describe_mismatch(info, failure, testimonies, group.check == _native.CHECK_FULL)
    own = testimonies[info.rank][0]
    return Mismatch(
        "\n".join([f"{broken}ranks disagree {report.about}", *report.lines]),
        code=f"MISMATCH:{report.field}",
        group=info.name,
        rank=info.rank,
        op=op if own is None else _native.OPS[own[1]],
        seq=failure["seq"],
        hint=f"{_MISMATCH_HINTS.get(report.field, _SAME_CALL)}; this group can't be used any more",
    )
