"""Runs all benchmarks: importing, memory of groups, collectives, messages, asynchrony, and training with DDP."""

import sys

import asynchronous
import collectives
import ddp
import import_time
import memory
import messages
from harness import main

MODULES = (import_time, memory, collectives, messages, asynchronous, ddp)

if __name__ == "__main__":
    sys.exit(main(__doc__, *(module.BENCHMARK for module in MODULES)))
