"""For tests of distributed programs: all ranks in one process, deterministic.

Files:
    runner.py         run: a function as several ranks
    options.py        what a run is given
    world.py          the world of one run: what each rank has of its own, where groups meet
    store.py          its store
    scheduler.py      whose turn it is, and what time
    scheduling.py     what schedulers have in common
    helpers.py        threads that ranks start
    outside.py        those that may come to communicate
    free.py           ranks that run when they like
    schedules.py      who chooses, and choices as a string
    belongings.py     random generators and CPUs
    twister.py        the state of a random generator, in its memory
    run_folders.py    folders that ranks share
    marks.py          the arguments of the pytest mark
    examples.py       tests of Hypothesis
    tracebacks.py     the frames that a failure shows
    faults.py         kill, delay, fail
    graph.py          deadlocks in words
    first_failure.py  which failure caused which
    processes.py      ranks that are processes
    worker.py         one of them
    watched_calls.py  its calls, counted, and faults that happen to them
"""

from phalanx.errors import Deadlock
from phalanx.testing.faults import delay, fail, kill
from phalanx.testing.runner import run
from phalanx.testing.world import Stuck, World

__all__ = ["Deadlock", "Stuck", "World", "delay", "fail", "kill", "run"]
