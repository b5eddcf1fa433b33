"""A job as it was at some moment of its past: what came later is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.debug.job import Process
from phalanx.debug.records import RUNNING, Record

__all__ = ["as_of"]


def as_of(processes: Sequence[Process], ns: int) -> list[Process]:
    """The processes just before the moment. All of them were running: those that were not have no call under way."""
    return [
        Process(
            replace(
                process.box, records=_records_at(process.box.records, ns), makings=_records_at(process.box.makings, ns)
            ),
            RUNNING,
        )
        for process in processes
    ]


def _records_at(records: Sequence[Record], ns: int) -> list[Record]:
    return [record for each in records if (record := _record_at(each, ns))]


def _record_at(record: Record, ns: int) -> Record | None:
    if record.created_ns >= ns:
        return None
    if record.ended_ns is not None and record.ended_ns < ns:
        return record
    if record.ended_ns is None and record.state == "scheduled":
        return record
    has_begun = record.started_ns is not None and record.started_ns < ns
    return replace(
        record,
        state="started" if has_begun else "scheduled",
        started_ns=record.started_ns if has_begun else None,
        ended_ns=None,
        failure=None,
    )
