"""For tests of distributed programs: all ranks in one process, deterministic.

runner.py      run: a function as several ranks
world.py       the world of one run: what each rank has of its own, where groups meet
scheduler.py   whose turn it is, and what time
schedules.py   who chooses, and choices as a string
faults.py      kill, delay, fail
graph.py       deadlocks in words
"""

from phalanx.errors import Deadlock
from phalanx.testing.faults import delay, fail, kill
from phalanx.testing.runner import Stuck, run
from phalanx.testing.world import World

__all__ = ["Deadlock", "Stuck", "World", "delay", "fail", "kill", "run"]
