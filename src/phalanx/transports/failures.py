"""What the native core says of a failure, as an exception."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Sequence
from typing import Protocol, TypedDict, runtime_checkable

import torch

from phalanx import _native
from phalanx.errors import Aborted, CallTimeout, Deadlock, GroupError, InvalidCall, Mismatch, PeerLost, PhalanxError
from phalanx.log import logger
from phalanx.memory import extent
from phalanx.printable import printable
from phalanx.transports import levels, limits
from phalanx.transports.advisers import ask
from phalanx.transports.observers import tell
from phalanx.transports.refusals import HasRefusals, awaited_refusals, open_refusals
from phalanx.transports.reports import (
    Report,
    describe_misfit,
    describe_mismatch,
    describe_refusals,
    fix_refused,
)
from phalanx.types import GroupInfo

# Characters of a list of tags.
_LONGEST_LIST = 60
_SAME_CALL = "make the ranks issue the same calls in the same order"
_MISMATCH_HINTS = {
    "COUNT": "give tensors of the same number of elements on all ranks, or look for a call that one of them left out",
    "DTYPE": "give tensors of one dtype on all ranks, or look for a call that one of them left out",
    "ROOT": "pass the same root on all ranks",
    "DEVICE": "pass tensors on the same type of device on all ranks",
    "REDUCE_OP": "pass the same reduce op on all ranks",
    "SPLITS": "make what each rank sends to another equal to what that one expects of it",
    "SHAPE": "pass tensors of the same sizes, in the same order, on all ranks",
    "RESULT": "look for code that writes to a tensor while a call that uses it is under way",
}
_SAME_TENSOR = "receive into a tensor of the dtype and number of elements that are sent"
_MISFIT_HINTS = {
    "TAG": "pass the same tag on both sides",
    "ORDER": "receive messages in the order in which they are sent",
}


# What the core answers to a call that it does not begin: class, code, message, hint.
_REFUSALS: dict[int, tuple[type[PhalanxError], str, str, str]] = {
    _native.LEFT: (
        GroupError,
        "GROUP:CLOSED",
        "the group was destroyed on this rank",
        "make a new group, or move this call before shutdown() or destroy_process_group()",
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
        "pass a tensor with memory of its own, for example tensor.clone(), and use the result from there",
    ),
}


class _Where(TypedDict):
    group: str
    rank: int
    op: str
    seq: int | None


@runtime_checkable
class KnowsItsRanks(Protocol):
    """A group that knows by itself what others ask the adviser: its ranks are threads of this process."""

    def whereabouts(self) -> list[str]:
        """Lines that say where the ranks were that did not come to a call whose time was up."""

    def lost(self, peer: int, /) -> list[str]:
        """Lines that say what a rank did last."""


class BrokenGroup(HasRefusals, Protocol):
    """What an explanation takes: the native group, or what stands for it."""

    @property
    def seq(self) -> int: ...
    def failure(self) -> _native.Failure: ...
    @property
    def level(self) -> int: ...
    def last_words(self, rank: int, /) -> str: ...
    def testimonies(self) -> Sequence[_native.Testimony]: ...


def explain(
    group: BrokenGroup | None, info: GroupInfo, op: str, status: int, timeout: float = 0.0, seq: int = 0
) -> PhalanxError:
    """The exception for a call that did not finish.

    `status` is what the core says of the call, `group` is None once left, `seq` is 0 where the call was not handed
    over.
    """
    if status in _REFUSALS:
        kind, code, message, hint = _REFUSALS[status]
        if status == _native.NO_SPACE and (limit := limits.find(errno.EFBIG)) is not None:
            message = f"{message}, or this rank may not have so large a file: {limit.what}"
            hint = f"{hint}; {limit.hint}"
        return kind(message, code=code, group=info.name, rank=info.rank, op=op, hint=hint)
    assert group is not None
    error = _explain_broken(group, info, op, status, timeout, seq)
    tell.failed(error)
    return error


def _explain_broken(
    group: BrokenGroup, info: GroupInfo, op: str, status: int, timeout: float, seq: int
) -> PhalanxError:
    failure = group.failure()
    cause = failure.kind
    was_broken = status == _native.WAS_BROKEN
    # Messages are not counted by the group, and one that was refused has no number.
    number = seq or (None if op in _native.MESSAGE_OPS else group.seq + 1)
    here = _Where(group=info.name, rank=info.rank, op=op, seq=number)
    broken = "the group is broken: " if was_broken else ""
    if cause == _native.FAILURE_MISMATCH:
        return _mismatch(group, info, op, failure, broken)
    if cause == _native.FAILURE_MESSAGE:
        return _misfit(group, info, here, failure, broken)
    if cause == _native.FAILURE_TIMEOUT:
        own = failure.rank == info.rank and not was_broken and failure.call.op == op
        return _timeout(group, info, here, failure, timeout if own else None, broken)
    if cause in (_native.FAILURE_LEFT, _native.FAILURE_LOST):
        return _peer_lost(group, info, here, failure, broken)
    finder = failure.rank
    who = "a rank" if finder < 0 else "this rank" if finder == info.rank else info.describe(finder)
    return Aborted(
        f"{broken}{who} aborted the group: {failure.reason}",
        **here,
        hint="make a new group; the first error on the rank that aborted tells why",
    )


def describe_state(info: GroupInfo, *, left: bool, forked: bool, failure: _native.Failure | None) -> str:
    """The state of a group on this rank, in a few words."""
    if forked:
        return "in a forked child"
    if left:
        return "left"
    if failure is None:
        return "open"
    call = f"{failure.call.op}, seq {failure.seq}"
    match failure.kind:
        case _native.FAILURE_MISMATCH:
            why = f"ranks disagree about {call}"
        case _native.FAILURE_MESSAGE:
            why = "a message does not fit its receive"
        case _native.FAILURE_TIMEOUT:
            why = f"timeout of {call}"
        case _native.FAILURE_LEFT:
            why = f"{info.describe(failure.peer)} left"
        case _native.FAILURE_LOST:
            why = f"{info.describe(failure.peer)} died"
        case _:
            why = "aborted" if failure.rank < 0 else f"aborted by {info.describe(failure.rank)}"
    return f"broken: {why}"


def tell_at_last(group: BrokenGroup, info: GroupInfo) -> None:
    """A rank leaves a group that its peers found to be broken, and has made no call since that could tell it so."""
    failure = group.failure()
    if failure.kind in (_native.FAILURE_MISMATCH, _native.FAILURE_MESSAGE):
        error = explain(group, info, failure.call.op, _native.WAS_BROKEN)
        logger.warning("this rank leaves a group about which it was not told before: %s", error)


def check_writable(info: GroupInfo, op: str, tensor: torch.Tensor) -> None:
    """Raises if the tensor's first or last page is mapped read-only: writing there would end the process."""
    start, end = extent(tensor)
    if not _native.writable(start, end - start):
        raise explain(None, info, op, _native.NOT_WRITABLE)


def still_under_way(
    group: HasRefusals | None, info: GroupInfo, op: str, seq: int, seconds: float, missing: Sequence[int]
) -> CallTimeout:
    """A wait was given up, the call was not. `group` is None where the call has ended meanwhile."""
    message = f"gave up waiting after {seconds:g} s"
    if missing:
        message += f": {info.describe(*missing)} did not come"
    refusals = {} if group is None else awaited_refusals(group, info.rank, op, seq, None, missing)
    return CallTimeout(
        "\n".join([f"{message}; the call is still under way", *describe_refusals(info, refusals)]),
        group=info.name,
        rank=info.rank,
        op=op,
        seq=seq,
        hint=fix_refused(info, refusals)
        if refusals
        else "wait again, or for longer; the group's own timeout ends calls whose peers do not come",
    )


def lost_while_joining(
    info: GroupInfo, peer: int, status: int, *, dead: bool = True, words: str = "", replaced_by: str | None = None
) -> PeerLost:
    """A peer died, or ended, before the group was made. `words` are its last ones, `replaced_by` is the command line
    of the program that now runs in its process."""
    lost = info.describe(peer)
    message = f"{lost} ended while the group was being made"
    hint = f"look for an error on {lost}; if there is none, let it make the same groups as the others before it ends"
    exception, frames, told = _last_words(lost, words)
    if exception:
        message += told
        hint = _mend(lost)
    elif replaced_by is not None:
        message = f"{lost} {_replaced(replaced_by)} while the group was being made"
        hint = _keep_program(lost)
    elif dead:
        message = f"{lost} died while the group was being made: {_ending(status)}"
        hint = _look_at_output(lost)
    error = PeerLost(message, group=info.name, rank=info.rank, op="new_group", hint=hint)
    error.peer, error.exception, error.frames = peer, exception, frames
    return error


def _mend(lost: str) -> str:
    return f"mend what raised on {lost}; the others only waited for it"


def _replaced(command_line: str) -> str:
    """Of a rank whose process called exec."""
    return "replaced its program" + (f" (it runs {command_line!r} now)" if command_line else "")


def _keep_program(lost: str) -> str:
    return (
        f"find the call of os.exec* on {lost}: a group does not survive it; start other programs with subprocess, or "
        "destroy the group on every rank before"
    )


def _look_at_output(lost: str) -> str:
    return f"look at the output of {lost}, and in the system's log for a process that was killed"


def _timeout(
    group: BrokenGroup, info: GroupInfo, here: _Where, failure: _native.Failure, timeout: float | None, broken: str
) -> CallTimeout:
    """`timeout` is None where it was not this call that gave up."""
    missing = info.describe(*failure.missing)
    they = "it was" if len(failure.missing) == 1 else "they were"
    if timeout is not None:
        message = f"gave up after a timeout of {timeout:g} s: "
    else:
        message = f"{broken}{info.describe(failure.rank)} gave up on {_what(failure)}, when its timeout ran out: "
    hint = f"look at what {missing} did instead; if {they} only slow, raise the group's timeout"
    op, tag = failure.call.op, failure.call.tag
    if op == "send":
        message += f"{missing} did not receive it (tag {tag})"
    elif op == "recv":
        message += f"no message with tag {tag} came from {missing}"
        if failure.other_tags:
            message += f", but others did, with tag {_tags(failure)}"
            hint = f"give both sides the same tag; if {they} only slow, raise the group's timeout"
    else:
        message += f"{missing} did not come"
    refusals = awaited_refusals(group, failure.rank, op, failure.seq, tag, failure.missing)
    cycle = None if refusals else ask.deadlock(group, info)
    if cycle is not None and cycle.is_sure:
        return Deadlock(
            "\n".join([f"{message}, because {cycle.head}", *cycle.lines]),
            code=f"DEADLOCK:{cycle.kind}",
            **here,
            hint=f"{cycle.hint}; this group can't be used any more",
        )
    if refusals:
        hint = fix_refused(info, refusals)
    elif cycle is not None:
        hint = f"{cycle.hint}; or {hint}"
    if isinstance(group, KnowsItsRanks):
        absent = group.whereabouts()
    else:
        absent = ask.absent(group, info, op, failure.seq, failure.missing)
    lines = [*describe_refusals(info, refusals), *absent]
    if cycle is not None:
        lines = [f"  {cycle.head}", *(f"  {line}" for line in cycle.lines), *lines]
    return CallTimeout("\n".join([message, *lines]), **here, hint=hint)


def _peer_lost(group: BrokenGroup, info: GroupInfo, here: _Where, failure: _native.Failure, broken: str) -> PeerLost:
    peer, status = failure.peer, failure.status
    lost, finder = info.describe(peer), info.describe(failure.rank)
    exception, frames, told = _last_words(lost, group.last_words(peer))
    refused = [refusal for refusal in open_refusals(group, peer) if not refusal.is_told_by(exception)]
    replaced = failure.leaving == _native.LEAVING_REPLACED
    if replaced:
        what = _replaced(failure.command_line)
    elif failure.kind == _native.FAILURE_LOST:
        what = f"died ({_ending(status)})"
    elif failure.leaving == _native.LEAVING_EXITING:
        # The exception says more than the exit code, which is not always known by now.
        what = "ended" if exception or status == _native.UNKNOWN_STATUS else f"ended ({_ending(status)})"
    else:
        what = "left the group (it was destroyed there)"
    message = f"{broken}{lost} {what} while {finder} waited for it in {_what(failure)}"
    if exception:
        message += told
        hint = _mend(lost)
    elif replaced:
        hint = _keep_program(lost)
    elif failure.kind == _native.FAILURE_LOST:
        hint = _look_at_output(lost)
    elif refused:
        hint = f"{fix_refused(info, {peer: refused[0]})}; the other ranks were only waiting for it"
    else:
        hint = (
            f"look for an error on {lost}; if there is none, let it make as many calls as the others before it "
            "ends or destroys the group"
        )
    lines = [line for refusal in refused for line in describe_refusals(info, {peer: refusal})]
    lines += group.lost(peer) if isinstance(group, KnowsItsRanks) else ask.lost(group, info, peer)
    error = PeerLost("\n".join([message, *lines]), **here, hint=hint)
    error.peer, error.exception, error.frames = peer, exception, frames
    return error


def _last_words(lost: str, words: str) -> tuple[str | None, tuple[str, ...], str]:
    """A rank's first exception, its traceback, and both as lines of a message."""
    exception, *frames = map(printable, words.split("\n"))
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


def _what(failure: _native.Failure) -> str:
    """What the finder of the failure was doing."""
    return f"{failure.call.op}, seq {failure.seq}" + (f", at {failure.where}" if failure.where else "")


def _tags(failure: _native.Failure) -> str:
    """Those of messages that came instead."""
    listed = ""
    for num, tag in enumerate(failure.other_tags):
        if len(listed) > _LONGEST_LIST:
            return f"{listed} and others"
        listed += f", {tag}" if num else str(tag)
    return listed


def _misfit(group: BrokenGroup, info: GroupInfo, here: _Where, failure: _native.Failure, broken: str) -> Mismatch:
    report = describe_misfit(info, failure, group.testimonies())
    return Mismatch(
        "\n".join([broken + report.about, *report.lines]),
        code=f"MISMATCH:{report.field}",
        **here,
        hint=_after_refusals(
            info,
            report,
            f"{_MISFIT_HINTS.get(report.field, _SAME_TENSOR)}, or look for a message that is sent or received once too "
            "often; this group can't be used any more",
        ),
    )


def _mismatch(group: BrokenGroup, info: GroupInfo, op: str, failure: _native.Failure, broken: str) -> Mismatch:
    testimonies = group.testimonies()
    recorded = ask.recorded(group, info, failure) if _is_incomplete(failure, testimonies) else {}
    report = describe_mismatch(info, failure, testimonies, group.level == levels.FULL, recorded)
    own = testimonies[info.rank].call
    return Mismatch(
        "\n".join([f"{broken}ranks disagree {report.about}", *report.lines]),
        code=f"MISMATCH:{report.field}",
        group=info.name,
        rank=info.rank,
        op=op if own is None else own.description.op,
        seq=report.seq or failure.seq,
        hint=_after_refusals(
            info, report, f"{_MISMATCH_HINTS.get(report.field, _SAME_CALL)}; this group can't be used any more"
        ),
    )


def _is_incomplete(failure: _native.Failure, testimonies: Sequence[_native.Testimony]) -> bool:
    """Whether black boxes may tell more of the calls in question: ranks that never wait may have made many since."""
    return failure.seq > failure.agreed + 1 or any(
        seen.call is None and seen.posted >= failure.seq for seen in testimonies
    )


def _after_refusals(info: GroupInfo, report: Report, hint: str) -> str:
    """The next step where ranks disagree: a call that one of them had refused is the likely cause."""
    return f"{fix_refused(info, report.refusals)}; or {hint}" if report.refusals else hint
