"""What it costs to post a call that another engine carries out, and how soon all processes hear of a difference.

Posts are timed in blocks, between which the ranks wait for each other, so that they post side by side. A block of posts
is followed by one of native calls that do nothing: what that takes is Python's, not the post's. The time to the news is
that from the last rank's posting of a call about which the ranks disagree until every process has been told, although
none of them waits for anything; or, where all but two ranks are absent, from the second one's posting.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from harness import Benchmark, Result, Target, main, print_table, run_ranks
from phalanx import _native
from phalanx.transports import posting
from phalanx.types import GroupInfo

SIZES = (2, 4)
MOST_NANOSECONDS = 1000.0
MOST_MILLISECONDS = 100.0
CALLS = 2000
NUM_NEWS = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def measure(options: argparse.Namespace) -> Result:
    targets, lines, numbers = [], [], {}
    for size in SIZES:
        told = run_ranks(measure_on_rank, size, 20 if options.quick else 100, backend=options.backend)
        post = max(statistics.median(seconds) for seconds, _, _ in told) * 1e9
        news = max(max(delays) for _, delays, _ in told) * 1e3
        news_at_rest = max(max(delays) for _, _, delays in told) * 1e3
        lines += [
            [f"{size} ranks, a post, ns", f"{post:.0f}"],
            [f"{size} ranks, until all know, ms", f"{news:.1f}"],
            [f"{size} ranks, until all know, others absent, ms", f"{news_at_rest:.1f}"],
        ]
        numbers[str(size)] = {"post_ns": post, "news_ms": news, "news_at_rest_ms": news_at_rest}
        targets += [
            Target(f"posting, {size} ranks: at most 1 µs natively", f"{post:.0f} ns", post <= MOST_NANOSECONDS),
            Target(
                f"a difference, {size} ranks: all processes know within {MOST_MILLISECONDS:g} ms",
                f"{news:.1f} ms",
                news <= MOST_MILLISECONDS,
            ),
            Target(
                f"the same, {size} ranks, while all but two are absent",
                f"{news_at_rest:.1f} ms",
                news_at_rest <= MOST_MILLISECONDS,
            ),
        ]
    print_table("Posted calls", ["", "slowest rank"], lines)
    return Result(numbers, targets)


def measure_on_rank(rank: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    posted = _join(rank, "posts", _fail)
    call = _sum(4)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS):
            posted.post(call)
        between = time.perf_counter()
        for _ in range(CALLS):
            call.agrees_with(call)
        ended = time.perf_counter()
        seconds.append(((between - began) - (ended - between)) / CALLS)
    assert not posted.has_failed
    posted.close()
    everybody = dist.get_world_size()
    news, news_at_rest = ([_time_news(rank, number, num) for number in range(NUM_NEWS)] for num in (everybody, 2))
    return seconds, news, news_at_rest


def _time_news(rank: int, number: int, num_ranks: int) -> float:
    """Seconds from the post of the last of the first ranks, which are those that come, until this one was told."""
    told_at = []
    is_told = threading.Event()

    def tell() -> None:
        told_at.append(time.monotonic())
        is_told.set()

    posted = _join(rank, f"news {number} of {num_ranks}", tell)
    dist.barrier()
    posted_at = time.monotonic()
    if rank < num_ranks:
        posted.post(_sum(4 + rank))
    assert is_told.wait(30)
    # The clock is the same for all processes of a host.
    last = torch.tensor([posted_at if rank < num_ranks else 0.0], dtype=torch.float64)
    dist.all_reduce(last, dist.ReduceOp.MAX)
    posted.close()
    return told_at[0] - last.item()


def _join(rank: int, name: str, on_failure: Callable[[], None]) -> posting.PostedCalls:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(seconds=30))
    return posting.join(store, GroupInfo(name, rank, dist.get_world_size()), 30, on_failure)


def _fail() -> None:
    raise AssertionError("the ranks agree")


def _sum(count: int) -> _native.Description:
    dtype = [dtype.name for dtype in _native.DTYPES].index("float32")
    return _native.Description("all_reduce", reduce_op=0, dtype=dtype, count=count)


BENCHMARK = Benchmark("posting", add_options, measure)

if __name__ == "__main__":
    sys.exit(main(__doc__, BENCHMARK))
