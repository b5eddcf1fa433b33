"""What black boxes have of calls that ranks have posted, for a report about calls that were overwritten since."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phalanx import _native
from phalanx.debug.box_reader import read_box
from phalanx.debug.job_folder import JobFolder
from phalanx.debug.own_box import own_box
from phalanx.debug.records import Box, Record
from phalanx.transports.posting import PostedCalls
from phalanx.types import NO_REDUCE_OP, REDUCE_OP_NAMES, GroupInfo

__all__ = ["recorded_calls"]

_DTYPES = {dtype.name: number for number, dtype in enumerate(_native.DTYPES)}
_REDUCE_OPS = {name: number for number, name in enumerate(REDUCE_OP_NAMES)}


def recorded_calls(
    group: PostedCalls, info: GroupInfo, failure: _native.Failure
) -> dict[int, dict[int, _native.MadeCall]]:
    """By rank and number: the collectives about which ranks disagree, after the last one that is known to agree."""
    found = {}
    for rank in range(info.size):
        box = own_box().read() if rank == info.rank else _box_at(group.box_of(rank))
        records = [] if box is None else box.records
        found[rank] = {record.seq: _made_call(record) for record in _in_question(records, group.identity, failure)}
    return found


def _in_question(records: Iterable[Record], identity: str, failure: _native.Failure) -> Iterable[Record]:
    return (
        record
        for record in records
        if record.group.identity == identity and not record.is_message and failure.agreed < record.seq <= failure.seq
    )


def _box_at(path: str) -> Box | None:
    """None where it is out of reach."""
    if not path:
        return None
    try:
        with JobFolder.own(Path(path).parent) as folder, folder.open(Path(path).name) as file:
            return read_box(file)
    except (OSError, ValueError):
        return None


def _made_call(record: Record) -> _native.MadeCall:
    dtype = 0 if record.dtype is None else _DTYPES.get(record.dtype, _native.OTHER_DTYPE)
    sizes = record.sizes if len(record.sizes) == record.num_sizes else ()
    flags = (_native.IN_BACKWARD if record.in_backward else 0) | (_native.BY_REDUCER if record.by_reducer else 0)
    description = _native.Description(
        record.op,
        reduce_op=NO_REDUCE_OP if record.reduce_op is None else _REDUCE_OPS[record.reduce_op],
        dtype=dtype,
        unlisted_dtype=record.unlisted_dtype,
        root=record.root,
        count=record.count,
        sizes=list(sizes) if record.is_list else tuple(sizes),
        flags=flags,
    )
    where = "" if record.location is None else record.location.describe()
    return _native.MadeCall(description, seq=record.seq, where=where)
