"""Runs all benchmarks: importing, memory, collectives, messages, asynchrony, DDP, and tests in one process."""

import sys

import asynchronous
import collectives
import ddp
import import_time
import memory
import messages
import one_process
from harness import main

MODULES = (import_time, memory, collectives, messages, asynchronous, ddp, one_process)

if __name__ == "__main__":
    sys.exit(main(__doc__, *(module.BENCHMARK for module in MODULES)))
