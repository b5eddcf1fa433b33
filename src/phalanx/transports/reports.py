"""What a report says when ranks disagree, as lines of text: made of what the finder froze, so that all ranks say the
same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.printable import printable
from phalanx.transports.refusals import Refusal
from phalanx.transports.signatures import FIELDS, Facts, Signature, Sizes, dtype_name, dtype_width, elements
from phalanx.types import REDUCE_OP_NAMES, GroupInfo

__all__ = [
    "Report",
    "Testimony",
    "describe_awaited_refusals",
    "describe_misfit",
    "describe_mismatch",
    "describe_refusals",
    "describe_shapes",
    "fix_refused",
]

_INDENT = "  "

# What the finder of a mismatch saw of a rank: its call, if it had come, the last call that it completed, and the last
# one that it had refused.
Testimony = tuple[Facts | None, Facts | None, str]


class Report(NamedTuple):
    """The field of the error's code, what it is about in one line, the lines below, and what ranks had refused."""

    field: str
    about: str
    lines: list[str]
    refusals: Mapping[int, Refusal]


class _Side(NamedTuple):
    """Ranks whose calls agree."""

    ranks: list[int]
    calls: list[Signature]


def describe_mismatch(info: GroupInfo, failure: dict[str, Any], testimonies: Sequence[Testimony], full: bool) -> Report:
    calls = {rank: Signature.from_native(call) for rank, (call, _, _) in enumerate(testimonies) if call is not None}
    refusals = {rank: refusal for rank, refusal in _refused(testimonies).items() if refusal.seq == failure["seq"]}
    completed = {rank: _last(testimonies, rank) for rank in range(info.size)}
    _, sent, _, expected, _ = failure["misfit"]
    if sent != expected:
        lines = _splits(info, failure, calls)
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
        lines += _side(info, side, mark, shape=field == "sizes" or (full and field in ("op", "count")))
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


def describe_shapes(info: GroupInfo, op: str, seq: int, sides: Sequence[tuple[int, Any, str]]) -> str:
    """A warning: calls that agree but for the shape of a tensor. Of each side the rank, the sizes and the place."""
    said = "; ".join(
        f"{info.describe(rank)} has {Sizes(*sizes).describe()}, at {printable(where) or 'an unknown source line'}"
        for rank, sizes, where in sides
    )
    return (
        f"{op}, seq {seq}, group {info.name!r}: ranks pass tensors of the same number of elements in different shapes: "
        f"{said}. The elements are taken in order; TORCH_DISTRIBUTED_DEBUG=DETAIL makes this an error. "
        "Said once a group."
    )


def describe_misfit(info: GroupInfo, failure: dict[str, Any], testimonies: Sequence[Testimony]) -> Report:
    """Of a message that does not fit its receive."""
    sent_dtype, sent, expected_dtype, expected, tag = failure["misfit"]
    receiver, sender = info.describe(failure["rank"]), info.describe(failure["peer"])
    is_count = sent_dtype == expected_dtype and sent != expected
    about = "the number of elements" if is_count else "the dtype"
    marks = [
        elements(count) if is_count else dtype_name(dtype)
        for dtype, count in ((sent_dtype, sent), (expected_dtype, expected))
    ]
    sent_where, received_where = failure["where"]
    sides = {(failure["peer"], "send", failure["rank"]), (failure["rank"], "recv", failure["peer"])}
    refusals = {
        rank: refusal
        for rank, refusal in _refused(testimonies).items()
        if any(rank == side and refusal.is_made_by(op, other, tag) for side, op, other in sides)
    }
    lines = [
        f"{_INDENT}{sender}: send({elements(sent)} of {dtype_name(sent_dtype)}, to {receiver}, tag {tag})"
        f"  <-- {marks[0]}",
        f"{_INDENT}  at {sent_where or 'a line that is not known'}",
        f"{_INDENT}{receiver}: recv({elements(expected)} of {dtype_name(expected_dtype)}, from {sender}, tag {tag})"
        f"  <-- {marks[1]}",
        f"{_INDENT}  at {received_where or 'a line that is not known'}",
        *describe_refusals(info, refusals),
        *_last_completed(info, {rank: _last(testimonies, rank) for rank in (failure["peer"], failure["rank"])}),
    ]
    told = f"{sender} and {receiver} disagree about {about} of a message"
    return Report("COUNT" if is_count else "DTYPE", told, lines, refusals)


def _splits(info: GroupInfo, failure: dict[str, Any], calls: dict[int, Signature]) -> list[str]:
    """Of sizes that are exchanged pair by pair the first pair that does not fit tells."""
    sender, receiver = failure["rank"], failure["peer"]
    _, sent, _, expected, _ = failure["misfit"]
    sides = [_Side([rank], [calls[rank]]) for rank in sorted({sender, receiver})]
    width = dtype_width(calls[sender].dtype)
    if width:
        what, awaited = elements(sent // width), str(expected // width)
    else:
        what, awaited = f"{sent} bytes", str(expected)
    told = f"{info.describe(sender)} sends {what} to {info.describe(receiver)}, which expects {awaited}"
    return [*(line for side in sides for line in _side(info, side, "", shape=True)), f"{_INDENT}{told}"]


def _key(call: Signature, full: bool) -> tuple[Any, ...]:
    """What must be equal."""
    key = (call.op, call.reduce_op, call.root, call.dtype, call.count, call.layout)
    return (*key, call.sizes if call.count >= 0 and not call.sizes.listed else None, call.result) if full else key


def _sides(calls: dict[int, Signature], full: bool) -> list[_Side]:
    """The larger ones first; of equal ones that with the lowest rank."""
    sides: dict[tuple[Any, ...], _Side] = {}
    for rank, call in calls.items():
        side = sides.setdefault(_key(call, full), _Side([], []))
        side.ranks.append(rank)
        side.calls.append(call)
    return sorted(sides.values(), key=lambda side: (-len(side.ranks), side.ranks[0]))


def _first_difference(calls: Sequence[Signature], full: bool) -> tuple[str, str, str]:
    for code, field, about in FIELDS:
        if field in ("sizes", "result") and not full:
            continue
        if len({getattr(call, field) for call in calls}) > 1:
            return code, field, about
    return "OP", "op", "a call before, of which nothing is known any more"


def _value(call: Signature, field: str) -> str:
    if field == "op":
        return call.op
    if field == "reduce_op":
        return REDUCE_OP_NAMES[call.reduce_op] if call.reduce_op >= 0 else "no reduce op"
    if field == "root":
        return f"root {call.root}"
    if field == "dtype":
        return dtype_name(call.dtype)
    if field == "count":
        return elements(call.count) if call.count >= 0 else "sizes that may differ between ranks"
    if field == "result":
        return f"result {call.result & 0xFFFFFFFF:08x}"
    return call.sizes.describe()


def _side(info: GroupInfo, side: _Side, mark: str, *, shape: bool) -> list[str]:
    places: dict[str, list[int]] = {}
    for rank, call in zip(side.ranks, side.calls, strict=True):
        places.setdefault(call.place(), []).append(rank)
    lines = [f"{_INDENT}{info.describe(*side.ranks)}: {side.calls[0].describe(shape=shape)}{mark}"]
    for place, ranks in places.items():
        who = f" ({info.describe(*ranks)})" if len(places) > 1 else ""
        lines.append(f"{_INDENT}  at {place}{who}")
    return lines


def _refused(testimonies: Sequence[Testimony]) -> dict[int, Refusal]:
    found = {rank: Refusal.unpack(text) for rank, (_, _, text) in enumerate(testimonies)}
    return {rank: refusal for rank, refusal in found.items() if refusal is not None}


def _last(testimonies: Sequence[Testimony], rank: int) -> Signature | None:
    last = testimonies[rank][1]
    return None if last is None else Signature.from_native(last)


def _last_completed(info: GroupInfo, completed: Mapping[int, Signature | None]) -> list[str]:
    """The last call that each rank completed, those that say the same together."""
    said: dict[str, list[int]] = {}
    for rank, call in completed.items():
        text = "none" if call is None else f"{call.op}, seq {call.seq}, at {call.place()}"
        said.setdefault(text, []).append(rank)
    if len(said) == 1:
        whose = "all ranks" if len(completed) == info.size else "both"
        return [f"{_INDENT}last completed call of {whose}: {next(iter(said))}"]
    return [f"{_INDENT}last completed call of {info.describe(*ranks)}: {text}" for text, ranks in said.items()]
