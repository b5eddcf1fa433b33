"""Processes whose boxes were made by hand, and the report on them."""

from __future__ import annotations

from boxes import EPOCH, SECOND, Call, box_of, collective

from phalanx.debug.job import Process
from phalanx.debug.records import RUNNING
from phalanx.reporters.text import report_lines

NOW = EPOCH + int(14.3 * SECOND)
# Six calls, the last of which ended 12.4 seconds ago.
SIX = [Call(seq=seq, at=1.299 + seq / 10) for seq in range(1, 7)]
ALL_IS_WELL = "Nothing is wrong, as far as the boxes tell."


def process(rank: int, *calls: Call, size: int = 2, ending: str = RUNNING, start: int = 1, **header: object) -> Process:
    return Process(box_of(*calls, rank=rank, world_size=size, pid=100 + rank, start=start, **header), ending)


def report(*processes: Process) -> list[str]:
    return report_lines("job", processes, NOW)


def seventh(**fields: object) -> Call:
    """The call after the six."""
    return collective("all_reduce", **({"seq": 7, "state": "started", "at": 2.0} | fields))  # type: ignore[arg-type]
