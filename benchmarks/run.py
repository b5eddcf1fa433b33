"""Runs all benchmarks: importing, memory, making groups, calls of all kinds, DDP, tests in one process, explaining."""

import sys

import asynchronous
import collectives
import ddp
import explaining
import import_time
import in_flight
import making_groups
import memory
import messages
import methods
import one_process
from harness import main

MODULES = (
    import_time,
    memory,
    making_groups,
    collectives,
    messages,
    methods,
    asynchronous,
    in_flight,
    ddp,
    one_process,
    explaining,
)

if __name__ == "__main__":
    sys.exit(main(__doc__, *(module.BENCHMARK for module in MODULES)))
