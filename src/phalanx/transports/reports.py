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


class Report(NamedTuple):
    """The field of the error's code, what it is about in one line, the lines below, and what ranks had refused."""

    field: str
    about: str
    lines: list[str]
    refusals: Mapping[int, Refusal]


class _Side(NamedTuple):
    """Ranks whose calls agree."""

    ranks: list[int]
    calls: list[_native.MadeCall]


def describe_mismatch(
    info: GroupInfo, failure: _native.Failure, testimonies: Sequence[_native.Testimony], full: bool
) -> Report:
    calls = {rank: seen.call for rank, seen in enumerate(testimonies) if seen.call is not None}
    refusals = {rank: refusal for rank, refusal in _refused(testimonies).items() if refusal.seq == failure.seq}
    completed = {rank: testimonies[rank].completed for rank in range(info.size)}
    if failure.splits is not None:
        lines = _splits(info, failure.splits, calls)
        lines += describe_refusals(info, refusals)
        return Report("SPLITS", "about the sizes they exchange", lines + _last_completed(info, completed), refusals)
    sides = _sides(calls, full)
    code, field, about = _first_difference([side.calls[0] for side in sides], full)
    most = sides[0].ranks
    has_majority = 2 * len(most) > len(calls)
    lines = [f"{_INDENT}the group has {info.describe(*range(info.size))}"]
    for side in sides:
        is_odd = not has_majority or side.ranks is not most
        mark = f"  <-- {_value(side.calls[0], field)}" if is_odd else ""
        lines += _side(info, side, mark, shape=field == "shape" or (full and field in ("op", "count")))
    absent = [rank for rank in range(info.size) if rank not in calls]
    if absent:
        lines.append(f"{_INDENT}{info.describe(*absent)}: had not made this call")
    lines += describe_refusals(info, refusals)
    if not has_majority:
        lines.append(f"{_INDENT}no majority: any of these may be the one to mend")
    return Report(code, f"about {about}", lines + _last_completed(info, completed), refusals)


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
    sent, expected, tag = failure.misfit.sent, failure.call, failure.call.tag
    receiver, sender = info.describe(failure.rank), info.describe(failure.peer)
    is_count = dtype_of(sent) == dtype_of(expected) and sent.count != expected.count
    about = "the number of elements" if is_count else "the dtype"
    marks = [elements(side.count) if is_count else describe_dtype(side) for side in (sent, expected)]
    sides = {(failure.peer, "send", failure.rank), (failure.rank, "recv", failure.peer)}
    refusals = {
        rank: refusal
        for rank, refusal in _refused(testimonies).items()
        if any(rank == side and refusal.is_made_by(op, other, tag) for side, op, other in sides)
    }
    lines = [
        f"{_INDENT}{sender}: send({elements(sent.count)} of {describe_dtype(sent)}, to {receiver}, tag {tag})"
        f"  <-- {marks[0]}",
        f"{_INDENT}  at {failure.misfit.where or 'a line that is not known'}",
        f"{_INDENT}{receiver}: recv({elements(expected.count)} of {describe_dtype(expected)}, from {sender}, tag {tag})"
        f"  <-- {marks[1]}",
        f"{_INDENT}  at {failure.where or 'a line that is not known'}",
        *describe_refusals(info, refusals),
        *_last_completed(info, {rank: testimonies[rank].completed for rank in (failure.peer, failure.rank)}),
    ]
    told = f"{sender} and {receiver} disagree about {about} of a message"
    return Report("COUNT" if is_count else "DTYPE", told, lines, refusals)


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
    key = tuple(value_of(call, field) for field in ("op", "reduce_op", "root", "dtype", "count", "layout"))
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
