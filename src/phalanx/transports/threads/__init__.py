"""Ranks that are threads of one process.

    here.py        the run that this thread is a rank of
    transport.py   one rank's end of a group: what a group asks of a transport
    pending.py     a call under way, for the rank that made it
    hub.py         what the ranks of a group share, and how it ends
    meeting.py     how the ranks of a new group come together
    agreement.py   the native engine that finds where calls differ, keeps the first failure, and knows who has left
    measuring.py   what it is told of tensors
    calls.py       collectives: they come, and their meaning is carried out once all ranks have come
    messages.py    sends and receives find each other
    refusals.py    tells ranks of calls that a peer refused
    in_flight.py   what a rank waits for
    futures.py, counting.py, recording.py

Who runs when, what time it is and which rank to wake is the scheduler's business (`transports/base.py`). Failures are
told in the words of the other transports (`transports/failures.py`).
"""

from __future__ import annotations

from phalanx.transports.threads.here import Origin, Run, this_thread
from phalanx.transports.threads.transport import WAIT_FOR_THREADS, ThreadsTransport

__all__ = ["WAIT_FOR_THREADS", "Origin", "Run", "ThreadsTransport", "this_thread"]
