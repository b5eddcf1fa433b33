"""Random right programs that wait a lot: none is called a deadlock, however often and early is looked for one.

Waits count as long after a few milliseconds here, and processes look around all the time.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import Here, values
from test_deadlocks import Warnings
from waiting_programs import draw_groups, draw_steps, play

from phalanx import _native
from phalanx.debug import observing
from phalanx.log import logger

# Of each world; more in `make soak`.
_PROGRAMS = 6 * int(os.environ.get("PHALANX_WAITING_PROGRAMS", "1"))
_SEED = int(os.environ.get("PHALANX_WAITING_SEED", "1"))
_LONG, _PERIOD = 0.004, 0.004


def _play_all(here: Here, seed: int, num: int) -> tuple[list[str], int]:
    warnings = Warnings()
    logger.addHandler(warnings)
    here.init(timeout=60)
    members = draw_groups(seed, here.size)
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=60)) for ranks in members]
    watch = observing.wait_watch()
    watch.period = _PERIOD
    _native.set_long(watch.begin, _LONG)
    for number in range(num):
        play(here.rank, draw_steps(f"{seed} {number}", members), groups)
        dist.barrier()
    num_looks = watch.num_looks
    dist.destroy_process_group()
    return [text for text in warnings.texts if "deadlock" in text], num_looks


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_none_is_called_a_deadlock(size: int, tmp_path: Path) -> None:
    found = values(_play_all, size, tmp_path, _SEED * 1000 + size, _PROGRAMS, timeout=3500)
    looks = sum(num_looks for _, num_looks in found)
    print(f"{_PROGRAMS} programs of {size} ranks, {looks} looks")
    assert [warnings for warnings, _ in found] == [[]] * size
    assert looks > _PROGRAMS
