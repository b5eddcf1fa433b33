"""Black boxes as traces of torch's flight recorder, for its analyzer (`torchfrtrace`) and other tools that read them.

The analyzer compares what ranks say of a call entry by entry, so an entry says it in one way for all ranks: sizes are
flat, in elements, and taken from what ranks have to agree on. What it has no word for is under keys of our own.

- A failed call is one that has not completed: the analyzer knows no failures.
- It expects every rank of a group in each entry. So messages from one rank to another are entries of a group of these
  two, `<group> <source>-><destination>`, numbered among themselves; a receive from any rank is one of its rank alone.
- It knows one group of a name, and each number once: of groups that came one after another under a name, the last is
  kept. Of groups that lived at the same time, the second is `<group> (2)`, in the order of their first calls.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx import _native
from phalanx.debug.job import newest_group
from phalanx.debug.records import Box, GroupName, Record

__all__ = ["PREFIX", "align", "dump", "encode", "file_name", "floors_of", "outline_of", "trace_of", "write"]

Format = Literal["pickle", "json"]
FlightTrace = dict[str, Any]

PREFIX = "rank_"

_VERSION = "2.10"
# The analyzer takes the names of backends that it knows.
_BACKEND = "gloo"
# The analyzer shows no description where it reads this.
_NO_DESCRIPTION = "undefined"
_ITEM_BYTES = {dtype.name: dtype.width for dtype in _native.DTYPES}
# c10's names, where they are not ours with a capital letter.
_C10_NAMES = {
    "uint8": "Byte",
    "int8": "Char",
    "uint16": "UInt16",
    "int16": "Short",
    "uint32": "UInt32",
    "int32": "Int",
    "uint64": "UInt64",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    "qint8": "QInt8",
    "quint8": "QUInt8",
    "qint32": "QInt32",
    "bcomplex32": "BComplex32",
} | {f"uint{bits}": f"UInt{bits}" for bits in range(1, 8)}


def dump(box: Box, path: str | os.PathLike[str], format: Format = "pickle", short: bool = False) -> None:  # noqa: A002
    """Writes the box's trace. The file is there as a whole or not at all, and for its owner only.

    A short one has what the analyzer needs and no more: no frames, no times but that of creation, none of our own keys.
    """
    write(trace_of(box, short), path, format)


def file_name(rank: int, format: Format = "pickle") -> str:  # noqa: A002
    """Of a rank's dump in a folder. The analyzer takes every file whose name has the prefix for a pickle."""
    return f"{PREFIX}{rank}" if format == "pickle" else f"rank-{rank}.json"


def trace_of(box: Box, short: bool = False) -> FlightTrace:
    groups: dict[str, dict[str, str]] = {}
    entries = []
    # By the object that a box has for each of its groups: to compare those is to compare all of their ranks.
    known: dict[tuple[object, ...], tuple[str, str, list[int]]] = {}
    for number, record in _newest(box.records):
        # Collectives of a group are all the same group to the analyzer, whatever their roots are.
        key = (id(record.group), record.op, record.peer) if record.is_message else (id(record.group),)
        if key not in known:
            name, desc, ranks = known[key] = _group_of(record, number)
            # Groups of the same ranks, on all of these, share the text.
            groups[name] = {"desc": desc, "ranks": sys.intern(str(ranks))}
        entries.append(_entry(record, *known[key], short))
    trace: FlightTrace = {"version": _VERSION, "pg_config": groups, "entries": entries}
    if not short:
        trace["phalanx"] = {
            field: getattr(box, field)
            for field in ("rank", "world_size", "host", "pid", "program", "ending", "num_begun")
        }
    return trace


@dataclass(slots=True)
class Outline:
    """What the other ranks' traces need to know of a rank's."""

    groups: dict[str, str]  # the ranks of each, by name
    firsts: dict[str, int]  # the seq of each group's first entry
    has_lost: bool  # whether records gave way to others


# By name and ranks of a group, the first seq of which all its ranks have records; None where numbers do not tell.
Floors = dict[tuple[str, str], int | None]


def outline_of(trace: FlightTrace) -> Outline:
    entries = trace["entries"]
    firsts: dict[str, int] = {}
    for entry in entries:
        firsts.setdefault(entry["process_group"][0], entry["collective_seq_id"])
    groups = {name: group["ranks"] for name, group in trace["pg_config"].items()}
    return Outline(groups, firsts, bool(entries) and entries[0]["record_id"] > 1)


def floors_of(outlines: Mapping[int, Outline]) -> Floors:
    """From where on traces can be compared, by the outlines of all ranks.

    Numbers do not tell where a rank has no record of the group left, or receives from any rank, which leaves it open
    whose message it got.
    """
    groups = {group for outline in outlines.values() for group in outline.groups.items()}
    floors: Floors = {}
    for name, ranks in groups:
        losers = [outlines[rank] for rank in json.loads(ranks) if rank in outlines and outlines[rank].has_lost]
        firsts = [outline.firsts.get(name) for outline in losers]
        ends, _, destination = name.rpartition("->")
        is_open = (f"{ends.rpartition(' ')[0]} any->{destination}", f"[{destination}]") in groups
        floors[name, ranks] = None if is_open or None in firsts else max((first or 0 for first in firsts), default=0)
    return floors


def align(trace: FlightTrace, floors: Floors) -> None:
    """Leaves out the calls that a rank of their group has no record of any more, and numbers entries from 1.

    Ranks make different numbers of calls, so their boxes reach back to different ones. The analyzer would take such
    calls for calls that the rank did not make.
    """
    kept: list[dict[str, Any]] = []
    for entry in trace["entries"]:
        name = entry["process_group"][0]
        floor = floors[name, trace["pg_config"][name]["ranks"]]
        # What has completed needs no partner; what has not may be missing one.
        if entry["state"] != "completed" if floor is None else entry["collective_seq_id"] >= floor:
            kept.append({**entry, "record_id": len(kept) + 1})
    trace["entries"] = kept


def encode(trace: FlightTrace, format: Format = "pickle") -> bytes:  # noqa: A002
    return pickle.dumps(trace) if format == "pickle" else json.dumps(trace, indent=1).encode()


def write(trace: FlightTrace, path: str | os.PathLike[str], format: Format = "pickle") -> None:  # noqa: A002
    data = encode(trace, format)
    # A name that the analyzer does not take for a dump, should it stay behind.
    number, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=Path(path).parent)
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _newest(records: Sequence[Record]) -> list[tuple[int, Record]]:
    """Those of the last groups of each name, each with the number of its group among those."""
    by_name: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.group.rank >= 0 and record.seq:
            by_name[record.group.name][record.group.identity].append(record)
    kept = []
    for by_identity in by_name.values():
        groups = list(by_identity.values())
        # One that has a call after the last of them began was still there.
        live = [group for group in groups if group[-1].number >= groups[-1][0].number]
        for number, calls in enumerate(live, 1):
            same = [record for record in calls if record.group.ranks == calls[-1].group.ranks]
            begin = 0 if calls[-1].group.identity else newest_group(same)
            kept += [(number, record) for record in same[begin:]]
    return sorted(kept, key=lambda each: each[1].number)


def _group_of(record: Record, number: int) -> tuple[str, str, list[int]]:
    """Name, description and ranks of the group that the analyzer is to know the call by."""
    group = record.group
    group_name = group.name if number == 1 else f"{group.name} ({number})"
    if not record.is_message:
        return group_name, group.desc or _NO_DESCRIPTION, sorted(group.ranks) or [group.rank]
    own, peer = _ends(group, record.peer)
    source, destination = (own, peer) if record.op == "send" else (peer, own)
    sender = "any" if record.peer < 0 else source
    return f"{group_name} {sender}->{destination}", "messages", sorted({source, destination})


def _ends(group: GroupName, peer: int) -> tuple[int, int]:
    """The ranks of a message in the job. A rank that receives from any is taken for its own peer."""
    own = group.rank_in_job(group.rank)
    return own, own if peer < 0 else group.rank_in_job(peer)


def _entry(record: Record, name: str, desc: str, ranks: list[int], short: bool) -> dict[str, Any]:
    op, sizes_in, sizes_out = _sizes(record, len(ranks))
    if record.is_message:
        own, peer = (ranks.index(rank) for rank in _ends(record.group, record.peer))
        op += f" {own}->{peer}" if op == "send" else f" {own}<-{peer}"
    dtypes = [] if record.op == "barrier" else [_c10_name(record.dtype)]
    entry: dict[str, Any] = {
        "record_id": record.number,
        "process_group": (name, desc),
        "collective_seq_id": record.seq,
        "p2p_seq_id": record.seq if record.is_message else 0,
        "is_p2p": record.is_message,
        "profiling_name": f"{_BACKEND}:{op}",
        "state": _state(record),
        "input_sizes": [sizes_in],
        "output_sizes": [sizes_out],
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "time_created_ns": record.created_ns,
    }
    return entry if short else entry | _more(record)


def _more(record: Record) -> dict[str, Any]:
    """What a short entry leaves out."""
    place = record.location
    took = None
    if record.started_ns is not None and record.ended_ns is not None:
        took = (record.ended_ns - record.started_ns) / 1e6
    return {
        "op_id": record.number,
        "frames": [{"name": place.function, "filename": place.filename, "line": place.line}] if place else [],
        "time_discovered_started_ns": record.started_ns,
        "time_discovered_completed_ns": record.ended_ns if record.state == "completed" else None,
        "duration_ms": took,
        "timeout_ms": record.timeout_ms,
        "retired": record.state in ("completed", "failed"),
        "failed": record.state == "failed",
        "reduce_op": record.reduce_op,
        "root": record.root,
        # Readers of traces know the root of a collective by this key, too.
        "peer": record.peer if record.is_message else record.root,
        "sender": record.sender,
        "last_arriver": record.last_arriver,
        "tag": record.tag,
        "device": record.device,
        "engine": record.engine,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "sizes": list(record.sizes),
        "is_list": record.is_list,
        "is_async": record.is_async,
        "in_backward": record.in_backward,
        "by_reducer": record.by_reducer,
    }


def _state(record: Record) -> str:
    if record.state != "failed":
        return record.state
    return "scheduled" if record.started_ns is None else "started"


def _sizes(record: Record, num_ranks: int) -> tuple[str, list[int], list[int]]:
    """The op as the analyzer knows it, and its sizes. No size at all says that a rank passes no tensor."""
    item = _ITEM_BYTES.get(record.dtype or "", 1)
    read, written = record.bytes_in // item, record.bytes_out // item
    count = record.count
    match record.op:
        case "barrier":
            return record.op, [], []
        case "all_gather" | "reduce_scatter" if count % num_ranks:
            # Blocks of different sizes: the analyzer does not multiply those.
            return f"{record.op}_v", [count], [count]
        case "all_gather":
            return record.op, [count // num_ranks], [count]
        case "reduce_scatter":
            return record.op, [count], [count // num_ranks]
        case "gather":
            return record.op, [count], [written] if written else []
        case "scatter":
            return record.op, [read] if read else [], [count]
        case "all_to_all":
            return record.op, [read], [written]
    return record.op, [count], [count]


def _c10_name(dtype: str | None) -> str:
    if dtype is None:
        return "Undefined"
    return _C10_NAMES.get(dtype, dtype.capitalize())
