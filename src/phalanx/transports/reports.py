"""What a report says when ranks disagree, as lines of text: made of what the finder froze, so that all ranks say the
same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.transports.signatures import FIELDS, Facts, Signature, Sizes, dtype_name, dtype_width, elements
from phalanx.types import REDUCE_OP_NAMES, GroupInfo

__all__ = ["Report", "describe_misfit", "describe_mismatch", "describe_shapes"]

_INDENT = "  "


class Report(NamedTuple):
    """The field of the error's code, what it is about in one line, and the lines below."""

    field: str
    about: str
    lines: list[str]


class _Side(NamedTuple):
    """Ranks whose calls agree."""

    ranks: list[int]
    calls: list[Signature]


def describe_mismatch(
    info: GroupInfo, failure: dict[str, Any], testimonies: Sequence[tuple[Facts | None, Facts | None]], full: bool
) -> Report:
    """`testimonies` has what each rank called, if it had, and the last call that it completed."""
    calls = {rank: Signature.from_native(call) for rank, (call, _) in enumerate(testimonies) if call is not None}
    completed = {rank: _last(testimonies, rank) for rank in range(info.size)}
    _, sent, _, expected, _ = failure["misfit"]
    if sent != expected:
        lines = _splits(info, failure, calls)
        return Report("SPLITS", "about the sizes they exchange", lines + _last_completed(info, completed))
    sides = _sides(calls, full)
    code, field, about = _first_difference([side.calls[0] for side in sides], full)
    most = sides[0].ranks
    has_majority = 2 * len(most) > len(calls)
    lines = [f"{_INDENT}the group has {info.describe(*range(info.size))}"]
    for side in sides:
        is_odd = not has_majority or side.ranks is not most
        mark = f"  <-- {_value(side.calls[0], field)}" if is_odd else ""
        lines += _side(info, side, mark, shape=field == "sizes")
    absent = [rank for rank in range(info.size) if rank not in calls]
    if absent:
        lines.append(f"{_INDENT}{info.describe(*absent)}: had not made this call")
    if not has_majority:
        lines.append(f"{_INDENT}no majority: any of these may be the one to mend")
    return Report(code, f"about {about}", lines + _last_completed(info, completed))


def describe_shapes(info: GroupInfo, op: str, seq: int, sides: Sequence[tuple[int, Any, str]]) -> str:
    """A warning: calls that agree but for the shape of a tensor. Of each side the rank, the sizes and the place."""
    said = "; ".join(
        f"{info.describe(rank)} has {Sizes(*sizes).describe()}, at {where or 'a line that is not known'}"
        for rank, sizes, where in sides
    )
    return (
        f"{op}, seq {seq}, group {info.name!r}: ranks pass tensors of the same number of elements in different shapes: "
        f"{said}. The elements are taken in order; TORCH_DISTRIBUTED_DEBUG=DETAIL makes this an error. "
        "Said once a group."
    )


def describe_misfit(
    info: GroupInfo, failure: dict[str, Any], testimonies: Sequence[tuple[Facts | None, Facts | None]]
) -> Report:
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
    lines = [
        f"{_INDENT}{sender}: send({elements(sent)} of {dtype_name(sent_dtype)}, to {receiver}, tag {tag})"
        f"  <-- {marks[0]}",
        f"{_INDENT}  at {sent_where or 'a line that is not known'}",
        f"{_INDENT}{receiver}: recv({elements(expected)} of {dtype_name(expected_dtype)}, from {sender}, tag {tag})"
        f"  <-- {marks[1]}",
        f"{_INDENT}  at {received_where or 'a line that is not known'}",
        *_last_completed(info, {rank: _last(testimonies, rank) for rank in (failure["peer"], failure["rank"])}),
    ]
    return Report(
        "COUNT" if is_count else "DTYPE", f"{sender} and {receiver} disagree about {about} of a message", lines
    )


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


def _last(testimonies: Sequence[tuple[Facts | None, Facts | None]], rank: int) -> Signature | None:
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
