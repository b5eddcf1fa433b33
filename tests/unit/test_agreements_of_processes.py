"""The native agreement of a process, without other processes: forks, leaving while the progress thread compares."""

from __future__ import annotations

import os
import threading
import time

import pytest

from phalanx import _native
from phalanx.transports import keeper
from phalanx.transports.identities import own_identity

# No news is expected under it.
_NO_TOKEN = 1 << 60
_FLOAT = [dtype.name for dtype in _native.DTYPES].index("float32")


def _sum(count: int) -> _native.Description:
    return _native.Description("all_reduce", reduce_op=0, dtype=_FLOAT, count=count)


def _agreements(size: int, *ranks: int) -> list[_native.Agreement]:
    tuning = _native.tuning_for(size, size)
    tuning.only_posts, tuning.level = True, _native.CHECK_ON
    segment = _native.Segment.create_private(size, tuning)
    return [_native.Agreement(segment, rank, [own_identity()] * size, _NO_TOKEN) for rank in ranks]


@pytest.mark.parametrize("name", ["level", "identity", "seq", "has_left", "forked"])
def test_a_forked_child_may_ask(name: str) -> None:
    (agreement,) = _agreements(2, 0)
    child = os.fork()
    if child == 0:
        getattr(agreement, name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_rank_leaves_while_the_progress_thread_finds_a_difference() -> None:
    """Two of many ranks have come: only comparing at rest, every 30 ms, finds that they differ."""
    size = 1000

    def leave_often() -> None:
        for _ in range(60):
            one, other = _agreements(size, 1, 0)
            one.post(_sum(5))
            one.leave(False)
            other.post(_sum(4))
            while not other.failure() and time.monotonic_ns() % 30_000_000 > 300_000:
                pass
            other.leave(False)

    # A daemon: if it hangs the test fails instead of pytest.
    thread = threading.Thread(target=leave_often, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_news_that_comes_after_the_last_group_was_left() -> None:
    told = threading.Event()
    keeper.begin()
    token = keeper.expect(told.set)
    keeper.stop()
    _native.push_completion(token)
    try:
        assert told.wait(30)
    finally:
        keeper.forget(token)
        keeper.stop()


def test_the_record_of_a_message_ends_however_many_messages_have_other_peers() -> None:
    (agreement,) = _agreements(8, 0)

    def message(peer: int) -> _native.Description:
        return _native.Description("send", peer=peer, tag=0, dtype=_FLOAT, count=1)

    box = _native.BlackBox(-1, 4000, 0, 1, "test")
    agreement.keep_records(box, 0, "")
    for _ in range(1024):
        agreement.post(message(5))
    seq = agreement.post(message(1))
    before = box.contents()
    agreement.end(message(1), seq, True)
    assert box.contents() != before
