"""Runs all benchmarks: imports, memory, groups, calls, DDP, one process, reports, posts, guards, old version."""

import sys

import asynchronous
import collectives
import ddp
import explaining
import front
import guarding
import import_time
import in_flight
import making_groups
import memory
import messages
import methods
import one_process
import posting
import versions
from harness import main

MODULES = (
    import_time,
    memory,
    making_groups,
    collectives,
    messages,
    methods,
    front,
    asynchronous,
    in_flight,
    ddp,
    one_process,
    explaining,
    posting,
    guarding,
    versions,
)

if __name__ == "__main__":
    sys.exit(main(__doc__, *(module.BENCHMARK for module in MODULES)))
