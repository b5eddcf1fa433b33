"""What a report says when ranks disagree, as lines of text: made of what the finder froze, so that all ranks say the
same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phalanx import _native
from phalanx.phrases import elements
from phalanx.printable import printable
from phalanx.transports.refusals import Refusal
from phalanx.transports.signatures import (
    FIELDS,
    describe_call,
    describe_dtype,
    describe_shape,
    device_name,
    dtype_of,
    dtype_width,
    place_of,
    value_of,
)
from phalanx.types import REDUCE_OP_NAMES, GroupInfo

__all__ = [
    "Report",
    "describe_awaited_refusals",
    "describe_misfit",
    "describe_mismatch",
    "describe_refusals",
    "describe_shapes",
    "fix_refused",
]

_INDENT = "  "


# Calls of a rank, by their numbers.
Recorded = Mapping[int, _native.MadeCall]


class Report(NamedTuple):
    """The field of the error's code, what it is about in one line, the lines below, what ranks had refused, and the
    call that it is about; 0: the one of the failure."""

    field: str
    about: str
    lines: list[str]
    refusals: Mapping[int, Refusal]
    seq: int = 0


class _Side(NamedTuple):
    """Ranks whose calls agree."""

    ranks: list[int]
    calls: list[_native.MadeCall]


def describe_mismatch(
    info: GroupInfo,
    failure: _native.Failure,
    testimonies: Sequence[_native.Testimony],
    full: bool,
    recorded: Mapping[int, Recorded] | None = None,
) -> Report:
    """`recorded`: by rank, what black boxes have of calls that the testimonies do not tell."""
    calls: Mapping[int, _native.MadeCall] = {
        rank: seen.call for rank, seen in enumerate(testimonies) if seen.call is not None
    }
    refusals = {rank: refusal for rank, refusal in _refused(testimonies).items() if refusal.seq == failure.seq}
    completed = {rank: testimonies[rank].completed for rank in range(info.size)}
    if failure.splits is not None:
        lines = _splits(info, failure.splits, calls)
        lines += describe_refusals(info, refusals)
        return Report("SPLITS", "about the sizes they exchange", lines + _last_completed(info, completed), refusals)
    if failure.sizes_differ:
        lines = [line for rank in sorted(calls) for line in _side(info, _Side([rank], [calls[rank]]), "", shape=True)]
        return Report("SPLITS", "about the sizes they exchange", lines + _last_completed(info, completed), refusals)
    # Records do not have all that is compared at the full level.
    full = full and not recorded
    seq, calls = _first_known(failure, calls, recorded or {}, full)
    sides = _sides(calls, full)
    code, field, about = _first_difference([side.calls[0] for side in sides], full)
    carried_out = f"; {info.engine} carries out its calls" if info.engine else ""
    lines = [f"{_INDENT}the group has {info.describe(*range(info.size))}{carried_out}"]
    is_known = len(sides) > 1
    if not is_known and failure.seq > failure.agreed + 1:
        about = f"a call from seq {failure.agreed + 1} to seq {failure.seq}"
        lines.append(f"{_INDENT}their calls agree up to seq {failure.agreed}; later ones are not recorded any more")
    most = sides[0].ranks if sides else []
    has_majority = 2 * len(most) > len(calls)
    for side in sides:
        is_odd = not has_majority or side.ranks is not most
        mark = f"  <-- {_value(side.calls[0], field)}" if is_odd and is_known else ""
        lines += _side(info, side, mark, shape=field == "shape" or (full and field in ("op", "count")))
    lines += _absent(info, seq, [rank for rank in range(info.size) if rank not in calls], testimonies)
    lines += describe_refusals(info, refusals)
    if is_known and not has_majority:
        lines.append(f"{_INDENT}no majority: any of these may be the one to mend")
    return Report(code, f"about {about}", lines + _last_completed(info, completed), refusals, seq)


def _first_known(
    failure: _native.Failure, seen: Mapping[int, _native.MadeCall], recorded: Mapping[int, Recorded], full: bool
) -> tuple[int, Mapping[int, _native.MadeCall]]:
    """The first call in question of which it is known that ranks differ, and who made which; else the last one."""
    calls = seen
    known_seqs = {seq for known in recorded.values() for seq in known if failure.agreed < seq < failure.seq}
    for seq in (*sorted(known_seqs), failure.seq):
        calls = {rank: known[seq] for rank, known in recorded.items() if seq in known}
        if seq == failure.seq:
            calls = {**seen, **calls}
        if len({_key(call, full) for call in calls.values()}) > 1:
            return seq, dict(sorted(calls.items()))
    return failure.seq, dict(sorted(calls.items()))


def _absent(info: GroupInfo, seq: int, ranks: Sequence[int], testimonies: Sequence[_native.Testimony]) -> list[str]:
    """Lines about ranks of whose call nothing is known."""
    since = {rank: testimonies[rank].posted - seq for rank in ranks if testimonies[rank].posted >= seq}
    absent = [rank for rank in ranks if rank not in since]
    lines = [
        f"{_INDENT}{info.describe(rank)}: had made this call and {num} more; it is not recorded any more"
        for rank, num in since.items()
    ]
    return lines + ([f"{_INDENT}{info.describe(*absent)}: had not made this call"] if absent else [])


def describe_refusals(info: GroupInfo, refusals: Mapping[int, Refusal]) -> list[str]:
    """Lines about calls that ranks did not make because their own arguments were wrong."""
    return [
        f"{_INDENT}{info.describe(rank)} refused {_refused_call(info, refusal)}, at "
        f"{refusal.where or 'an unknown source line'}: {refusal.error}"
        for rank, refusal in refusals.items()
    ]


def _refused_call(info: GroupInfo, refusal: Refusal) -> str:
    if not refusal.is_message:
        return f"{refusal.op}, seq {refusal.seq}"
    peer = info.describe(refusal.peer) if refusal.peer >= 0 else "any rank" if refusal.op == "recv" else "a rank"
    tag = f", tag {refusal.tag}" if refusal.tag >= 0 else ""
    return f"{refusal.op} {'to' if refusal.op == 'send' else 'from'} {peer}{tag}"


def fix_refused(info: GroupInfo, refusals: Mapping[int, Refusal]) -> str:
    """The next step."""
    hints = {refusal.hint for refusal in refusals.values()} - {""}
    return f"fix the arguments on {info.describe(*refusals)}" + (f": {hints.pop()}" if len(hints) == 1 else "")


def describe_awaited_refusals(info: GroupInfo, rank: int, op: str, seq: int, refusals: Mapping[int, Refusal]) -> str:
    """A warning: `rank` waits in a call that others have refused, and may still make."""
    return "\n".join(
        [
            f"{op}, seq {seq}, group {info.name!r}, rank {rank}: {info.describe(*refusals)} refused the call that this "
            "rank waits for",
            *describe_refusals(info, refusals),
            f"{_INDENT}Next: {fix_refused(info, refusals)}. The call completes if it is repeated there with valid "
            "arguments before the timeout.",
        ]
    )


def describe_shapes(info: GroupInfo, note: _native.ShapeNote) -> str:
    """A warning: calls that agree but for the shape of a tensor."""
    said = "; ".join(
        f"{info.describe(side.rank)} has {describe_shape(side.shape)}, "
        f"at {printable(side.where) or 'an unknown source line'}"
        for side in note.sides
    )
    return (
        f"{note.op}, seq {note.seq}, group {info.name!r}: ranks pass tensors of the same number of elements in "
        f"different shapes: {said}. The elements are taken in order; TORCH_DISTRIBUTED_DEBUG=DETAIL makes this an "
        "error. Said once a group."
    )


def describe_misfit(info: GroupInfo, failure: _native.Failure, testimonies: Sequence[_native.Testimony]) -> Report:
    """Of a message that does not fit its receive."""
    assert failure.misfit is not None
    sent, expected = failure.misfit.sent, failure.call
    receiver, sender = info.describe(failure.rank), info.describe(failure.peer)
    code, about, marks = _message_difference(failure, failure.misfit)
    sides = {(failure.peer, "send", failure.rank, sent.tag), (failure.rank, "recv", failure.peer, expected.tag)}
    refusals = {
        rank: refusal
        for rank, refusal in _refused(testimonies).items()
        if any(rank == side and refusal.is_made_by(op, other, tag) for side, op, other, tag in sides)
    }
    lines = []
    if failure.seq > failure.agreed + 1:
        lines.append(
            f"{_INDENT}their messages agree up to number {failure.agreed}, and differ at number {failure.seq} at the "
            "latest"
        )
    lines += [
        *_message(f"{sender}: send", sent, f"to {receiver}", marks[0], failure.misfit.where, failure.seq),
        *_message(f"{receiver}: recv", expected, f"from {sender}", marks[1], failure.where, failure.seq),
        *describe_refusals(info, refusals),
        *_last_completed(info, {rank: testimonies[rank].completed for rank in (failure.peer, failure.rank)}),
    ]
    return Report(code, f"{sender} and {receiver} disagree about {about}", lines, refusals)


def _message_difference(failure: _native.Failure, misfit: _native.Misfit) -> tuple[str, str, tuple[str, str]]:
    """The field, what it is about, and what marks the two sides."""
    sent, expected = misfit.sent, failure.call
    marks = ("", "")
    if not _is_known(sent) or not _is_known(expected):
        field, about = "ORDER", "their messages"
    elif misfit.fitting_seq:
        field, about = "ORDER", "the order of their messages"
        other = f"fits number {misfit.fitting_seq} of the other side"
        marks = (other, "") if misfit.is_sent_fitting else ("", other)
    elif sent.tag != expected.tag:
        field, about = "TAG", "the tag of a message"
        marks = (f"tag {sent.tag}", f"tag {expected.tag}")
    elif dtype_of(sent) != dtype_of(expected):
        field, about = "DTYPE", "the dtype of a message"
        marks = (describe_dtype(sent), describe_dtype(expected))
    else:
        field, about = "COUNT", "the number of elements of a message"
        marks = (elements(sent.count), elements(expected.count))
    return field, about, marks


def _is_known(message: _native.Description) -> bool:
    """False: too many were made since."""
    return message.op in _native.MESSAGE_OPS


def _message(who: str, message: _native.Description, whom: str, mark: str, where: str, seq: int) -> list[str]:
    if not _is_known(message):
        return [f"{_INDENT}{who}, number {seq} {whom}: it is not recorded any more"]
    told = f"{elements(message.count)} of {describe_dtype(message)}, {whom}, tag {message.tag}"
    return [
        f"{_INDENT}{who}({told})" + (f"  <-- {mark}" if mark else ""),
        f"{_INDENT}  at {where or 'a line that is not known'}",
    ]


def _splits(info: GroupInfo, splits: _native.Splits, calls: Mapping[int, _native.MadeCall]) -> list[str]:
    """Of sizes that are exchanged pair by pair the first pair that does not fit tells."""
    sides = [_Side([rank], [calls[rank]]) for rank in sorted({splits.sender, splits.receiver})]
    width = dtype_width(calls[splits.sender].description)
    if width:
        what, awaited = elements(splits.bytes_sent // width), str(splits.bytes_expected // width)
    else:
        what, awaited = f"{splits.bytes_sent} bytes", str(splits.bytes_expected)
    told = f"{info.describe(splits.sender)} sends {what} to {info.describe(splits.receiver)}, which expects {awaited}"
    return [*(line for side in sides for line in _side(info, side, "", shape=True)), f"{_INDENT}{told}"]


def _key(call: _native.MadeCall, full: bool) -> tuple[Any, ...]:
    """What must be equal."""
    key = tuple(value_of(call, field) for field in ("op", "reduce_op", "root", "device", "dtype", "count", "layout"))
    shape = call.description.shape
    return (*key, None if shape.may_differ else shape, call.result) if full else key


def _sides(calls: Mapping[int, _native.MadeCall], full: bool) -> list[_Side]:
    """The larger ones first; of equal ones that with the lowest rank."""
    sides: dict[tuple[Any, ...], _Side] = {}
    for rank, call in calls.items():
        side = sides.setdefault(_key(call, full), _Side([], []))
        side.ranks.append(rank)
        side.calls.append(call)
    return sorted(sides.values(), key=lambda side: (-len(side.ranks), side.ranks[0]))


def _first_difference(calls: Sequence[_native.MadeCall], full: bool) -> tuple[str, str, str]:
    for code, field, about in FIELDS:
        if field in ("shape", "result") and not full:
            continue
        if len({value_of(call, field) for call in calls}) > 1:
            return code, field, about
    return "OP", "op", "a call before, of which nothing is known any more"


def _value(call: _native.MadeCall, field: str) -> str:
    description = call.description
    if field == "op":
        return description.op
    if field == "reduce_op":
        return REDUCE_OP_NAMES[description.reduce_op] if description.reduce_op >= 0 else "no reduce op"
    if field == "root":
        return f"root {description.root}"
    if field == "device":
        return device_name(description)
    if field == "dtype":
        return describe_dtype(description)
    if field == "count":
        return elements(description.count) if description.count >= 0 else "sizes that may differ between ranks"
    if field == "result":
        return f"result {call.result & 0xFFFFFFFF:08x}"
    return describe_shape(description.shape)


def _side(info: GroupInfo, side: _Side, mark: str, *, shape: bool) -> list[str]:
    places: dict[str, list[int]] = {}
    for rank, call in zip(side.ranks, side.calls, strict=True):
        places.setdefault(place_of(call), []).append(rank)
    told = describe_call(side.calls[0].description, shape=shape)
    lines = [f"{_INDENT}{info.describe(*side.ranks)}: {told}{mark}"]
    for place, ranks in places.items():
        who = f" ({info.describe(*ranks)})" if len(places) > 1 else ""
        lines.append(f"{_INDENT}  at {place}{who}")
    return lines


def _refused(testimonies: Sequence[_native.Testimony]) -> dict[int, Refusal]:
    found = {rank: Refusal.unpack(seen.refused) for rank, seen in enumerate(testimonies)}
    return {rank: refusal for rank, refusal in found.items() if refusal is not None}


def _last_completed(info: GroupInfo, completed: Mapping[int, _native.MadeCall | None]) -> list[str]:
    """The last call that each rank completed, those that say the same together."""
    said: dict[str, list[int]] = {}
    for rank, call in completed.items():
        text = "none" if call is None else f"{call.description.op}, seq {call.seq}, at {place_of(call)}"
        said.setdefault(text, []).append(rank)
    if len(said) == 1:
        whose = "all ranks" if len(completed) == info.size else "both"
        return [f"{_INDENT}last completed call of {whose}: {next(iter(said))}"]
    return [f"{_INDENT}last completed call of {info.describe(*ranks)}: {text}" for text, ranks in said.items()]
