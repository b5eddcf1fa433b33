"""Runs all benchmarks: importing, memory, collectives, messages, asynchrony, DDP, tests in one process, explaining."""

import sys

import asynchronous
import collectives
import ddp
import explaining
import import_time
import memory
import messages
import one_process
from harness import main

MODULES = (import_time, memory, collectives, messages, asynchronous, ddp, one_process, explaining)

if __name__ == "__main__":
    sys.exit(main(__doc__, *(module.BENCHMARK for module in MODULES)))
